"""Fits of scaling laws: laws of known values are found again."""

import itertools

import numpy as np
import pytest

from experiments.harness import fits

KNOWN = {
    "chinchilla": (np.log(1.2), 4.0, 0.4, 5.0, 0.35),
    "kaplan": (12.0, 0.15, 18.0, 0.12),
}
PARAMETERS, TOKENS = np.array(
    list(itertools.product(np.geomspace(1e4, 1e6, 5), np.geomspace(1e5, 1e7, 5)))
).T


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_law_is_found_again(name):
    law, known = fits.LAWS[name], np.array(KNOWN[name])
    loss = np.exp(law.log_loss(known, np.log(PARAMETERS), np.log(TOKENS)))
    noise = np.random.default_rng(0).normal(scale=1e-4, size=loss.shape)
    found = fits.fit(law, PARAMETERS, TOKENS, loss * np.exp(noise))
    assert found.residual < 2e-3
    for exponent in ("alpha", "beta"):
        true = known[law.names.index(exponent)]
        assert found.values[exponent] == pytest.approx(true, rel=0.15)
        low, high = found.intervals[exponent]
        assert low <= found.values[exponent] <= high


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


def test_fewer_points_than_values_are_refused():
    with pytest.raises(ValueError, match="a fit of 4 values needs more points than that, got 4"):
        fits.fit(fits.LAWS["kaplan"], [1, 2, 3, 4], [1, 2, 3, 4], [4, 3, 2, 1])


def test_the_frontier_has_the_points_that_no_cheaper_one_beats():
    assert fits.frontier([3, 1, 2, 4], [2.0, 3.0, 3.5, 1.0]) == [1, 0, 3]
    assert fits.power([1, 10, 100], [5, 0.5, 0.05]) == pytest.approx(-1)
