"""Rounding: the error in float32 and bfloat16 is at most twice that of the naive form.

These are laws of a core. Quick tests cover one mechanism on each core, and slow tests cover all
mechanisms.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effattn.testing import functions, mixers
from effattn.testing.functions import SQUARE, Extent
from effattn.testing.laws import rms
from tests.cases import NARROW
from tests.laws.battery import (
    FIRST_MIXERS,
    MECHANISMS,
    MIXERS_WITH_CORES,
    OF_CORES,
    OF_CORES_IN_FLOAT32,
)
from tests.laws.sharding import draw_shared, run_shared, shared_sizes
from tests.marks import slow_but_for

SEEDS = 16
EPS = float(np.finfo(np.float32).eps)

of_cores = pytest.mark.parametrize("mixer", slow_but_for(MIXERS_WITH_CORES, FIRST_MIXERS), ids=str)


@st.composite
def draw_extents(draw, mechanism):
    ways = [way for way in ("causal", "bidirectional") if mechanism.has(way)]
    is_causal = draw(st.sampled_from(ways)) == "causal"
    return Extent(is_causal, *(draw(st.booleans()) for _ in ("everything", "simple", "tuning")))


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_float64_agrees_in_any_shape(mechanism):
    """The smallest shapes and random shapes: batch, lengths, heads, groups and features."""

    @settings(max_examples=2)
    @given(st.data())
    def agrees(data):
        extent = data.draw(draw_extents(mechanism))
        sizes = data.draw(functions.draw_sizes(mechanism, extent))
        known = data.draw(functions.draw_known(mechanism, sizes, extent))
        arrays = functions.draw_arrays(mechanism, sizes, extent.everything)
        cotangents = functions.cotangents_of(mechanism, extent, arrays, known)
        ours = functions.program(mechanism, extent)(arrays, known, cotangents)
        expected = functions.run_naive(mechanism, sizes, extent, arrays, known, cotangents)
        functions.assert_close(ours, expected, 1e-12)

    with jax.enable_x64(True):
        agrees()


@pytest.mark.parametrize("mechanism", OF_CORES_IN_FLOAT32, ids=str)
def test_float32_errs_at_most_twice_as_much_as_the_naive_form(mechanism):
    """The call has query, key, value and the mechanism's own arguments only."""
    extent, cotangents = functions.plain(mechanism), functions.plain_cotangents(mechanism)
    refer = functools.partial(functions.run_naive, mechanism, SQUARE, extent)

    def draw(seed):
        arrays = functions.draw_plain(mechanism, seed)
        return functions.run(mechanism, arrays, cotangents), (arrays, {}, cotangents)

    assert_errors_are_at_most_twice_those_of(refer, mechanism, draw)


@pytest.mark.devices
@pytest.mark.parametrize("mechanism", OF_CORES, ids=str)
def test_bfloat16_errs_at_most_twice_as_much_as_the_naive_form(mechanism):
    """All claimed options on eight devices, by the program of the laws on sharding."""
    sizes, extent = shared_sizes(mechanism), functions.everything(mechanism)
    refer = functools.partial(functions.run_naive, mechanism, sizes, extent)

    def draw(seed):
        drawn = draw_shared(mechanism, seed)
        return run_shared(mechanism, *drawn), drawn

    for path, error, exact in assert_errors_are_at_most_twice_those_of(refer, mechanism, draw):
        assert error <= 0.005 * exact, (path, error, exact)


def assert_errors_are_at_most_twice_those_of(refer, mechanism, draw):
    """Checks the draws of all seeds; returns names, errors and sizes of results and gradients.

    `draw(seed)` gives the mechanism's results and gradients, and the arguments of `refer`.
    """
    runs = []
    for seed in range(SEEDS):
        ours, (arrays, known, cotangents) = draw(seed)
        plain = refer(arrays, known, cotangents)
        with jax.enable_x64(True):
            wide = functions.as_float64((arrays, cotangents))
            true = refer(wide[0], known, wide[1])
            runs.append(functions.as_float64((ours, plain, true)))

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
        # The gradient of a decay is formed per chunk, from terms that cancel.
        if mechanism.case.decays & {getattr(key, "key", None) for key in path}:
            allowed = max(allowed, 1e-5 * exact / 2)
        found.append((jax.tree_util.keystr(path), error, exact))
        assert error <= 2 * allowed, (*found[-1], allowed)
    return found


@of_cores
def test_float32_mixers_err_at_most_twice_as_much_as_the_naive_form(mixer):
    """Checks outputs and all gradients."""
    module = mixers.made(mixer)
    runs = []
    for seed in range(SEEDS // 2):
        x, cotangent = mixers.tokens(2 * seed), mixers.tokens(2 * seed + 1)
        with jax.enable_x64(True):
            true = functions.to_numpy(mixers.run_naive(mixer, module, x, cotangent))
        narrow = (mixers.cast(a, np.float32) for a in (module, x, cotangent))
        plain = functions.to_numpy(mixers.run_naive(mixer, *narrow))
        runs.append((mixers.run_in_float32(mixer, x, cotangent), plain, true))
    ours, plain, true = jax.tree.map(lambda *leaves: np.stack(leaves), *runs)
    for (path, a), b, exact in zip(
        jax.tree.leaves_with_path(ours), jax.tree.leaves(plain), jax.tree.leaves(true), strict=True
    ):
        # If the naive form is almost exact, an error of one or two eps is allowed.
        allowed = max(2 * rms(b - exact), 4 * EPS * rms(exact))
        assert rms(a - exact) <= allowed, (jax.tree_util.keystr(path), rms(a - exact), allowed)


@of_cores
def test_bfloat16_mixers_err_at_most_twice_as_much_as_the_naive_form(mixer):
    """Checks outputs."""
    narrow = NARROW.get(mixer.name, ())
    module = mixers.made(mixer, more=narrow)
    wide = mixers.cast(mixers.made(mixer, more=narrow, dtype=jnp.bfloat16), np.float32)
    call = jax.jit(lambda m, x: m(x))
    refer = jax.jit(lambda m, x: jax.vmap(lambda row: mixer.mix(m, row))(x))
    runs = []
    for seed in range(SEEDS // 2):
        x = mixers.tokens(seed)
        with jax.enable_x64(True):
            exact = np.asarray(refer(module, x))
        y = call(wide, x.astype(jnp.bfloat16))
        assert y.dtype == jnp.bfloat16
        plain = refer(*mixers.cast((module, x), jnp.bfloat16))
        runs.append((y - exact, plain - exact, exact))
    error, of_plain, exact = map(rms, map(np.stack, zip(*runs, strict=True)))
    assert error <= max(2 * of_plain, 0.005 * exact) < 0.1 * exact
