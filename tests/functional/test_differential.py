"""Differential attention beyond the laws: its limit, wrong arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn

X = jnp.ones((1, 3, 2, 4))


def test_with_lambda_zero_it_is_softmax_attention_of_the_first_halves():
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 2, 9, 2, 6)).astype(np.float32)
    attend = jax.jit(functools.partial(effattn.differential_attention, is_causal=True))
    exact = jax.jit(functools.partial(effattn.dot_product_attention, is_causal=True))
    first = exact(query[..., :3], key[..., :3], value)
    np.testing.assert_allclose(attend(query, key, value, lambda_=0.0), first, rtol=1e-6)
    second = exact(query[..., 3:], key[..., 3:], value)
    out = attend(query, key, value, lambda_=np.float32([0.5, 2]))
    np.testing.assert_allclose(out, first - np.float32([[0.5], [2]]) * second, atol=1e-6)


@pytest.mark.parametrize(
    ("arrays", "lambda_", "message"),
    [
        (X[..., :3], 0.5, "query must have an even head size, two halves .*, got 3"),
        (X, jnp.ones(3), r"lambda_ must be floating point of shape \(2,\), got .* \(3,\)"),
        (X, jnp.ones((), int), r"lambda_ must be floating point of shape \(\), got int32"),
    ],
)
def test_wrong_arguments_are_named(arrays, lambda_, message):
    with pytest.raises(ValueError, match=message):
        effattn.differential_attention(arrays, arrays, arrays, lambda_=lambda_)
