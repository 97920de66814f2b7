"""Long convolutions are sums over tokens with regularised taps, in one direction or both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import LongConvolution

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 7, 3))
FILTER = RNG.normal(size=(2, 9, 3))


def by_paper(x, filters, skip, threshold, smoothing):
    """Sums one pair of tokens at a time; `filters[1]` is for later tokens."""
    length = filters.shape[1]
    taps = np.zeros_like(filters)
    for t in range(length):
        window = filters[:, max(t - smoothing, 0) : t + smoothing + 1]
        taps[:, t] = window.sum(1) / (2 * smoothing + 1)
    taps = np.where(np.abs(taps) > threshold, taps - threshold * np.sign(taps), 0)
    y = skip * x
    for t in range(x.shape[1]):
        for s in range(x.shape[1]):
            y[:, t] += (taps[0, t - s] if s <= t else taps[1, s - t - 1]) * x[:, s]
    return y


@pytest.mark.parametrize("is_causal", [True, False])
def test_it_is_the_sum_over_tokens(is_causal):
    options = {"threshold": 0.3, "smoothing": 2}
    run = functools.partial(effattn.long_convolution, is_causal=is_causal, **options)
    skip, filters = np.array([0.0, 1.0, -2.0]), FILTER
    if is_causal:
        filters = np.stack([FILTER[0], np.zeros_like(FILTER[0])])
    with jax.enable_x64(True):
        y = jax.jit(run)(X, FILTER[0] if is_causal else FILTER, skip=skip)
    expected = by_paper(X, filters, skip, **options)
    np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-10)


def test_taps_below_the_threshold_are_zero_and_have_no_gradient():
    taps = np.zeros((7, 3), np.float32)
    taps[0], taps[1] = 0.5, -0.1
    run = functools.partial(effattn.long_convolution, X.astype(np.float32), is_causal=True)

    @jax.jit
    def value_and_gradient(taps):
        return jax.value_and_grad(lambda t: jnp.sum(run(t, threshold=0.2)))(taps)

    y, gradient = value_and_gradient(taps)
    np.testing.assert_allclose(y, 0.3 * X.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient[0], X.sum((0, 1)), rtol=1e-5)
    assert not np.any(gradient[1:])


def test_filters_start_with_the_scales_of_the_paper():
    mixer = LongConvolution(400, max_length=40, is_causal=False, rngs=nnx.Rngs(0))
    filters = np.asarray(mixer.filter[...])
    assert filters.shape == (2, 40, 400)
    place = np.arange(40)[:, None] / 40
    scales = 0.02 * np.exp(-place * 200 ** (np.arange(400) / 400))
    normal = (filters / scales)[:, :, :200]
    np.testing.assert_allclose([normal.mean(), normal.std()], [0, 1], atol=0.03)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: effattn.long_convolution(X, FILTER[:, :5]),
            r"\(2, L, 3\) in a bidirectional call, with L at least the 7 tokens, got \(2, 5, 3\)",
        ),
        (
            lambda: effattn.long_convolution(X, FILTER, is_causal=True),
            r"\(L, 3\) in a causal call, .* got \(2, 9, 3\)",
        ),
        (
            lambda: effattn.long_convolution(X, FILTER.astype(int)),
            r"filter must be floating point of shape \(2, 9, 3\), got int",
        ),
        (
            lambda: effattn.long_convolution(X, FILTER, threshold=-1),
            "threshold must be a number, 0 or more, got -1",
        ),
        (
            lambda: LongConvolution(3, max_length=9, threshold=np.nan, rngs=nnx.Rngs(0)),
            "threshold must be a number, 0 or more, got nan",
        ),
        (
            lambda: LongConvolution(3, max_length=9, smoothing=0.5, rngs=nnx.Rngs(0)),
            "smoothing must be an int, 0 or more taps, got 0.5",
        ),
        (
            lambda: LongConvolution(3, max_length=6, rngs=nnx.Rngs(0))(X),
            "x has 7 tokens, but this LongConvolution has parameters for max_length=6",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
