"""The memory between calls, and where gradients stop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import RecurrentMemoryAttention, RotaryEmbedding

X = np.random.default_rng(0).normal(size=(2, 12, 8)).astype(np.float32)


def make(**options):
    options = {"segment_size": 4, "num_slots": 3, **options}
    return RecurrentMemoryAttention(8, 2, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("rotary", [None, RotaryEmbedding()])
def test_segments_in_two_calls_are_those_of_one(rotary):
    mixer = make(rotary=rotary)
    whole, last = mixer.mix_segments(X)
    first, memory = mixer.mix_segments(X[:, :8])
    rest, memory = mixer.mix_segments(X[:, 8:], memory)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(memory, last, rtol=1e-5, atol=1e-6)
    _, state = jax.jit(lambda m, x, s: m.extend(x, s))(mixer, X, mixer.init_state(2, 0))
    np.testing.assert_allclose(state.state[0], last, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stop", [True, False])
def test_gradients_stop_between_calls_where_asked(stop):
    mixer = make(stop_gradient=stop)

    @jax.jit
    @jax.grad
    def gradient(x):
        _, memory = mixer.mix_segments(x[:, :8])
        return jnp.sum(mixer.mix_segments(x[:, 8:], memory)[0] ** 2)

    @jax.jit
    @jax.grad
    def of_decoding(x):
        _, state = mixer.extend(x[:, :8], mixer.init_state(2, 0))
        return jnp.sum(mixer.extend(x[:, 8:], state)[0] ** 2)

    for of_x in (gradient(X), of_decoding(X)):
        assert np.any(of_x[:, :8]) != stop and np.any(of_x[:, 8:])
    # Within a call they pass.
    within = jax.jit(jax.grad(lambda x: jnp.sum(mixer(x)[:, 8:] ** 2)))(X)
    assert np.any(within[:, :4])


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="whole segments of 4 tokens, got 7 tokens"):
        make().mix_segments(X[:, :7])
    with pytest.raises(ValueError, match=r"memory must be floating point of shape \(2, 3, 8\)"):
        make().mix_segments(X, np.ones((2, 4, 8)))
    with pytest.raises(ValueError, match="num_slots must be an int, 1 or more slots, got 0"):
        make(num_slots=0)
