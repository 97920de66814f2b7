"""The memory between calls, and the places where gradients stop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import RecurrentMemoryAttention, RotaryEmbedding
from tests.marks import slow
from tests.nn.build import filled

X = np.random.default_rng(0).normal(size=(2, 12, 8)).astype(np.float32)


def make(**options):
    options = {"segment_size": 4, "num_slots": 3, **options}
    return RecurrentMemoryAttention(8, 2, rngs=nnx.Rngs(0), **options)


def made(**options):
    """A module with random parameters in place of its initial parameters."""
    return filled(lambda: make(**options))


@pytest.mark.parametrize("rotary", [slow(None), RotaryEmbedding()])
def test_segments_in_two_calls_are_those_of_one(rotary):
    mixer = made(rotary=rotary)

    @jax.jit
    def run(mixer):
        first, memory = mixer.mix_segments(X[:, :8])
        return mixer.mix_segments(X), first, mixer.mix_segments(X[:, 8:], memory)

    (whole, last), first, (rest, memory) = run(mixer)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(memory, last, rtol=1e-5, atol=1e-6)
    _, state = jax.jit(lambda m, x, s: m.extend(x, s))(mixer, X, mixer.init_state(2, 12))
    np.testing.assert_allclose(state.state[0], last, rtol=1e-5, atol=1e-6)


def in_segments(mixer, x):
    _, memory = mixer.mix_segments(x[:, :4])
    return mixer.mix_segments(x[:, 4:], memory)[0]


def in_decoding(mixer, x):
    _, state = mixer.extend(x[:, :4], mixer.init_state(2, 8))
    return mixer.extend(x[:, 4:], state)[0]


@pytest.mark.parametrize("second", [in_segments, slow(in_decoding)])
@pytest.mark.parametrize("stop", [True, False])
def test_gradients_stop_between_calls_where_asked(stop, second):
    mixer = made(stop_gradient=stop)
    of_x = jax.jit(jax.grad(lambda x: jnp.sum(second(mixer, x) ** 2)))(X[:, :8])
    assert np.any(of_x[:, :4]) != stop and np.any(of_x[:, 4:])


def test_gradients_stop_at_a_state_that_is_given():
    mixer = made(stop_gradient=True)
    state = mixer.init_state(2, 4)

    def total(carried):
        return jnp.sum(mixer.extend(X[:, :1], dataclasses.replace(state, state=carried))[0])

    for gradient in jax.jit(jax.grad(total))(state.state):
        assert not np.any(gradient)


def test_gradients_pass_within_a_call():
    mixer = made(stop_gradient=True)
    of_x = jax.jit(jax.grad(lambda x: jnp.sum(mixer(x)[:, 4:] ** 2)))(X[:, :8])
    assert np.any(of_x[:, :4])


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="a multiple of segment_size=4 tokens, got 7"):
        made().mix_segments(X[:, :7])
    with pytest.raises(ValueError, match=r"x must have shape \(batch, length, 8\), got \(12, 8\)"):
        made().mix_segments(X[0])
    with pytest.raises(ValueError, match=r"memory must be floating point of shape \(2, 3, 8\)"):
        made().mix_segments(X, np.ones((2, 4, 8)))
    with pytest.raises(ValueError, match="num_slots must be an int, 1 or more slots, got 0"):
        make(num_slots=0)
