"""Law 1: every mechanism is its plain form, to rounding, with every gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import battery
from tests.laws.battery import CROSS, MECHANISMS, SQUARE, SUBJECTS, Extent


def configurations():
    """What the claims of every subject call for, in as few programs as show it."""
    for subject in SUBJECTS:
        first = subject in MECHANISMS
        if subject.has("causal"):
            yield subject, SQUARE, Extent(True, everything=True, position_free=first)
        if subject.has("bidirectional") and (first or not subject.has("causal")):
            sizes = CROSS if subject.has("cross") else SQUARE
            yield subject, sizes, Extent(False, True, position_free=False, tuning=False)


def named(configurations):
    return [
        pytest.param(*one, id=f"{one[0]}-{'causal' if one[-1].is_causal else 'bidirectional'}")
        for one in configurations
    ]


@pytest.mark.parametrize(("subject", "sizes", "extent"), named(configurations()))
def test_float64_agrees(subject, sizes, extent):
    """Outputs, log-sum-exps, states and the gradients of every array that was given."""

    @settings(max_examples=8)
    @given(battery.draw_known(subject, sizes, extent), st.integers(0, 99))
    def agrees(known, seed):
        arrays = battery.draw_arrays(subject, sizes, extent.everything, seed)
        cotangents = battery.cotangents_of(subject, extent, arrays, known)
        ours = battery.program(subject, extent)(arrays, known, cotangents)
        expected = battery.run_reference(subject, sizes, extent, arrays, known, cotangents)
        battery.assert_close(ours, expected, 1e-12)

    with jax.enable_x64(True):
        agrees()


SEEDS = 4


def rms(x):
    return np.sqrt(np.mean(np.square(x[np.isfinite(x)])))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("subject", MECHANISMS, ids=str)
def test_errors_are_at_most_twice_those_of_the_plain_form(subject, dtype):
    extent = Extent(subject.has("causal"), everything=True)
    known = battery.neutral(subject, SQUARE, extent)
    runs = []
    for seed in range(SEEDS):
        arrays = battery.cast(battery.draw_arrays(subject, SQUARE, True, seed), dtype)
        cotangents = battery.cotangents_of(subject, extent, arrays, known, seed)
        ours = battery.program(subject, extent)(arrays, known, cotangents)
        plain = battery.run_reference(subject, SQUARE, extent, arrays, known, cotangents)
        assert jax.tree.map(jnp.result_type, ours) == jax.tree.map(jnp.result_type, plain)
        with jax.enable_x64(True):
            wide = battery.as_float64((arrays, cotangents))
            true = battery.run_reference(subject, SQUARE, extent, wide[0], known, wide[1])
            runs.append(battery.as_float64((ours, plain, true)))

    ours, plain, true = jax.tree.map(lambda *leaves: np.stack(leaves), *runs)
    of_ours, of_plain = (
        jax.tree.map(lambda a, b: rms(a - b), results, true) for results in (ours, plain)
    )
    for (path, error), allowed, exact in zip(
        jax.tree.leaves_with_path(of_ours),
        jax.tree.leaves(of_plain),
        jax.tree.leaves(true),
        strict=True,
    ):
        assert error <= 2 * allowed, (jax.tree_util.keystr(path), error, allowed)
        if dtype == jnp.bfloat16:
            assert error <= 0.005 * rms(exact), (jax.tree_util.keystr(path), error, rms(exact))
