"""Fits of scaling laws: laws of known values are found again."""

import itertools

import numpy as np
import pytest

from experiments.harness import fits
from tests.marks import slow_but_for

KNOWN = {
    "chinchilla": (np.log(1.2), 4.0, 0.4, 5.0, 0.35),
    "kaplan": (12.0, 0.15, 18.0, 0.12),
}
PARAMETERS, TOKENS = np.array(
    list(itertools.product(np.geomspace(1e4, 1e6, 5), np.geomspace(1e5, 1e7, 5)))
).T


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_law_is_found_again(name):
    found = fitted(name, noise=1e-4)
    assert found.residual < 2e-4
    for exponent, true in exponents(name).items():
        assert found.values[exponent] == pytest.approx(true, rel=0.01)
        low, high = found.intervals[exponent]
        assert low <= found.values[exponent] <= high


def fitted(name, noise, seed=0):
    """Fit of a known law, of losses with errors of this size."""
    law = fits.LAWS[name]
    loss = np.exp(law.log_loss(np.array(KNOWN[name]), np.log(PARAMETERS), np.log(TOKENS)))
    errors = np.random.default_rng(seed).normal(scale=noise, size=loss.shape)
    return fits.fit(law, PARAMETERS, TOKENS, loss * np.exp(errors))


def exponents(name):
    values = dict(zip(fits.LAWS[name].names, KNOWN[name], strict=True))
    return {exponent: values[exponent] for exponent in ("alpha", "beta")}


@pytest.mark.parametrize("name", slow_but_for(["kaplan"], KNOWN))
def test_intervals_are_as_wide_as_the_errors_of_the_fits(name):
    """Most hold the true exponent; resampled points give intervals that are a little too narrow."""
    held = []
    for seed in range(8):
        found = fitted(name, noise=1e-2, seed=seed)
        for exponent, true in exponents(name).items():
            low, high = found.intervals[exponent]
            held.append(low <= true <= high)
    assert np.mean(held) >= 0.75


def test_the_laws_are_their_formulas():
    n, d = np.array([1e4, 1e6]), np.array([1e7, 1e5])
    log_e, log_a, alpha, log_b, beta = KNOWN["chinchilla"]
    expected = np.exp(log_e) + np.exp(log_a) / n**alpha + np.exp(log_b) / d**beta
    law = fits.LAWS["chinchilla"]
    found = law.log_loss(np.array(KNOWN["chinchilla"]), np.log(n), np.log(d))
    np.testing.assert_allclose(np.exp(found), expected)
    log_nc, alpha, log_dc, beta = KNOWN["kaplan"]
    expected = ((np.exp(log_nc) / n) ** (alpha / beta) + np.exp(log_dc) / d) ** beta
    law = fits.LAWS["kaplan"]
    found = law.log_loss(np.array(KNOWN["kaplan"]), np.log(n), np.log(d))
    np.testing.assert_allclose(np.exp(found), expected)


@pytest.mark.parametrize("name", KNOWN)
def test_slopes_are_the_derivatives(name):
    law, values = fits.LAWS[name], np.array(KNOWN[name])
    n, d = np.log(PARAMETERS), np.log(TOKENS)
    step = 1e-6 * np.eye(len(values))
    differences = [
        (law.log_loss(values + h, n, d) - law.log_loss(values - h, n, d)) / 2e-6 for h in step
    ]
    np.testing.assert_allclose(law.slopes(values, n, d), np.stack(differences, -1), atol=1e-6)


def test_fewer_points_than_values_are_refused():
    """Further seeds of the same sizes do not help."""
    sizes, losses = 2 * [1, 2, 3, 4], 2 * [4, 3, 2, 1]
    with pytest.raises(ValueError, match="a fit of 4 values needs more pairs of .* than that, got"):
        fits.fit(fits.LAWS["kaplan"], sizes, sizes, losses)


def test_seeds_of_a_model_are_resampled_together(monkeypatch):
    """So equal losses of three seeds give the intervals of one seed."""
    monkeypatch.setattr(fits, "RESAMPLES", 5)
    law = fits.LAWS["kaplan"]
    loss = np.exp(law.log_loss(np.array(KNOWN["kaplan"]), np.log(PARAMETERS), np.log(TOKENS)))
    loss *= np.exp(np.random.default_rng(0).normal(scale=1e-2, size=loss.shape))
    one = fits.fit(law, PARAMETERS, TOKENS, loss)
    three = fits.fit(law, *(np.tile(x, 3) for x in (PARAMETERS, TOKENS, loss)))
    for name in law.names:
        assert three.intervals[name] == pytest.approx(one.intervals[name], rel=1e-3)


def test_values_at_a_bound_are_named(monkeypatch):
    """Losses that fall to 0 have no E."""
    monkeypatch.setattr(fits, "RESAMPLES", 1)
    law = fits.LAWS["chinchilla"]
    for log_e, at_bound in ((-30.0, ("log E",)), (0.0, ())):
        values = np.array([log_e, *KNOWN["chinchilla"][1:]])
        loss = np.exp(law.log_loss(values, np.log(PARAMETERS), np.log(TOKENS)))
        assert fits.fit(law, PARAMETERS, TOKENS, loss).at_bound == at_bound


def test_the_frontier_has_the_points_that_no_cheaper_one_beats():
    assert fits.frontier([3, 1, 2, 4], [2.0, 3.0, 3.5, 1.0]) == [1, 0, 3]
    for loss in itertools.permutations([3.0, 2.0, 2.5]):  # one compute
        assert fits.frontier([1, 1, 1], loss) == [loss.index(2.0)]
    assert fits.power([1, 10, 100], [5, 0.5, 0.05]) == pytest.approx(-1)
