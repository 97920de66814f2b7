"""Entmax attention beyond the laws: thresholds, sparsity, gradients, wrong arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.functional import entmax


def weights(logits, alpha, **options):
    """Weights `(T, S)` of logits `(T, S)`, read off by one-hot keys and values."""
    identity = np.eye(logits.shape[-1])[:, None]
    attend = functools.partial(effattn.entmax_attention, alpha=alpha, scale=1.0, **options)
    return attend(jnp.asarray(logits)[:, None], identity, identity)[:, 0]


def projected(row, alpha):
    """Weights of one row by trying every number of keys above the threshold."""
    z = (alpha - 1) * np.sort(row)[::-1]
    for n in range(1, len(z) + 1):
        mean, spread = z[:n].mean(), ((z[:n] - z[:n].mean()) ** 2).sum()
        inside = 1 / n if alpha == 2 else ((1 - spread) / n) ** 0.5 if spread <= 1 else np.nan
        found = np.maximum((alpha - 1) * row - mean + inside, 0) ** (1 / (alpha - 1))
        if (found > 0).sum() == n and abs(found.sum() - 1) < 1e-9:
            return found
    raise AssertionError


@pytest.mark.parametrize("alpha", [1.5, 2])
@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
def test_thresholds_are_exact(alpha, spread):
    logits = spread * np.random.default_rng(0).normal(size=(20, 11))
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(functools.partial(weights, alpha=alpha))(logits))
    expected = np.stack([projected(row, alpha) for row in logits])
    np.testing.assert_allclose(found, expected, atol=1e-14)
    np.testing.assert_array_equal(found == 0, expected == 0)
    found = np.asarray(jax.jit(functools.partial(weights, alpha=alpha))(np.float32(logits)))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)


def test_keys_far_below_the_largest_have_no_weight():
    logits = np.array([[0.0, -0.99, -1.0, -1.99, -2.0, -50.0]])
    sparse = np.asarray(weights(logits, 2))
    assert (sparse[0] > 0).tolist() == [True, True] + [False] * 4
    entmax = np.asarray(weights(logits, 1.5))
    assert (entmax[0, :3] > 0).all() and (entmax[0, 4:] == 0).all()


def test_sparsemax_of_two_keys_is_a_clipped_line():
    difference = np.linspace(-2, 2, 9)
    logits = np.stack([difference, np.zeros(9)], 1)
    expected = np.clip((difference + 1) / 2, 0, 1)
    np.testing.assert_allclose(weights(logits, 2)[:, 0], expected, atol=1e-6)


@pytest.mark.parametrize("alpha", [1.5, 2])
def test_the_gradient_is_that_of_finite_differences(alpha):
    rng = np.random.default_rng(3)
    logits, along, cotangent = rng.normal(size=(3, 6, 7))
    with jax.enable_x64(True):
        call = jax.jit(functools.partial(weights, alpha=alpha))
        step = 1e-6
        numeric = (call(logits + step * along) - call(logits - step * along)) / (2 * step)
        _, tangent = jax.jvp(call, (logits,), (along,))
        (gradient,) = jax.vjp(call, logits)[1](jnp.asarray(cotangent))
    np.testing.assert_allclose(tangent, numeric, atol=1e-8)
    gradient, tangent = np.asarray(gradient), np.asarray(tangent)
    np.testing.assert_allclose((gradient * along).sum(), (tangent * cotangent).sum(), rtol=1e-10)


@pytest.mark.parametrize("alpha", [1, 1.7, "2", None, jnp.ones(2)])
def test_another_alpha_is_refused(alpha):
    x = jnp.ones((1, 3, 2, 4))
    with pytest.raises(ValueError, match="alpha must be 1.5 or 2, got"):
        effattn.entmax_attention(x, x, x, alpha=alpha)


def test_a_threshold_that_is_rounded_down_gives_the_keys_below_it_no_weight(monkeypatch):
    """Compiled, an entry and the largest entry may be rounded differently."""
    exact = entmax._threshold

    def rounded(alpha, z):
        return exact(alpha, z) - 4 * jnp.finfo(z.dtype).eps

    monkeypatch.setattr(entmax, "_threshold", rounded)
    logits, allowed = jnp.array([3.0, 1.0, -2.0]), jnp.ones(3, bool)
    row = functools.partial(entmax._weights, 2.0, allowed=allowed)
    np.testing.assert_array_equal(row(logits), [1, 0, 0])
    assert not np.any(jax.jacobian(row)(logits))
