"""Sigmoid and squared-ReLU attention beyond the laws: defaults, memory, wrong arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.analysis import cost

FUNCTIONS = [effattn.sigmoid_attention, effattn.squared_relu_attention]
X = np.random.default_rng(0).normal(size=(1, 9, 2, 4)).astype(np.float32)


def test_by_default_weights_fall_with_the_number_of_keys():
    logits = np.einsum("btnh,bsnh->bnts", X, X) / 2
    sigmoid, squared = 1 / (1 + 9 * np.exp(-logits)), np.maximum(logits, 0) ** 2 / 9
    for function, weights in zip(FUNCTIONS, (sigmoid, squared), strict=True):
        expected = np.einsum("bnts,bsnh->btnh", weights, X)
        np.testing.assert_allclose(jax.jit(function)(X, X, X), expected, atol=1e-5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_is_that_of_tiles(function):
    length = 4096
    x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)

    def loss(x):
        return function(x, x, x, is_causal=True).sum()

    assert cost.temporary_bytes(jax.jit(jax.grad(loss)).trace(x)) < length**2


@pytest.mark.parametrize("function", FUNCTIONS)
def test_equal_calls_are_one_program(function):
    traced = []

    def score_mod(logit, b, h, i, j):
        traced.append(logit)
        return logit

    for _ in range(3):
        function(X, X, X, score_mod=score_mod)
    first = len(traced)
    function(X, X, X, score_mod=score_mod)
    assert len(traced) - first <= 1  # one trace checks the result of the score_mod


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["triton", "mosaic_gpu", "mosaic_tpu"])
def test_kernels_refuse_it(function, name):
    x = X.astype(jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="takes a softmax of the logits, not s"):
        function(x, x, x, implementation=name)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_there_is_no_log_sum_exp(function):
    with pytest.raises(TypeError, match="return_residual"):
        function(X, X, X, return_residual=True)


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match="logit_bias must be finite, got nan"):
        effattn.sigmoid_attention(X, X, X, logit_bias=float("nan"))
    with pytest.raises(ValueError, match="logit_bias must be a finite number, got 'two'"):
        effattn.sigmoid_attention(X, X, X, logit_bias="two")
    with pytest.raises(ValueError, match="divisor must be a finite number above 0, got 0"):
        effattn.squared_relu_attention(X, X, X, divisor=0)
    with pytest.raises(ValueError, match="logit_bias must be a finite number, got Jit"):
        jax.jit(lambda b: effattn.sigmoid_attention(X, X, X, logit_bias=b))(0.0)


@pytest.mark.parametrize("number", [np.float32(2.0), np.array(2.0), jnp.float32(2.0)])
def test_options_may_be_numbers_of_arrays(number):
    got = effattn.sigmoid_attention(X, X, X, logit_bias=number)
    np.testing.assert_array_equal(got, effattn.sigmoid_attention(X, X, X, logit_bias=2.0))
