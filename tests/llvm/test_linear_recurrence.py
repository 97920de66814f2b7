"""The linear recurrence by the CPU kernels, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.llvm import runtime
from effattn.testing.functions import assert_close

pytestmark = pytest.mark.skipif(
    runtime.refusal() is not None, reason=f"the kernels are not here: {runtime.refusal()}"
)

# Batch, tokens, query heads, key heads, features and values; and options.
CASES = {
    "groups": ((2,), 100, 4, 2, 16, 24, {}),
    "sizes off a vector": ((2,), 130, 2, 1, 17, 33, {"feature_map": "identity"}),
    "lengths": (
        (2,),
        65,
        2,
        2,
        8,
        40,
        {"query_seq_lengths": np.array([65, 40]), "key_value_seq_lengths": np.array([60, 0])},
    ),
    "a token": ((1,), 1, 1, 1, 3, 2, {"feature_map": "identity"}),
    "several blocks": ((), 600, 2, 2, 300, 8, {"scale": 0.5}),
    "not normalized": ((1,), 200, 2, 2, 16, 16, {"normalize": False}),
}


def run(case, implementation, dtype):
    """Output, final state, and all gradients."""
    batch, tokens, heads, key_heads, features, values, options = case
    normalized = options.get("normalize", options.get("feature_map", "elu") != "identity")
    rng = np.random.default_rng(tokens)
    shapes = (
        (*batch, tokens, heads, features),
        (*batch, tokens, key_heads, features),
        (*batch, tokens, key_heads, values),
        (*batch, key_heads, features, values + normalized),
    )
    shapes_of_results = (*batch, tokens, heads, values), shapes[-1]
    arrays = [rng.normal(size=shape) for shape in shapes]
    arrays[-1] = arrays[-1] ** 2  # keeps the sums of weights positive
    call = functools.partial(
        effattn.linear_attention,
        is_causal=True,
        return_state=True,
        implementation=implementation,
        **options,
    )

    def with_gradients(arrays):
        query, key, value, state = arrays
        results, pull_back = jax.vjp(
            lambda *given: call(*given[:3], initial_state=given[3]), query, key, value, state
        )
        return results, pull_back(tuple(cotangents))

    cotangents = [rng.integers(-8, 9, shape).astype(dtype) / 4 for shape in shapes_of_results]
    return jax.jit(with_gradients)([x.astype(np.float32).astype(dtype) for x in arrays])


def exact(case):
    with jax.enable_x64(True):
        return run(case, "xla", np.float64)


@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_float64(name):
    assert_close(run(CASES[name], "llvm", np.float32), exact(CASES[name]), 3e-6)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_vectors_of_every_width_agree(lanes, monkeypatch):
    """The test covers the widths that this processor has."""
    if lanes > runtime.lanes():
        pytest.skip(f"this processor has vectors of {runtime.lanes()} numbers")
    monkeypatch.setattr(runtime, "lanes", lambda: lanes)
    jax.clear_caches()
    case = CASES["sizes off a vector"]
    assert_close(run(case, "llvm", np.float32), exact(case), 3e-6)


def test_no_token_before_a_change_notices_it():
    """Earlier outputs stay equal bit for bit, on either side of a chunk's edge."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, 200, 2, 8)).astype(np.float32) for _ in range(3)]
    call = functools.partial(effattn.linear_attention, is_causal=True, implementation="llvm")
    before = call(*arrays)
    for token in (63, 64, 199):
        changed = [np.array(x) for x in arrays]
        for x in changed:
            x[:, token:] += 1
        after = call(*changed)
        np.testing.assert_array_equal(before[:, :token], after[:, :token])
        assert (before[:, token] != after[:, token]).any()


def test_hessians_are_those_of_xla():
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 20, 1, 3)).astype(np.float32)

    def loss(query, implementation):
        call = functools.partial(effattn.linear_attention, is_causal=True)
        return jnp.sum(call(query, key, value, implementation=implementation) ** 2)

    ours, theirs = (jax.hessian(loss)(query, name) for name in ("llvm", "xla"))
    assert_close(ours, theirs, 1e-5)


def test_its_memory_does_not_grow_with_length():
    """Apart from arguments and results, memory is that of one block of tokens."""

    def temporaries(tokens):
        shapes = [jax.ShapeDtypeStruct((1, tokens, 2, 64), jnp.float32)] * 3
        call = functools.partial(effattn.linear_attention, is_causal=True, implementation="llvm")
        return jax.jit(call).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(65536) <= 1.01 * temporaries(8192)


def test_it_says_what_it_does_not_take():
    query = np.ones((1, 20, 2, 8), np.float32)
    with pytest.raises(NotImplementedError, match="does not take log_decay"):
        effattn.retention(query, query, query, implementation="llvm")
    with pytest.raises(NotImplementedError, match="does not take packed documents"):
        effattn.linear_attention(
            query,
            query,
            query,
            is_causal=True,
            segment_ids=np.ones((1, 20), np.int32),
            implementation="llvm",
        )
