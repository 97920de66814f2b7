"""Additive attention beyond the laws: memory, its limit near zero, and wrong arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn import additive_attention, dot_product_attention
from effattn.analysis import cost
from effattn.nn import AdditiveCrossAttention, AdditiveSelfAttention


def weights(heads=2, size=4, hidden=8, scale=1.0):
    rng = np.random.default_rng(0)
    shapes = {
        "query_kernel": (heads, size, hidden),
        "key_kernel": (heads, size, hidden),
        "score": (heads, hidden),
    }
    return {
        name: (scale * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()
    }


def test_hidden_numbers_of_all_pairs_are_never_held():
    """Neither hidden numbers nor logits of all pairs are held, only those of one tile at a time."""
    length, hidden = 4096, 32

    def loss(x, given):
        return additive_attention(x, x, x, is_causal=True, **given).sum()

    x = jax.ShapeDtypeStruct((1, length, 2, 4), jnp.float32)
    given = jax.eval_shape(lambda: weights(hidden=hidden))
    program = jax.jit(jax.grad(loss, (0, 1))).trace(x, given)
    assert cost.temporary_bytes(program) < 4 * length**2 < 4 * length**2 * hidden


def test_where_tanh_is_straight_it_is_the_softmax_of_sums_that_queries_cancel_from():
    """v . (W_q q + W_k k): the query term cancels in the softmax, which leaves v . W_k k."""
    given = weights(scale=1e-3)
    rng = np.random.default_rng(1)
    query, key, value = (rng.normal(size=(1, 6, 2, 4)).astype(np.float32) for _ in range(3))
    given["score"] = given["score"] * np.float32(1e6)
    out = jax.jit(additive_attention)(query, key, value, **given)
    logits = np.einsum("bsnh,nha,na->bsn", key, given["key_kernel"], given["score"])
    ones = np.ones((1, 6, 2, 1), np.float32)
    exact = jax.jit(functools.partial(dot_product_attention, scale=1.0))
    expected = exact(ones, logits[..., None], value)
    np.testing.assert_allclose(out, expected, atol=1e-4)


def test_translation_from_another_sequence():
    options = {"context_features": 10, "hidden_dim": 3}
    layer = nnx.jit(lambda: AdditiveCrossAttention(6, 2, **options, rngs=nnx.Rngs(0)))()
    rng = np.random.default_rng(0)
    x, context = rng.normal(size=(2, 5, 6)), rng.normal(size=(2, 7, 10))
    run = nnx.jit(lambda layer, x, context: layer(x, context))
    y = run(layer, x.astype(np.float32), context.astype(np.float32))
    query = np.einsum("btd,dnh->btnh", x, layer.query.kernel[...])
    key, value = (
        np.einsum("bsd,dnh->bsnh", context, p.kernel[...]) for p in (layer.key, layer.value)
    )
    of_query = np.einsum("btnh,nha->bnta", query, layer.scores.query_kernel[...])
    of_key = np.einsum("bsnh,nha->bnsa", key, layer.scores.key_kernel[...])
    hidden = np.tanh(of_query[:, :, :, None] + of_key[:, :, None])
    logits = np.einsum("bntsa,na->bnts", hidden, layer.scores.score[...])
    expected = np.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), value)
    expected = np.einsum("btnh,nhd->btd", expected, layer.out.kernel[...])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"score": jnp.ones((3, 8))},
            r"score must be floating point of shape \(2, 8\), got .* \(3, 8\)",
        ),
        ({"score": jnp.ones(())}, r"score must be floating point of shape \(2, 1\)"),
        ({"score": jnp.ones((2, 0))}, r"score must be floating point of shape \(2, 1\)"),
        (
            {"key_kernel": jnp.ones((2, 4, 7))},
            r"key_kernel must be floating point of shape \(2, 4, 8\)",
        ),
        ({"implementation": "triton"}, "takes products of queries and keys, not additive scores"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    x = jnp.ones((1, 3, 2, 4))
    with pytest.raises((ValueError, NotImplementedError), match=message):
        additive_attention(x, x, x, **{**weights(), **changes})


@pytest.mark.parametrize("layer", [AdditiveSelfAttention, AdditiveCrossAttention])
def test_wrong_options_of_layers_are_named(layer):
    with pytest.raises(ValueError, match="has no option score; it learns .*, of hidden_dim"):
        layer(8, 2, score=jnp.ones((2, 4)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="hidden_dim must be an int, 1 or more"):
        layer(8, 2, hidden_dim=0, rngs=nnx.Rngs(0))
