"""The RG-LRU is the recurrence of the Griffin paper, also where gates are closed or open."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import RGLRU

BATCH, LENGTH, D = 2, 70, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, LENGTH, D))
GATES = 1 / (1 + np.exp(-RNG.normal(size=(2, *X.shape))))
DECAY = np.array([0.99, 0.9, 0.5])


def by_paper(x, recurrence_gate, input_gate, decay, h):
    """Equations 3 and 4 of the paper."""
    out = np.zeros_like(x)
    for t in range(x.shape[1]):
        a = decay ** (8 * recurrence_gate[:, t])
        h = a * h + np.sqrt(1 - a**2) * input_gate[:, t] * x[:, t]
        out[:, t] = h
    return out


def test_it_is_the_recurrence_of_the_paper():
    first = RNG.normal(size=(BATCH, D))
    run = functools.partial(effattn.rg_lru, initial_state=first, return_state=True)
    with jax.enable_x64(True):
        h, state = jax.tree.map(np.asarray, jax.jit(run)(X, *GATES, log_decay=np.log(DECAY)))
    expected = by_paper(X, *GATES, DECAY, first)
    np.testing.assert_allclose(h, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(state, h[:, -1])


def test_closed_gates_keep_the_state_and_have_finite_gradients():
    """Where a is 1, the root is 0; its derivative counts as 0."""
    closed, log_decay = np.zeros(X.shape, np.float32), np.log(DECAY)
    first = np.ones((BATCH, D), np.float32)

    def run(x, recurrence_gate, input_gate, log_decay):
        return effattn.rg_lru(
            x, recurrence_gate, input_gate, log_decay=log_decay, initial_state=first
        )

    arrays = X.astype(np.float32), closed, closed + 1, log_decay.astype(np.float32)
    np.testing.assert_array_equal(run(*arrays), np.ones_like(X))
    gradient = jax.jit(jax.grad(lambda a: jnp.sum(run(*a) ** 2)))(arrays)
    assert all(np.isfinite(x).all() for x in gradient)


def test_inputs_of_variance_1_give_states_of_variance_1():
    """The root keeps the variance, whatever the decay."""
    x = np.random.default_rng(1).normal(size=(64, 512, 3)).astype(np.float32)
    ones = np.ones_like(x)
    h = jax.jit(effattn.rg_lru)(x, ones, ones, log_decay=np.log([0.999, 0.99, 0.9]) / 8)
    np.testing.assert_allclose(np.var(h[:, 1:], (0, 1))[1:], 1, rtol=0.05)


def test_decays_start_as_in_the_paper():
    mixer = jax.jit(lambda: RGLRU(512, 8, rngs=nnx.Rngs(0)))()
    decay = np.exp(-8 * np.log1p(np.exp(mixer.rate[...])))
    assert decay.min() >= 0.899 and decay.max() <= 0.9991
    np.testing.assert_allclose(decay.mean(), 0.9495, atol=0.005)
    blocks = mixer.input_gate[...]
    np.testing.assert_allclose(np.var(blocks), 1 / 64, rtol=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: effattn.rg_lru(X, *GATES, log_decay=DECAY),
            "log_decay must be 0 or less, .* 0.99",
        ),
        (
            lambda: effattn.rg_lru(X, GATES[0, :, :5], GATES[1], log_decay=-DECAY),
            "recurrence_gate must be float32 of",
        ),
        (
            lambda: effattn.rg_lru(X, GATES[0] + 2, GATES[1], log_decay=-DECAY),
            r"recurrence_gate must be between 0 and 1, got 2\.",
        ),
        (
            lambda: effattn.rg_lru(X, *GATES, log_decay=-DECAY, initial_state=X),
            r"initial_state must be floating point of shape \(2, 3\), got .* \(2, 70, 3\)",
        ),
        (
            lambda: RGLRU(7, 2, rngs=nnx.Rngs(0)),
            r"in_features \(7\) must be a multiple of num_heads",
        ),
        (
            lambda: RGLRU(8, 2, convolution_width=0, rngs=nnx.Rngs(0)),
            "convolution_width must be an int, 1 or more tokens, got 0",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
