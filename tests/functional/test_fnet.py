"""Fourier mixing is that of the publication's model."""

import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import FNet
from tests.closeness import close

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers_fnet.npz"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 9, 6)).astype(np.float32)


def test_fourier_mixing_agrees_with_transformers():
    with np.load(GOLDEN) as file:

        @jax.jit
        def with_gradient(x, cotangent):
            y, pull_back = jax.vjp(effattn.fourier_mixing, x)
            return y, *pull_back(cotangent)

        y, gradient = with_gradient(file["x"], file["cotangent"])
        close(y, file["output"], 1e-4)
        close(gradient, file["gradient"], 1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: effattn.fourier_mixing(np.ones(3)), r"x must be floating point of shape \(\*B, T"),
        (lambda: effattn.fourier_mixing(np.ones((3, 3), int)), "got int.* cast it"),
        (lambda: effattn.fourier_mixing(X, norm="forward"), "norm must be .*, got .forward."),
        (lambda: FNet(8, norm=2, rngs=nnx.Rngs(0)), 'norm must be "backward" or "ortho", got 2'),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)
