"""Hyena without filters is the product of its gates."""

import jax
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import Hyena
from tests.closeness import close

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 9, 6)).astype(np.float32)
D = X.shape[-1]


def test_hyena_without_filters_is_its_gates():
    gates = RNG.normal(size=(3, *X.shape)).astype(np.float32)
    filters = np.zeros((3, 9, D), np.float32)
    filters[:, 0] = 2
    run = jax.jit(effattn.hyena_convolution)
    close(run(gates, X, filters), 8 * gates.prod(0) * X)
    skip = np.full((3, D), 2, np.float32)
    close(run(gates, X, 0 * filters, skip=skip), 8 * gates.prod(0) * X)


FILTERS, FACTORS = np.zeros((2, 9, D)), (np.zeros((9, 2)), np.zeros((9, 2)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: effattn.hyena_convolution(np.zeros((2, 2, 9, D)), X, FILTERS[:, :5]),
            r"filters must have shape \(2, L, 6\) with L at least the 9 tokens, .* max_length",
        ),
        (
            lambda: effattn.hyena_convolution(np.zeros((2, 2, 9, D)), X, FILTERS.astype(int)),
            r"filters must be floating point of shape \(2, 9, 6\), got int",
        ),
        (lambda: Hyena(D, max_length=5, rngs=nnx.Rngs(0))(X), "9 tokens, .* max_length=5"),
        (
            lambda: Hyena(D, max_length=9, window_shift=None, rngs=nnx.Rngs(0)),
            "window_shift must be a number, got None",
        ),
        (
            lambda: Hyena(D, max_length=9, frequency="10", rngs=nnx.Rngs(0)),
            "frequency must be a number, got '10'",
        ),
        (
            lambda: Hyena(D, max_length=9, frequency=np.nan, rngs=nnx.Rngs(0)),
            "frequency must be finite, got nan",
        ),
        (
            lambda: Hyena(D, max_length=9, window_shift=np.nan, rngs=nnx.Rngs(0)),
            "window_shift must be finite, got nan",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)
