"""Spatial gating is the identity at its initial values, and causal where asked."""

import functools

import jax
import numpy as np
import pytest

import effattn
from tests.closeness import close

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 9, 6)).astype(np.float32)


def compiled(function, **options):
    return jax.jit(functools.partial(function, **options))


def test_spatial_gating_with_zero_weights_is_the_identity():
    weights, bias = np.zeros((9, 9), np.float32), np.ones(9, np.float32)
    close(jax.jit(effattn.spatial_gating)(X, X, weights, bias), X)


def test_causal_spatial_gating_ignores_later_tokens():
    bias = np.zeros(9, np.float32)
    causal = compiled(effattn.spatial_gating, is_causal=True)
    assert not np.any(causal(X, X, np.eye(9, k=1), bias))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: effattn.spatial_gating(X, X, np.ones((4, 4)), np.ones(4)),
            r"weights of shape \(4, 4\) are for at most 4 tokens, got 9 in value",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)
