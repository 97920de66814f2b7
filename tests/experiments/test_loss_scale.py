"""Dynamic scaling of the loss; `test_training` tests the scaling in training steps."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness.loss_scale import GROWTH_STEPS, MOST, START, LossScale

DYNAMIC, STATIC = LossScale(dynamic=True), LossScale(dynamic=False)


def descend(gradients, state):
    """Gradient descent that counts its steps."""
    return 1.0 - gradients, state + 1


def update(gradient, factor=START, good=0):
    arrays = jnp.float32(1), jnp.int32(5)
    state = jnp.float32(factor), jnp.int32(good)
    (trained, steps), state = DYNAMIC.update(descend, jnp.float32(gradient), arrays, state)
    return float(trained), int(steps), float(state[0]), int(state[1])


def test_the_loss_is_scaled_and_its_gradients_are_not():
    assert float(DYNAMIC.up(jnp.float32(3), DYNAMIC.init())) == 3 * START
    assert update(0.25 * START) == (0.75, 6, START, 1)


@pytest.mark.parametrize("gradient", [np.inf, -np.inf, np.nan])
def test_a_gradient_that_is_not_finite_changes_nothing_but_the_factor(gradient):
    assert update(gradient, good=7) == (1.0, 5, START / 2, 0)
    assert update(gradient, factor=1.0)[2] == 1.0


def test_the_factor_doubles_after_good_steps_in_a_row():
    assert update(1.0, good=GROWTH_STEPS - 2)[2:] == (START, GROWTH_STEPS - 1)
    assert update(1.0, good=GROWTH_STEPS - 1)[2:] == (2 * START, 0)
    assert update(1.0, factor=MOST, good=GROWTH_STEPS - 1)[2] == MOST


def test_without_scaling_there_is_no_state():
    assert STATIC.init() == () and STATIC.up(3.0, ()) == 3.0
    (trained, steps), state = STATIC.update(descend, 0.25, (1.0, 5), ())
    assert (trained, steps, state) == (0.75, 6, ())
