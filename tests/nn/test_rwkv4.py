"""RWKV-4: its channel mixing."""

import jax
import numpy as np
import pytest
from flax import nnx

from effattn.nn import RWKV4, RWKV4ChannelMix
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


def test_wrong_options_are_named():
    for layer in (RWKV4, RWKV4ChannelMix):
        with pytest.raises(ValueError, match=r"depth must be a number in \[0, 1\], .* got 2"):
            layer(6, depth=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="hidden_features must be an int, 1 or more features"):
        RWKV4ChannelMix(6, 0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dtype of a decode state must be .* got 'complex64'"):
        RWKV4ChannelMix(6, rngs=nnx.Rngs(0)).init_state(2, np.complex64)
