"""The padding of calls that CPU kernels take may hold anything, in any array."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.llvm import runtime

pytestmark = pytest.mark.skipif(
    runtime.refusal() is not None, reason=f"the kernels are not here: {runtime.refusal()}"
)

LENGTHS = np.array([40, 0, 17])
ONE = np.float32(1)
# Functions, and the sizes of their arrays beside the batch and the tokens.
CASES = {
    "softmax": (
        functools.partial(effattn.dot_product_attention, is_causal=True),
        {"query": (2, 4), "key": (2, 4), "value": (2, 6)},
    ),
    "delta rule": (
        effattn.delta_rule_attention,
        {"query": (2, 4), "key": (2, 4), "value": (2, 6), "log_decay": (2, 4), "beta": (2,)},
    ),
    "RWKV-6": (
        functools.partial(effattn.rwkv6_attention, bonus=np.ones((2, 4), np.float32)),
        {"query": (2, 4), "key": (2, 4), "value": (2, 6), "log_decay": (2, 4)},
    ),
    "selective scan": (
        functools.partial(effattn.selective_scan, rate=-np.ones((1, 6, 4), np.float32)),
        {"query": (1, 4), "key": (1, 4), "value": (1, 6), "step_size": (1, 6)},
    ),
    "native sparse": (
        functools.partial(
            effattn.native_sparse_attention,
            compression_size=4,
            compression_stride=2,
            block_size=4,
            window_size=8,
        ),
        {"query": (4, 4), "key": (2, 4), "value": (2, 6), "gates": (4, 3)},
    ),
    "indexed": (
        functools.partial(effattn.indexed_attention, top_k=5),
        {
            "query": (4, 4),
            "key": (2, 4),
            "value": (2, 6),
            "index_query": (2, 3),
            "index_key": (3,),
            "index_weights": (2,),
        },
    ),
    "Mesa layer": (
        functools.partial(effattn.mesa_attention, regulariser=np.ones((2, 4), np.float32)),
        {"query": (2, 4), "key": (2, 4), "value": (2, 6), "log_decay": (2,), "beta": (2,)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_padding_may_hold_anything(name):
    """NaN there reaches no output, and no gradient of other tokens."""
    function, sizes = CASES[name]
    rng = np.random.default_rng(2)
    padding = np.arange(40) >= LENGTHS[:, None]

    def draw(name, size):
        if name in ("beta", "step_size", "log_decay"):
            return (-ONE if name == "log_decay" else ONE) * rng.random((3, 40, *size), np.float32)
        return rng.normal(size=(3, 40, *size)).astype(np.float32) / 2

    arrays = {name: draw(name, size) for name, size in sizes.items()}

    @jax.jit
    def run(arrays):
        def call(arrays):
            lengths = {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS}
            return function(**arrays, **lengths, implementation="llvm")

        out, pull_back = jax.vjp(call, arrays)
        return out, *pull_back(jnp.cos(out))

    def filled(number):
        return {
            name: np.where(padding[(..., *[None] * (x.ndim - 2))], np.float32(number), x)
            for name, x in arrays.items()
        }

    (out, gradients), (expected, of_zeros) = run(filled(np.nan)), run(filled(0))
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(out, expected)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient[~padding], of_zeros[name][~padding])
