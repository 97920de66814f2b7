"""SinkhornSelfAttention: its sort projection, and the lengths that it takes."""

import jax
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import SinkhornSelfAttention
from tests.nn.build import filled, floats

X = floats(2, 11, 16)


def make(**options):
    options = {"max_length": 12, "block_size": 4, "num_kv_heads": 2, **options}
    return SinkhornSelfAttention(16, 4, rngs=nnx.Rngs(0), **options)


def test_the_mixer_is_sinkhorn_attention_between_projections():
    mixer = filled(lambda: make(temperature=0.5), spread=1 / 2)
    heads = (
        np.einsum("btd,dnh->btnh", X, layer.kernel[...])
        for layer in (mixer.query, mixer.key, mixer.value)
    )
    out = effattn.sinkhorn_attention(
        *heads, sort_projection=mixer.sort_projection[...], block_size=4, temperature=0.5
    )
    y = np.einsum("btnh,nhd->btd", out, mixer.out.kernel[...])
    np.testing.assert_allclose(jax.jit(lambda m: m(X))(mixer), y, rtol=1e-4, atol=1e-5)


def test_there_is_a_vector_for_each_block_of_the_longest_input():
    assert make(max_length=13).sort_projection[...].shape == (2, 4, 4)
    with pytest.raises(ValueError, match="the 4 blocks of 4 of the 13 tokens, got 3"):
        make()(floats(1, 13, 16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be an int, 1 or more tokens, got 0"),
        ({"max_length": 0}, "max_length must be an int, 1 or more tokens, got 0"),
        ({"is_causal": True}, "'sinkhorn' lacks 'causal' .* as a column of its sorting"),
        ({"sort_projection": X}, "has no option sort_projection; it learns a projection"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
