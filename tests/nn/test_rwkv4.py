"""The channel mixings of RWKV."""

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.nn import (
    RWKV4,
    EncoderDecoder,
    EncoderDecoderConfig,
    Experts,
    RWKV4ChannelMix,
    RWKV6ChannelMix,
    RWKV7ChannelMix,
    TransformerConfig,
    TransformerLM,
)
from tests.marks import slow
from tests.nn.build import filled, floats


def test_the_channel_mixing_continues_from_its_state_and_keeps_documents_apart():
    layer, x = filled(lambda: RWKV4ChannelMix(6, 8, rngs=nnx.Rngs(0))), floats(2, 7, 6)
    lengths, ids = np.array([4, 2]), np.tile([1, 1, 1, 4, 4, 4, 4], (2, 1))

    @jax.jit
    def run(layer):
        first, state = layer.extend(x[:, :4], layer.init_state(2), lengths=lengths)
        rest, _ = layer.extend(np.stack([x[0, 4:], x[1, 2:5]]), state)
        return layer(x), first, rest, layer(x, segment_ids=ids), layer(x[:, 3:])

    whole, first, rest, packed, second = run(layer)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(first[row, :length], whole[row, :length], rtol=1e-5, atol=1e-6)
        expected = whole[row, length : length + 3]
        np.testing.assert_allclose(rest[row], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(packed[:, 3:], second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [RWKV6ChannelMix, RWKV7ChannelMix])
def test_the_later_channel_mixings_are_those_of_their_papers(kind):
    layer, x = filled(lambda: kind(6, rngs=nnx.Rngs(0))), floats(2, 7, 6)
    kernels = {name: np.asarray(getattr(layer, name).kernel[...]) for name in ("key", "value")}
    assert kernels["key"].shape == (6, {RWKV6ChannelMix: 24, RWKV7ChannelMix: 24}[kind])
    before = np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], 1)
    *of_gate, of_key = (x + (before - x) * amount for amount in np.asarray(layer.shifts[...]))
    expected = np.maximum(of_key @ kernels["key"], 0) ** 2 @ kernels["value"]
    if kind is RWKV6ChannelMix:
        logits = of_gate[0] @ np.asarray(layer.receptance.kernel[...])
        expected = expected / (1 + np.exp(-logits))
    else:
        assert not of_gate and layer.receptance is None
    np.testing.assert_allclose(jax.jit(layer)(x), expected, rtol=1e-4, atol=1e-4)


SIZES = {"vocab_size": 11, "num_layers": 1, "features": 8, "num_heads": 2}


@pytest.mark.parametrize("mixer", ["softmax", slow("rwkv7")])
def test_models_carry_the_last_token_of_the_channel_mixing(mixer):
    """Decoding equals training, and packed documents give what they give alone."""
    config = TransformerConfig(**SIZES, mixer=mixer, feed_forward="rwkv6")
    model = filled(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, 11, size=(2, 9))
    ids, lengths = np.repeat([[3, 4]], [4, 5], 1).repeat(2, 0), np.array([4, 3])

    @jax.jit
    def run(model):
        first, state = model.extend(tokens[:, :4], model.init_state(2, 9), lengths=lengths)
        rest = np.stack([tokens[row, length : length + 5] for row, length in enumerate(lengths)])
        rest, _ = model.extend(rest, state)
        packed, alone = model(tokens, segment_ids=ids), model(tokens[:, 4:])
        return model(tokens), first, rest, packed, alone

    whole, first, rest, packed, alone = run(model)
    for row, length in enumerate(lengths):
        found = np.concatenate([first[row, :length], rest[row]])
        expected = whole[row, : length + 5]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(packed[:, 4:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_decoders_of_two_sided_models_carry_it_too():
    config = EncoderDecoderConfig(
        encoder=TransformerConfig(**SIZES, is_causal=False),
        decoder=TransformerConfig(**SIZES, feed_forward="rwkv7"),
    )
    model = filled(lambda: EncoderDecoder(config, rngs=nnx.Rngs(0)))
    source, target = np.random.default_rng(0).integers(0, 11, size=(2, 2, 5))

    @jax.jit
    def run(model):
        given = model.given(source)
        state, logits = given.init_state(2, 5), []
        for t in range(5):
            y, state = given.extend(target[:, t : t + 1], state)
            logits.append(y[:, 0])
        return model(source, target), jax.numpy.stack(logits, 1)

    whole, steps = run(model)
    np.testing.assert_allclose(steps, whole, rtol=1e-4, atol=1e-5)


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match="experts need feed_forward to be one of .* got 'rwkv6'"):
        TransformerConfig(**SIZES, feed_forward="rwkv6", experts=Experts(2))
    tokens = np.ones((1, 1), int)
    for ours, other in (("relu", "rwkv7"), ("rwkv7", "relu")):

        def extend(ours=ours, other=other):
            model, another = (
                TransformerLM(TransformerConfig(**SIZES, feed_forward=name), rngs=nnx.Rngs(0))
                for name in (ours, other)
            )
            return model.extend(tokens, another.init_state(1, 3))

        with pytest.raises(ValueError, match="state of a layer must be .*; it is the state of an"):
            jax.eval_shape(extend)
    for layer in (RWKV4, RWKV4ChannelMix, RWKV6ChannelMix, RWKV7ChannelMix):
        with pytest.raises(ValueError, match=r"depth must be a number in \[0, 1\], .* got 2"):
            layer(6, depth=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="hidden_features must be an int, 1 or more features"):
        RWKV4ChannelMix(6, 0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dtype of a decode state must be .* got 'complex64'"):
        RWKV4ChannelMix(6, rngs=nnx.Rngs(0)).init_state(2, np.complex64)
