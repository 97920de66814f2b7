"""RandomFeatureSelfAttention: vectors that are drawn, a scale and a gate that are learned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import RandomFeatureSelfAttention

X = jax.random.normal(jax.random.key(0), (2, 11, 16))


def make(**options):
    return RandomFeatureSelfAttention(16, 4, num_features=6, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("gated", [False, True])
def test_it_is_random_feature_attention_between_projections(gated):
    mixer = make(num_kv_heads=2, gated=gated)
    mixer.sigma[...] = jnp.linspace(0.5, 1.5, 8).reshape(2, 1, 4)
    query, key, value = (
        jnp.einsum("btd,dnh->btnh", X, layer.kernel[...])
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    options = {"projection": mixer.sigma[...] * mixer.vectors[...], "is_causal": True}
    if gated:
        options["gate"] = jax.nn.sigmoid(X @ mixer.gate.kernel[...] + mixer.gate.bias[...])
    heads = effattn.random_feature_attention(query, key, value, **options)
    y = jnp.einsum("btnh,nhd->btd", heads, mixer.out.kernel[...])
    np.testing.assert_allclose(mixer(X), y, rtol=1e-4, atol=1e-5)


def test_what_is_trained():
    _, trained, rest = nnx.split(make(gated=True), nnx.Param, ...)
    assert [path[0] for path, _ in nnx.to_flat_state(rest)] == ["vectors"]
    assert {"sigma", "gate"} <= trained.keys()


def test_redraw_applies_other_vectors():
    mixer = make()
    before = mixer(X)
    mixer.redraw(nnx.Rngs(1))
    assert not np.allclose(mixer(X), before)


def test_decoding_with_a_gate_is_the_whole():
    """In pieces, of which one row has fewer tokens than the other."""
    mixer = make(gated=True, num_kv_heads=2)
    whole, state = mixer(X), mixer.init_state(2, 11)
    extend = jax.jit(lambda x, state, lengths: mixer.extend(x, state, lengths=lengths))
    first, state = extend(X[:, :6], state, jnp.asarray([6, 6]))
    padded = X[:, 6:].at[1, 2:].set(jnp.nan)
    rest, state = extend(padded, state, jnp.asarray([5, 2]))
    np.testing.assert_allclose(first, whole[:, :6], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rest[0], whole[0, 6:], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rest[1, :2], whole[1, 6:8], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(state.length, [11, 8])


def test_padding_with_a_gate_reaches_nothing():
    mixer, lengths = make(gated=True), jnp.asarray([11, 7])
    filled = X.at[1, 7:].set(jnp.nan)
    expected = mixer(X[1:, :7])
    np.testing.assert_allclose(mixer(filled, lengths=lengths)[1:, :7], expected, atol=1e-5)
    gradients = nnx.grad(lambda m: (m(filled, lengths=lengths) ** 2).sum())(mixer)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection": jnp.ones((1, 6, 4))}, "has no option projection; it makes them"),
        ({"gated": True, "is_causal": False}, "gated=True needs is_causal=True"),
        ({"num_features": 0}, "num_features must be an int, 1 or more"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RandomFeatureSelfAttention(16, 4, rngs=nnx.Rngs(0), **options)
