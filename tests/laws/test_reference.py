"""Law 1: every mechanism is its plain form, to rounding, with every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import battery
from tests.laws.battery import CROSS, LAST, MECHANISMS, SQUARE, SUBJECTS, Extent


def configurations():
    """What the claims of every subject call for, in as few programs as show it."""
    for subject in SUBJECTS:
        if subject in MECHANISMS or subject not in LAST:
            yield subject, SQUARE, battery.everything(subject)
        if subject in LAST and subject.has("bidirectional"):
            sizes = CROSS if subject.has("cross") else SQUARE
            yield subject, sizes, Extent(False, everything=True, simple=False, tuning=False)


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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_errors_are_at_most_twice_those_of_the_plain_form(mechanism, dtype):
    """In float32 of query, key and value alone, in bfloat16 of all that is claimed."""
    extent = everything = battery.everything(mechanism)
    if dtype == jnp.float32:
        extent = battery.plain(mechanism)
    known = battery.neutral(mechanism, SQUARE, everything)
    refer = functools.partial(battery.run_reference, mechanism, SQUARE, everything, of_pairs=extent)
    runs = []
    for seed in range(SEEDS):
        every = battery.draw_arrays(mechanism, SQUARE, True, seed)
        every = battery.cast(mechanism, every, dtype)
        if extent.everything:
            arrays = every
            cotangents = battery.cotangents_of(mechanism, extent, arrays, known, seed)
            ours = battery.program(mechanism, extent)(arrays, known, cotangents)
        else:
            arrays = battery.draw_plain(mechanism, seed)
            cotangents = battery.plain_cotangents(mechanism)
            ours = battery.run(mechanism, arrays, cotangents)
        filled = without_effect(mechanism, arrays, every)
        plain = refer(filled, known, cotangents)
        with jax.enable_x64(True):
            true = refer(battery.as_float64(filled), known, battery.as_float64(cotangents))
            given = [(r, {k: gradients[k] for k in arrays}) for r, gradients in (plain, true)]
            runs.append(battery.as_float64((ours, *given)))

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
        # A gradient of decays is formed per chunk, of terms that cancel.
        if mechanism.reference.decays & {getattr(key, "key", None) for key in path}:
            allowed = max(allowed, 1e-5 * rms(exact) / 2)
        assert error <= 2 * allowed, (jax.tree_util.keystr(path), error, allowed)
        if dtype == jnp.bfloat16:
            assert error <= 0.005 * rms(exact), (jax.tree_util.keystr(path), error, rms(exact))
