"""Law 1: every mechanism is its plain form, to rounding, with every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import battery
from tests.laws.battery import (
    CROSS,
    FIRST_NAMES,
    LAST,
    MECHANISMS,
    OF_CORES,
    OF_CORES_IN_FLOAT32,
    SQUARE,
    SUBJECTS,
    Extent,
)
from tests.laws.sharding import draw_shared, run_shared, shared_sizes


def configurations():
    """What the claims of every subject call for, in as few programs as show it."""
    for subject in SUBJECTS:
        if subject in MECHANISMS or subject not in LAST:
            is_quick = subject in MECHANISMS
            yield configuration(subject, SQUARE, battery.everything(subject), is_quick)
        if subject in LAST and subject.has("bidirectional"):
            sizes = CROSS if subject.has("cross") else SQUARE
            extent = Extent(False, everything=True, simple=False, tuning=False)
            is_quick = subject.name in FIRST_NAMES
            yield configuration(subject, sizes, extent, is_quick)


def configuration(subject, sizes, extent, is_quick):
    direction = "causal" if extent.is_causal else "bidirectional"
    marks = () if is_quick else pytest.mark.slow
    return pytest.param(subject, sizes, extent, id=f"{subject}-{direction}", marks=marks)


@pytest.mark.parametrize(("subject", "sizes", "extent"), list(configurations()))
def test_float64_agrees(subject, sizes, extent):
    """Outputs, log-sum-exps, states and the gradients of every array that was given."""

    @settings(max_examples=8)
    @given(battery.draw_known(subject, sizes, extent), st.integers(0, 99))
    def agrees(known, seed):
        assert_agrees(subject, sizes, extent, known, seed)

    with jax.enable_x64(True):
        agrees()


def assert_agrees(subject, sizes, extent, known, seed):
    arrays = battery.draw_arrays(subject, sizes, extent.everything, seed)
    cotangents = battery.cotangents_of(subject, extent, arrays, known)
    ours = battery.program(subject, extent)(arrays, known, cotangents)
    expected = battery.run_reference(subject, sizes, extent, arrays, known, cotangents)
    battery.assert_close(ours, expected, 1e-12)


@st.composite
def draw_extents(draw, mechanism):
    ways = [way for way in ("causal", "bidirectional") if mechanism.has(way)]
    is_causal = draw(st.sampled_from(ways)) == "causal"
    return Extent(is_causal, *(draw(st.booleans()) for _ in ("everything", "simple", "tuning")))


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_float64_agrees_in_any_shape(mechanism):
    """Of the smallest shapes, and of random ones: batch, lengths, heads, groups and features."""

    @settings(max_examples=2)
    @given(st.data())
    def agrees(data):
        extent = data.draw(draw_extents(mechanism))
        sizes = data.draw(battery.draw_sizes(mechanism, extent))
        known = data.draw(battery.draw_known(mechanism, sizes, extent))
        assert_agrees(mechanism, sizes, extent, known, 0)

    with jax.enable_x64(True):
        agrees()


SEEDS = 16


def rms(x):
    return np.sqrt(np.mean(np.square(x[np.isfinite(x)])))


def without_effect(mechanism, arrays, like):
    """`arrays` for the reference of everything, the arrays that it has more leaving no trace."""
    nothing = {"scale": arrays["query"].shape[-1] ** -0.5, "sink": -np.inf}
    more = like.keys() - arrays.keys()
    filled = {k: np.full_like(like[k], nothing.get(k, 0)) for k in more - {"initial_state"}}
    if "initial_state" in more:
        filled["initial_state"] = battery.empty_state(mechanism, SQUARE, jnp.float32)
    return {**filled, **arrays}


@pytest.mark.parametrize("mechanism", OF_CORES_IN_FLOAT32, ids=str)
def test_float32_errs_at_most_twice_as_much_as_the_plain_form(mechanism):
    """Of query, key and value alone."""
    extent, everything = battery.plain(mechanism), battery.everything(mechanism)
    known = battery.neutral(mechanism, SQUARE, everything)
    cotangents = battery.plain_cotangents(mechanism)
    refer = functools.partial(battery.run_reference, mechanism, SQUARE, everything, of_pairs=extent)

    def draw(seed):
        every = battery.draw_arrays(mechanism, SQUARE, True, seed)
        every = battery.cast(mechanism, every, jnp.float32)
        arrays = battery.draw_plain(mechanism, seed)
        ours = battery.run(mechanism, arrays, cotangents)
        return ours, (without_effect(mechanism, arrays, every), known, cotangents)

    assert_errors_are_at_most_twice_those_of(refer, mechanism, draw)


@pytest.mark.devices
@pytest.mark.parametrize("mechanism", OF_CORES, ids=str)
def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_form(mechanism):
    """Of all that is claimed, and on eight devices: the program of law 9, in its dtype."""
    sizes, extent = shared_sizes(mechanism), battery.everything(mechanism)
    refer = functools.partial(battery.run_reference, mechanism, sizes, extent)

    def draw(seed):
        drawn = draw_shared(mechanism, seed)
        return run_shared(mechanism, *drawn), drawn

    for path, error, exact in assert_errors_are_at_most_twice_those_of(refer, mechanism, draw):
        assert error <= 0.005 * exact, (path, error, exact)


def assert_errors_are_at_most_twice_those_of(refer, mechanism, draw):
    """Over the draws of all seeds; returns names, errors and sizes of the results and gradients.

    `draw(seed)` gives the mechanism's results and gradients, and the arguments of `refer`.
    """
    runs = []
    for seed in range(SEEDS):
        ours, (arrays, known, cotangents) = draw(seed)
        plain = refer(arrays, known, cotangents)
        with jax.enable_x64(True):
            true = refer(battery.as_float64(arrays), known, battery.as_float64(cotangents))
            given = [(r, {k: gradients[k] for k in ours[1]}) for r, gradients in (plain, true)]
            runs.append(battery.as_float64((ours, *given)))

    ours, plain, true = jax.tree.map(lambda *leaves: np.stack(leaves), *runs)
    of_ours, of_plain = (
        jax.tree.map(lambda a, b: rms(a - b), results, true) for results in (ours, plain)
    )
    found = []
    for (path, error), allowed, exact in zip(
        jax.tree.leaves_with_path(of_ours),
        jax.tree.leaves(of_plain),
        map(rms, jax.tree.leaves(true)),
        strict=True,
    ):
        # A gradient of decays is formed per chunk, of terms that cancel.
        if mechanism.reference.decays & {getattr(key, "key", None) for key in path}:
            allowed = max(allowed, 1e-5 * exact / 2)
        found.append((jax.tree_util.keystr(path), error, exact))
        assert error <= 2 * allowed, (*found[-1], allowed)
    return found
