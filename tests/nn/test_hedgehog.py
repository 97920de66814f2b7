"""HedgehogSelfAttention: linear attention of features that are learned, of each head its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import HedgehogFeatureMap, HedgehogSelfAttention

X = jax.random.normal(jax.random.key(0), (2, 11, 16))


def make(**options):
    mixer = HedgehogSelfAttention(16, 4, num_kv_heads=2, rngs=nnx.Rngs(0), **options)
    kernel = mixer.feature_map.kernel
    kernel[...] += jax.random.normal(jax.random.key(1), kernel.shape) / 2
    return mixer


def test_the_map_starts_as_softmaxes_of_its_input():
    features = HedgehogFeatureMap(2, 4)(X.reshape(2, 11, 4, 4))
    x = X.reshape(2, 11, 4, 4)
    np.testing.assert_allclose(features[..., :4], jax.nn.softmax(x, -1), rtol=1e-6)
    np.testing.assert_allclose(features[..., 4:], jax.nn.softmax(-x, -1), rtol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_each_head_has_its_own_map(is_causal):
    """Heads one by one, each with the plain formula of its own kernel."""
    mixer = make(num_features=3, is_causal=is_causal)
    query, key, value = (
        jnp.einsum("btd,dnh->btnh", X, layer.kernel[...])
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    heads = []
    for head in range(4):
        w = mixer.feature_map.kernel[...][head // 2]

        def phi(x, w=w):
            e = jnp.exp(x @ w.T), jnp.exp(-x @ w.T)
            return jnp.concatenate([f / f.sum(-1, keepdims=True) for f in e], -1)

        shared = slice(head // 2, head // 2 + 1)
        heads.append(
            effattn.linear_attention(
                query[:, :, head : head + 1],
                key[:, :, shared],
                value[:, :, shared],
                feature_map=phi,
                is_causal=is_causal,
            )
        )
    y = jnp.einsum("btnh,nhd->btd", jnp.concatenate(heads, 2), mixer.out.kernel[...])
    np.testing.assert_allclose(mixer(X), y, rtol=1e-4, atol=1e-5)


def test_the_map_is_trained_and_large_inputs_are_finite():
    mixer = make()
    gradients = jax.jit(nnx.grad(lambda m: (m(1e4 * X) ** 2).sum()))(mixer)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))
    gradients = jax.jit(nnx.grad(lambda m: (m(X) ** 2).sum()))(mixer)
    assert (gradients.feature_map.kernel[...] != 0).all()


def test_decoding_is_the_whole():
    mixer = make()
    first, state = mixer.extend(X[:, :6], mixer.init_state(2, 11))
    rest, _ = mixer.extend(X[:, 6:], state)
    np.testing.assert_allclose(jnp.concatenate([first, rest], 1), mixer(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_map": "elu"}, "has no option feature_map; it learns its own"),
        ({"num_features": 0}, "num_features must be an int, 1 or more"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        HedgehogSelfAttention(16, 4, rngs=nnx.Rngs(0), **options)
