"""HedgehogSelfAttention: linear attention with a learned feature map for each head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import HedgehogSelfAttention
from tests.marks import slow
from tests.nn.build import filled, floats

X = floats(2, 11, 16)


def make(**options):
    return HedgehogSelfAttention(16, 4, num_kv_heads=2, rngs=nnx.Rngs(0), **options)


def made(**options):
    """A module with random parameters, whose feature maps differ between heads."""
    return filled(lambda: make(**options), spread=1 / 2)


def test_the_maps_start_as_the_identity():
    mixer = make()
    for kernel in (mixer.query_projection, mixer.key_projection):
        np.testing.assert_array_equal(kernel[...], np.stack([np.eye(4)] * 2))


@pytest.mark.parametrize("is_causal", [slow(False), True])
def test_each_head_has_its_own_maps(is_causal):
    """The reference is linear attention, head by head, of the features of the head's own maps."""
    mixer = made(num_features=3, is_causal=is_causal)
    query, key, value = (
        np.einsum("btd,dnh->btnh", X, layer.kernel[...])
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    of_query, of_key = mixer.query_projection[...], mixer.key_projection[...]
    attention = jax.jit(
        functools.partial(
            effattn.linear_attention,
            feature_map="identity",
            normalize=True,
            is_causal=is_causal,
        )
    )

    def phi(x, projection):
        e = np.exp(x @ projection.T), np.exp(-x @ projection.T)
        return np.concatenate([f / f.sum(-1, keepdims=True) for f in e], -1)[:, :, None]

    heads = [
        attention(
            phi(query[:, :, head], of_query[head // 2]),
            phi(key[:, :, head // 2], of_key[head // 2]),
            value[:, :, head // 2][:, :, None],
        )
        for head in range(4)
    ]
    y = np.einsum("btnh,nhd->btd", np.concatenate(heads, 2), mixer.out.kernel[...])
    np.testing.assert_allclose(jax.jit(lambda m: m(X))(mixer), y, rtol=1e-4, atol=1e-5)


def test_the_maps_are_trained_and_large_inputs_are_finite():
    mixer = made()
    gradients_of = jax.jit(nnx.grad(lambda m, x: (m(x) ** 2).sum()))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients_of(mixer, 1e4 * X)))
    gradients = gradients_of(mixer, X)
    assert (gradients.query_projection[...] != 0).all()
    assert (gradients.key_projection[...] != 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_projection": np.eye(4)}, "has no option key_projection; it learns the projections"),
        ({"num_features": 0}, "num_features must be an int, 1 or more"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        HedgehogSelfAttention(16, 4, rngs=nnx.Rngs(0), **options)


def test_bad_projections_are_named():
    x, w = jnp.ones((5, 4, 3)), jnp.ones((4, 2, 3))
    for of_query, of_key, message in (
        (w, w[:, :1], "must have the same number of features, got 2 and 1"),
        (w[:2], w, r"query_projection must be .* of shape \(1, m, 3\), or \(4, m, 3\)"),
        (w, w[0], "key_projection must be .* got float32 of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            effattn.hedgehog_attention(x, x, x, query_projection=of_query, key_projection=of_key)
