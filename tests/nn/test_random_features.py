"""RandomFeatureSelfAttention: vectors that are drawn, a scale and a gate that are learned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import RandomFeatureSelfAttention
from tests.marks import slow
from tests.nn.build import filled, floats
from tests.nn.calls import call

X = floats(2, 11, 16)


def make(**options):
    """A module with random parameters and vectors in place of its initial values."""
    return filled(
        lambda: RandomFeatureSelfAttention(16, 4, num_features=6, rngs=nnx.Rngs(0), **options)
    )


@pytest.mark.parametrize("gated", [slow(False), True])
def test_it_is_random_feature_attention_between_projections(gated):
    mixer = make(num_kv_heads=2, gated=gated)
    mixer.sigma[...] = np.linspace(0.5, 1.5, 8, dtype=np.float32).reshape(2, 1, 4)
    query, key, value = (
        np.einsum("btd,dnh->btnh", X, layer.kernel[...])
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    options = {"projection": mixer.sigma[...] * mixer.vectors[...]}
    if gated:
        options["gate"] = 1 / (1 + np.exp(-(X @ mixer.gate.kernel[...] + mixer.gate.bias[...])))
    attention = jax.jit(functools.partial(effattn.random_feature_attention, is_causal=True))
    heads = attention(query, key, value, **options)
    y = np.einsum("btnh,nhd->btd", heads, mixer.out.kernel[...])
    np.testing.assert_allclose(call(mixer, X), y, rtol=1e-4, atol=1e-5)


def test_what_is_trained():
    _, trained, rest = nnx.split(make(gated=True), nnx.Param, ...)
    assert [path[0] for path, _ in nnx.to_flat_state(rest)] == ["vectors"]
    assert {"sigma", "gate"} <= trained.keys()


def test_redraw_applies_other_vectors():
    mixer = make()
    before = call(mixer, X)
    mixer.redraw(nnx.Rngs(1))
    assert not np.allclose(call(mixer, X), before)


def test_decoding_with_a_gate_is_the_whole():
    """Decoding is in pieces; in the last piece one row has fewer tokens than the other."""
    mixer = make(gated=True, num_kv_heads=2)
    whole, state = call(mixer, X), mixer.init_state(2, 11)
    extend = jax.jit(lambda x, state, lengths: mixer.extend(x, state, lengths=lengths))
    first, state = extend(X[:, :6], state, np.array([6, 6]))
    padded = np.full((2, 6, 16), np.nan, np.float32)
    padded[0, :5], padded[1, :2] = X[0, 6:], X[1, 6:8]
    rest, state = extend(padded, state, np.array([5, 2]))
    np.testing.assert_allclose(first, whole[:, :6], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rest[0, :5], whole[0, 6:], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rest[1, :2], whole[1, 6:8], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(state.length, [11, 8])


@pytest.mark.slow
def test_padding_with_a_gate_reaches_nothing():
    """Tokens in the place of padding have no effect either."""
    mixer, x = make(gated=True), X.copy()
    x[1, 7:] = np.nan

    @jax.jit
    def with_gradients(mixer):
        y, pull_back = jax.vjp(lambda mixer: mixer(x, lengths=np.array([11, 7])), mixer)
        return y, pull_back(2 * y)

    y, gradients = with_gradients(mixer)
    np.testing.assert_allclose(y[1:, :7], call(mixer, X)[1:, :7], atol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projection": jnp.ones((1, 6, 4))}, "has no option projection; it makes the"),
        ({"gated": True, "is_causal": False}, "gated=True needs is_causal=True"),
        ({"num_features": 0}, "num_features must be an int, 1 or more"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        RandomFeatureSelfAttention(16, 4, rngs=nnx.Rngs(0), **options)
