"""Gated self-attention: its formula, decoding, models, and other mechanisms inside."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.nn import GatedSelfAttention, SelfAttention, TransformerConfig, TransformerLM
from effattn.testing.subjects import filled_at_random

X = np.random.default_rng(0).normal(size=(2, 7, 8)).astype(np.float32)


@nnx.jit
def call(layer, x):
    return layer(x)


@pytest.mark.parametrize("by_head", [False, True])
def test_the_gate_multiplies_what_a_layer_without_it_projects(by_head):
    layer = filled_at_random(lambda: GatedSelfAttention(8, 2, by_head=by_head, rngs=nnx.Rngs(0)))
    assert layer.gate.kernel.shape == (8, 2, 1 if by_head else 4)
    plain = SelfAttention(8, 2, rngs=nnx.Rngs(0))
    plain.query, plain.key, plain.value = layer.query, layer.key, layer.value
    plain.out.kernel[...] = np.eye(8, dtype=np.float32).reshape(2, 4, 8)
    heads = np.asarray(call(plain, X)).reshape(2, 7, 2, 4)
    gate = jax.nn.sigmoid(np.einsum("btd,dng->btng", X, layer.gate.kernel))
    expected = np.einsum("btnh,nhd->btd", gate * heads, layer.out.kernel)
    np.testing.assert_allclose(call(layer, X), expected, atol=1e-6)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_it_decodes(attention):
    layer = filled_at_random(lambda: GatedSelfAttention(8, 2, attention, rngs=nnx.Rngs(0)))
    extend = nnx.jit(lambda layer, x, state: layer.extend(x, state))
    first, state = extend(layer, X[:, :4], layer.init_state(2, 7))
    second, _ = extend(layer, X[:, 4:], state)
    np.testing.assert_allclose(np.concatenate([first, second], 1), call(layer, X), atol=1e-5)


def test_a_model_takes_the_class():
    mixer = functools.partial(GatedSelfAttention, by_head=True)
    config = TransformerConfig(5, 2, 8, 2, mixer=mixer)
    model = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    for block in model.blocks:
        assert type(block.mixer) is GatedSelfAttention and block.mixer.rotary is not None
        assert block.mixer.gate.kernel.shape == (8, 2, 1)


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match="by_head must be True or False, got 1"):
        GatedSelfAttention(8, 2, by_head=1, rngs=nnx.Rngs(0))
