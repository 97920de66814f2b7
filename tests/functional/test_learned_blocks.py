"""learned_block_attention: its limits, the training of its choice, cost, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import LearnedBlockSelfAttention


def heads(time=23):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, time, n, 8)).astype(np.float32) for n in (4, 2, 2, 2, 2)]


def attend(query, key, value, selection_query, selection_key, **options):
    return effattn.learned_block_attention(
        query,
        key,
        value,
        selection_query=selection_query,
        selection_key=selection_key,
        **{"block_size": 3, "top_k": 2, **options},
    )


def test_all_blocks_are_exact_attention():
    given = heads()
    exact = effattn.dot_product_attention(*given[:3], is_causal=True)
    out = jax.jit(functools.partial(attend, top_k=8))(*given)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)


def test_keys_as_selection_are_moba():
    """One query head for each key head; the scale of the scores changes no choice."""
    query, key, value, *_ = heads()
    query = query[:, :, :2]
    moba = functools.partial(effattn.moba_attention, block_size=3, top_k=2)
    out = jax.jit(attend)(query, key, value, query, key)
    np.testing.assert_allclose(out, jax.jit(moba)(query, key, value), rtol=1e-5, atol=1e-6)


def test_the_selector_learns_which_block_to_read():
    """Block `task` has the value 1, the own block 0, the others -1; the loss asks for 1.

    All keys are zero, so that only the choice of a block changes the output.
    """
    blocks, size = 6, 2
    time, task = blocks * size, 3
    value = np.full((time, 1, 1), -1.0, np.float32)
    value[task * size : (task + 1) * size], value[-size:] = 1, 0
    nothing = jnp.zeros((time, 1, 4))
    key = np.repeat(np.eye(blocks, dtype=np.float32), size, 0)[:, None]

    def loss(query):
        selection = jnp.broadcast_to(query, (time, 1, blocks))
        out = attend(nothing, nothing, value, selection, key, block_size=size)
        return (1 - out[-1].sum()) ** 2

    step = jax.jit(lambda query: query - jax.grad(loss)(query))
    query = jnp.asarray([0.3, 0.2, 0.1, 0.0, -0.1, 0.0])
    assert loss(query) == 2.25
    for _ in range(30):
        query = step(query)
    assert loss(query) == 0.25
    assert int(jnp.argmax(query[:5])) == task


def test_the_layer_selects_by_its_projections():
    make = functools.partial(LearnedBlockSelfAttention, 16, 4, num_kv_heads=2, rngs=nnx.Rngs(0))
    mixer = make(block_size=3, top_k=2, selection_features=5)
    x = np.random.default_rng(1).normal(size=(2, 11, 16)).astype(np.float32)
    names = "query", "key", "value", "selection_query", "selection_key"
    expected = attend(*(getattr(mixer, name)(x) for name in names))
    np.testing.assert_allclose(mixer(x), mixer.out(expected), rtol=1e-5, atol=1e-6)
    for options, message in (
        ({"selection_features": 0}, "selection_features must be an int, 1 or more features, or"),
        ({"selection_key": 1}, "LearnedBlockSelfAttention has no option selection_key"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({3: np.zeros((2, 23, 4, 8))}, {}, r"selection_query must be floating .* \(2, 23, 2, 8\)"),
        ({4: np.zeros((2, 23, 2, 4))}, {}, r"selection_key must be floating .* \(2, 23, 2, 8\)"),
        ({3: np.zeros((2, 23, 2, 0))}, {}, r"selection_query must be floating .* \(2, 23, 2, 1\)"),
        ({}, {"block_size": 0}, "block_size must be an int, 1 or more tokens in a block, got 0"),
        ({}, {"top_k": 0}, "top_k must be an int, 1 or more blocks, the own block included"),
    ],
)
def test_wrong_arguments_are_refused(change, options, message):
    given = [change.get(n, x) for n, x in enumerate(heads())]
    with pytest.raises(ValueError, match=message):
        attend(*given, **options)
