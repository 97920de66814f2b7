"""Transformer-XL: the paper's loop over segments, the places where gradients stop, its state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.analysis import cost
from effattn.nn import TransformerXLAttention
from tests.marks import slow
from tests.nn.build import filled, floats

SEGMENT, MEMORY = 3, 5


def make(**options):
    options = {"segment_size": SEGMENT, "memory_size": MEMORY, **options}
    return TransformerXLAttention(8, 2, rngs=nnx.Rngs(0), **options)


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def by_segments(mixer, x):
    """The equations of section 3.3 for one row, with a memory of hidden states."""
    query, key, value, distance, out = (
        np.asarray(getattr(mixer, name).kernel, np.float64)
        for name in ("query", "key", "value", "distance", "out")
    )
    u, v = (np.asarray(bias[...], np.float64) for bias in (mixer.content_bias, mixer.position_bias))
    frequency = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    memory, outputs = np.zeros((0, 8)), []
    for start in range(0, len(x), SEGMENT):
        segment = x[start : start + SEGMENT]
        extended = np.concatenate([memory, segment])
        q, k, values = (
            np.einsum("td,dnh->tnh", tokens, kernel)
            for tokens, kernel in ((segment, query), (extended, key), (extended, value))
        )
        for t in range(len(segment)):
            here = len(memory) + t
            logits = []
            for j in range(here + 1):
                angle = (here - j) * frequency
                wave = np.stack([np.sin(angle), np.cos(angle)], -1).ravel()
                r = np.einsum("d,dnh->nh", wave, distance)
                logits.append(((q[t] + u) * k[j] + (q[t] + v) * r).sum(-1) / 2)
            weights = softmax(np.stack(logits, -1))
            y = np.einsum("ns,snh->nh", weights, values[: here + 1])
            outputs.append(np.einsum("nh,nhd->d", y, out))
        memory = extended[-MEMORY:]
    return np.stack(outputs)


def test_it_is_the_loop_over_segments_of_the_paper():
    mixer, x = filled(make), floats(2, 14, 8)
    expected = np.stack([by_segments(mixer, row) for row in x.astype(np.float64)])
    np.testing.assert_allclose(jax.jit(lambda m: m(x))(mixer), expected, atol=1e-5)


@pytest.mark.parametrize("stop", [True, slow(False)])
def test_gradients_stop_at_the_tokens_of_the_memory(stop):
    mixer, x = filled(lambda: make(stop_gradient=stop)), floats(1, 2 * SEGMENT, 8)

    def of_second_segment(mixer, x):
        return jnp.sum(mixer(x)[:, SEGMENT:] ** 2)

    def of_its_tokens_alone(mixer, x):
        """The same with a memory of zeros: keys and values are linear in the tokens."""
        return of_second_segment(mixer, x.at[:, :SEGMENT].set(0))

    gradient = jax.jit(jax.grad(of_second_segment, (0, 1)))
    of_mixer, of_x = gradient(mixer, x)
    assert np.any(of_x[:, :SEGMENT]) != stop and np.any(of_x[:, SEGMENT:])
    alone = jax.jit(jax.grad(of_its_tokens_alone))(mixer, jnp.asarray(x))
    assert np.abs(of_mixer.key.kernel[...] - alone.key.kernel[...]).max() > 1e-3


def test_gradients_stop_at_a_state():
    mixer = filled(make)

    def total(x):
        _, state = mixer.extend(x[:, :2], mixer.init_state(1, 8))
        return jnp.sum(mixer.extend(x[:, 2:], state)[0] ** 2)

    of_x = jax.jit(jax.grad(total))(floats(1, 4, 8))
    assert not np.any(of_x[:, :2]) and np.any(of_x[:, 2:])


def test_the_state_has_the_last_keys_and_values():
    state = jax.eval_shape(lambda: make().init_state(3, 100))
    assert state.key.shape == state.value.shape == (3, SEGMENT + MEMORY - 1, 2, 4)


def test_outputs_in_the_padding_of_new_tokens_are_zero():
    mixer, lengths = make(), np.array([0, 2])
    y, _ = mixer.extend(floats(2, 4, 8), mixer.init_state(2, 4), lengths=lengths)
    padding = np.arange(4) >= lengths[:, None]
    assert (np.asarray(y)[padding] == 0).all()
    assert (np.asarray(y)[~padding] != 0).any()


def test_no_array_has_all_pairs_of_a_long_sequence():
    """A segment has `L (L + M)` logits; rows of all distances would be larger than all tokens."""
    mixer = nnx.eval_shape(lambda: make(segment_size=16, memory_size=32))
    x = jax.ShapeDtypeStruct((1, 512, 8), jnp.float32)
    program = jax.make_jaxpr(lambda m, x: m(x))(mixer, x)
    assert cost.largest(program) <= 512 * (16 + 32) // 16 * 8


def test_layers_of_odd_size_have_one_more_distance_feature():
    mixer = nnx.eval_shape(lambda: TransformerXLAttention(9, 3, rngs=nnx.Rngs(0)))
    assert mixer.distance.kernel.shape == (10, 3, 3)
    assert jax.eval_shape(lambda m, x: m(x), mixer, floats(1, 5, 9)).shape == (1, 5, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_size": 0}, "segment_size must be an int, 1 or more tokens, got 0"),
        ({"memory_size": 0}, "memory_size must be an int, 1 or more tokens, got 0"),
        ({"is_causal": False}, "its memory holds tokens before the segment"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_tokens_are_real():
    mixer = nnx.eval_shape(make)
    with pytest.raises(ValueError, match="x must be real, got dtype complex64"):
        jax.eval_shape(lambda m: m(floats(1, 5, 8) * np.complex64(1j)), mixer)
