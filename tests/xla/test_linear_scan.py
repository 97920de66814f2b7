"""Elementwise recurrences in chunks against a loop over tokens, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn.xla.linear_scan import linear_scan, max_plus_scan

LENGTHS = [1, 64, 150]  # a chunk has 64 tokens


def by_token(combine):
    """All states of a recurrence, one token after the other."""

    @jax.jit
    def run(first, second, initial):
        def step(state, token):
            state = combine(state, *token)
            return state, state

        by_token = first.swapaxes(0, 1), second.swapaxes(0, 1)
        return jax.lax.scan(step, initial, by_token)[1].swapaxes(0, 1)

    return run


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_complex", [False, True], ids=["real", "complex"])
def test_linear_states_and_all_gradients_are_those_of_a_loop(length, is_complex):
    rng = np.random.default_rng(length)

    def draw(*shape):
        real = rng.normal(size=shape)
        return real + 1j * rng.normal(size=shape) if is_complex else real

    arrays = 0.6 * draw(2, length, 3), draw(2, length, 3), draw(2, 3)
    cotangent = draw(2, length, 3)
    with jax.enable_x64(True):
        loop = by_token(lambda state, decay, added: decay * state + added)
        for a, b in zip(
            *(
                jax.tree.leaves((out, pull_back(jnp.asarray(cotangent))))
                for out, pull_back in (jax.vjp(f, *arrays) for f in (linear_scan, loop))
            ),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", LENGTHS)
def test_states_of_maxima_are_those_of_a_loop(length):
    rng = np.random.default_rng(length)
    arrays = (
        rng.normal(size=(2, length, 3)),
        rng.normal(size=(2, length, 3)),
        rng.normal(size=(2, 3)),
    )
    with jax.enable_x64(True):
        loop = by_token(lambda state, change, floor: jnp.maximum(change + state, floor))
        np.testing.assert_allclose(max_plus_scan(*arrays), loop(*arrays), rtol=1e-12)
