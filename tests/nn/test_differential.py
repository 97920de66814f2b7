"""Differential self-attention: the layer of the paper, layers of a model, wrong options."""

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.nn import DifferentialSelfAttention, RotaryEmbedding, TransformerConfig, TransformerLM
from effattn.testing.subjects import filled_at_random


def rotated(x, theta):
    """Rotary embedding of `(T, heads, d)` by complex numbers."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    x = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([x.real, x.imag], -1)


def test_the_layer_is_that_of_the_paper():
    """Algorithm of the paper in NumPy, with doubled heads of half the size."""
    tokens, heads, size, start = 7, 3, 4, 0.35
    layer = filled_at_random(
        lambda: DifferentialSelfAttention(
            heads * size,
            heads,
            lambda_init=start,
            rotary=RotaryEmbedding(theta=10.0),
            rngs=nnx.Rngs(0),
        )
    )
    x = np.random.default_rng(1).normal(size=(tokens, heads * size))
    q, k = (
        rotated(np.einsum("td,dnh->tnh", x, p.kernel).reshape(tokens, 2 * heads, -1), 10.0)
        for p in (layer.query, layer.key)
    )
    logits = np.einsum("tnh,snh->nts", q, k) / np.sqrt(size / 2)
    logits[:, np.triu(np.ones((tokens, tokens), bool), 1)] = -np.inf
    maps = np.asarray(jax.nn.softmax(logits)).reshape(heads, 2, tokens, tokens)
    vectors = (np.asarray(getattr(layer, f"lambda_{name}")) for name in ("q1", "k1", "q2", "k2"))
    q1, k1, q2, k2 = vectors
    weight = np.exp(q1 @ k1) - np.exp(q2 @ k2) + start
    value = np.einsum("td,dnh->tnh", x, layer.value.kernel)
    out = np.einsum("nts,snh->tnh", maps[:, 0] - weight * maps[:, 1], value)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + layer.norm.epsilon) * layer.norm.scale
    expected = np.einsum("tnh,nhd->td", (1 - start) * out, layer.out.kernel)
    y = nnx.jit(lambda layer, x: layer(x))(layer, x.astype(np.float32)[None])
    np.testing.assert_allclose(y[0], expected, rtol=1e-4, atol=1e-5)


def test_layers_of_a_model_start_with_the_lambdas_of_the_paper():
    config = TransformerConfig(5, 3, 8, 2, mixer="differential")
    model = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    found = [block.mixer.lambda_init for block in model.blocks]
    np.testing.assert_allclose(found, [0.2, 0.3555, 0.4707], atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lambda_": 0.5}, "has no option lambda_; it learns lambda, from lambda_init"),
        ({"lambda_init": 1.0}, r"lambda_init must be a number in \[0, 1\), got 1.0"),
        ({"head_dim": 3}, "head_dim must be a multiple of 2 in DifferentialSelfAttention.* got 3"),
        (
            {"head_dim": 6, "rotary": RotaryEmbedding()},
            "head_dim must be a multiple of 4 .* of an even size for rotary, got 6",
        ),
        (
            {"head_dim": 4, "rotary": RotaryEmbedding(features=4)},
            "rotary rotates 4 features, but head_dim / 2 is 2",
        ),
    ],
)
def test_wrong_options_of_layers_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DifferentialSelfAttention(8, 2, **options, rngs=nnx.Rngs(0))
