"""Parts of published models: post-norm layers, sinusoidal positions, biases, rotary rules."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.arrays.segments import positions_from_segment_ids
from effattn.nn import RotaryEmbedding, TransformerConfig, TransformerLM
from tests.nn.build import filled, floats
from tests.nn.calls import call

CONFIG = TransformerConfig(vocab_size=13, num_layers=2, features=16, num_heads=4, num_kv_heads=2)
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 9)).astype(np.int32)


def made(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    return filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)), spread=0.1)


def parameters(**changes):
    model = jax.eval_shape(lambda: made(**changes))
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parallel", [False, True])
def test_post_norm_normalises_each_residual_sum(parallel):
    model = made(post_norm=True, parallel=parallel, norm="layer")

    @jax.jit
    def run(block, x):
        if parallel:
            return block(x), block.mixer_norm(x + block.mixer(x) + block.feed_forward(x))
        h = block.mixer_norm(x + block.mixer(x))
        return block(x), block.feed_forward_norm(h + block.feed_forward(h))

    close(*run(model.blocks[0], floats(1, 4, 16)))
    x = model.embed(TOKENS)
    for block in model.blocks:
        x = block(x)
    close(call(model, TOKENS), model._logits(x))


def test_sinusoidal_positions():
    model = made(positions="sinusoidal", num_layers=1)
    ids = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0]] * 2)
    x = model._embed(TOKENS, positions_from_segment_ids(ids), None)
    place = np.array([0, 1, 2, 0, 1, 2, 3])[:, None] / 10000 ** (np.arange(0, 16, 2) / 16)
    waves = np.stack([np.sin(place), np.cos(place)], -1).reshape(7, 16)
    close(x[:, :7], 4 * model.embed(TOKENS)[:, :7] + waves)
    state = model.init_state(2, 9)
    first, state = model.extend(TOKENS[:, :4], state)
    second, _ = model.extend(TOKENS[:, 4:], state)
    close(np.concatenate([first, second], 1), call(model, TOKENS))


def test_a_rotary_embedding_as_positions():
    rotary = RotaryEmbedding(theta=50.0, features=2)
    assert made(positions=rotary).blocks[0].mixer.rotary == rotary
    with pytest.raises(ValueError, match="rotary_theta needs positions='rotary', .* got rotary"):
        made(positions=rotary, rotary_theta=3.0)


def test_biases_are_in_every_projection_that_may_have_them():
    # Query, key and value of 16 + 2 * 8, output 16, SwiGLU of 2 * 48 + 16, in each of two layers.
    assert parameters(use_bias=True) - parameters() == 2 * (32 + 16 + 2 * 48 + 16)
    of_gru = {"mixer": "gru", "num_kv_heads": None}
    assert parameters(use_bias=True, **of_gru) - parameters(**of_gru) == 2 * (2 * 48 + 16)
