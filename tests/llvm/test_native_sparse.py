"""Native sparse attention by the CPU kernel, against float64 in XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.llvm import block_attention, runtime
from effattn.testing.functions import assert_close
from tests.marks import slow, slow_but_for

pytestmark = pytest.mark.skipif(
    runtime.refusal() is not None, reason=f"the kernels are not here: {runtime.refusal()}"
)

SMALL = {
    "compression_size": 8,
    "compression_stride": 4,
    "block_size": 16,
    "num_selected": 4,
    "window_size": 40,
}
# Batch, tokens, query heads, key heads, features and values, and options.
CASES = {
    "a token": ((1,), 1, 1, 1, 3, 2, SMALL),
    "less than a compressed block": ((), 7, 2, 1, 3, 2, SMALL),
    "groups": ((2,), 150, 6, 2, 20, 12, SMALL),
    "whole vectors": ((), 130, 16, 1, 32, 16, SMALL),
    "the paper's sizes": ((1,), 1100, 2, 1, 8, 8, {}),
    "blocks that straddle chunks": ((), 300, 3, 1, 8, 8, {**SMALL, "block_size": 24}),
    "blocks longer than chunks": ((), 400, 2, 1, 8, 8, {**SMALL, "block_size": 80}),
    "compressed blocks longer than blocks": (
        (),
        200,
        2,
        1,
        8,
        8,
        {**SMALL, "compression_size": 32, "block_size": 8},
    ),
    "single tokens": (
        (),
        70,
        2,
        2,
        8,
        8,
        {"compression_size": 1, "compression_stride": 1, "block_size": 1, "window_size": 1},
    ),
    "lengths": (
        (3,),
        100,
        4,
        2,
        8,
        5,
        {
            **SMALL,
            "query_seq_lengths": np.array([100, 31, 0]),
            "key_value_seq_lengths": np.array([90, 31, 0]),
        },
    ),
}


def arrays_of(name):
    batch, tokens, heads, key_heads, features, values, _ = CASES[name]
    rng = np.random.default_rng(tokens)
    arrays = {
        "query": rng.normal(size=(*batch, tokens, heads, features)),
        "key": rng.normal(size=(*batch, tokens, key_heads, features)),
        "value": rng.normal(size=(*batch, tokens, key_heads, values)),
        "gates": rng.random((*batch, tokens, heads, 3)),
    }
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def with_gradients(arrays, implementation, **options):
    """Output and the gradients of all arrays."""
    call = functools.partial(
        effattn.native_sparse_attention, implementation=implementation, **options
    )

    @jax.jit
    def run(arrays):
        out, pull_back = jax.vjp(lambda given: call(**given), arrays)
        weights = (np.arange(out.size).reshape(out.shape) % 7 - 3) / 4
        return out, pull_back(weights.astype(out.dtype))[0]

    return run(arrays)


def exact(arrays, **options):
    with jax.enable_x64(True):
        arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
        return with_gradients(arrays, "xla", **options)


def assert_exact(name):
    arrays, options = arrays_of(name), CASES[name][-1]
    ours = with_gradients(arrays, "llvm", **options)
    assert_close(ours, exact(arrays, **options), 1e-5)


QUICK = "a token", "groups", "blocks that straddle chunks", "lengths"


@pytest.mark.parametrize("name", slow_but_for(QUICK, CASES))
def test_it_agrees_with_float64(name):
    assert_exact(name)


@pytest.mark.usefixtures("lanes")
def test_vectors_of_every_width_agree():
    assert_exact("groups")


@pytest.mark.parametrize("threads", [slow(1), 3, slow(100)])
def test_the_tasks_of_a_key_head_add_up_their_gradients(threads, monkeypatch):
    monkeypatch.setattr(block_attention, "threads", lambda: threads)
    jax.clear_caches()
    assert_exact("whole vectors")


def test_a_learned_compression_has_gradients():
    arrays = arrays_of("groups")

    def run(implementation, weights):
        def compress(*blocks):
            return tuple(jnp.einsum("l,...lh->...h", weights, x) for x in blocks)

        out = effattn.native_sparse_attention(
            **arrays, compress=compress, implementation=implementation, **SMALL
        )
        return jnp.sin(out).sum()

    weights = np.linspace(0, 0.3, 8, dtype=np.float32)
    ours, expected = (jax.grad(functools.partial(run, name))(weights) for name in ("llvm", "xla"))
    assert_close(ours, expected, 1e-4)


def test_a_scale_may_be_an_array():
    arrays = arrays_of("groups")
    call = functools.partial(effattn.native_sparse_attention, implementation="llvm", **SMALL)
    ours = jax.jit(lambda scale: call(**arrays, scale=scale))(jnp.float32(0.3))
    assert_close(ours, call(**arrays, scale=0.3), 1e-6)


def test_under_vmap_shared_keys_stay_shared():
    arrays = arrays_of("whole vectors")
    call = functools.partial(effattn.native_sparse_attention, implementation="llvm", **SMALL)
    queries = jnp.stack([arrays["query"], 2 * arrays["query"]])
    ours = jax.vmap(lambda query: call(**{**arrays, "query": query}))(queries)
    expected = jnp.stack([call(**{**arrays, "query": query}) for query in queries])
    assert_close(ours, expected, 1e-6)


def test_no_token_before_a_change_notices_it():
    """Earlier outputs and their gradients stay equal bit for bit, even if the change is NaN."""
    arrays = arrays_of("groups")
    changed = {name: x.copy() for name, x in arrays.items()}
    for name in ("query", "key", "value"):
        changed[name][:, 70:] = np.nan

    @jax.jit
    def run(arrays):
        call = functools.partial(effattn.native_sparse_attention, implementation="llvm", **SMALL)
        out, pull_back = jax.vjp(lambda given: call(**given)[:, :70], arrays)
        return out, pull_back(jnp.cos(out))[0]

    (before, gradients), (after, of_changed) = run(arrays), run(changed)
    np.testing.assert_array_equal(before, after)
    for name in ("query", "gates"):
        np.testing.assert_array_equal(gradients[name][:, :70], of_changed[name][:, :70])


def test_packed_documents_are_refused():
    arrays = arrays_of("groups")
    with pytest.raises(NotImplementedError, match="takes whole sequences of one document"):
        effattn.native_sparse_attention(
            **arrays, segment_ids=np.ones((2, 150), int), implementation="llvm", **SMALL
        )
