"""LightningAttention is the layer of MiniMax-01, with decays of its heads and layers."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.nn import LightningAttention, TransformerConfig, TransformerLM
from tests.nn.build import filled

FEATURES, HEADS, SIZE, LENGTH = 12, 4, 3, 7
X = np.random.default_rng(0).normal(size=(LENGTH, FEATURES)).astype(np.float32)


def by_hand(mixer, x, rates):
    def of(variable):
        return np.asarray(variable[...], np.float64)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    query, key, value = (
        np.einsum("td,dnh->tnh", x, of(layer.kernel))
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    query, key, value = (y * sigmoid(y) for y in (query, key, value))
    out = np.zeros_like(value)
    for n, rate in enumerate(rates):
        for t in range(LENGTH):
            weights = np.exp(-rate * (t - np.arange(t + 1))) * (key[: t + 1, n] @ query[t, n])
            out[t, n] = weights @ value[: t + 1, n]
    out = out.reshape(LENGTH, -1)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6) * of(mixer.norm.scale)
    return (sigmoid(x @ of(mixer.gate.kernel)) * out) @ of(mixer.out.kernel)


def test_it_is_the_layer_of_minimax():
    """With the decay rates of a third layer of five."""
    make = functools.partial(LightningAttention, FEATURES, HEADS, depth=2 / 4)
    mixer = filled(lambda: make(rngs=nnx.Rngs(0)), seed=1, spread=1 / 2)
    rates = np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256]) * (1 - 2 / (5 - 1) + 1e-5)
    y = jax.jit(lambda mixer, x: mixer(x))(mixer, X[None])[0]
    np.testing.assert_allclose(y, by_hand(mixer, X.astype(np.float64), rates), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [1, 3])
def test_models_set_the_depth(layers):
    config = TransformerConfig(13, num_layers=layers, features=8, num_heads=2, mixer="lightning")
    model = jax.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    depths = [m.depth for _, m in nnx.iter_graph(model) if isinstance(m, LightningAttention)]
    assert sorted(depths) == [0, 0.5, 1][:layers]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 2}, r"depth must be a number in \[0, 1\], .* got 2"),
        ({"num_kv_heads": 3}, r"num_heads \(4\) must be a positive multiple of num_kv_heads"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LightningAttention(FEATURES, HEADS, **options, rngs=nnx.Rngs(0))
