"""Errors and ranks of mechanisms whose weights are known, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.analysis import (
    LONGEST,
    approximation_error,
    effective_rank,
    mixing_weights,
    singular_values,
)
from effattn.analysis.approximation import _errors

T, N, K, H = 13, 4, 2, 3
DRAW = np.random.default_rng(0)
QUERY, KEY, VALUE = (DRAW.normal(size=(2, T, heads, H)) for heads in (N, K, K))


pytestmark = pytest.mark.usefixtures("x64")


def exact(is_causal=False):
    """Attention weights of exact attention, `(B, N, T, T)`."""
    logits = np.einsum("btnh,bsnh->bnts", QUERY, np.repeat(KEY, N // K, 2)) * H**-0.5
    logits = np.where(np.tri(T, dtype=bool) | (not is_causal), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def norm(array):
    return np.sqrt((array**2).sum((-2, -1)))


def mixing(weights):
    """A mechanism with given weights, `(T, S)` for all heads or `(N, T, S)`."""
    weights = jnp.asarray(weights)

    def mix(query, key, value):
        each = jnp.broadcast_to(weights, (query.shape[-2], *weights.shape[-2:]))
        value = jnp.repeat(value, query.shape[-2] // value.shape[-2], -2)
        return jnp.einsum("nts,...snh->...tnh", each, value)

    return mix


@pytest.mark.parametrize(("is_causal", "keys_at_once"), [(False, 1), (True, 5), (False, 128)])
def test_exact_attention_is_no_distance_from_itself(is_causal, keys_at_once):
    error = approximation_error(
        "softmax", QUERY, KEY, VALUE, is_causal=is_causal, keys_at_once=keys_at_once
    )
    for distance in error:
        assert distance.shape == (2, N) and distance.dtype == jnp.float64
        assert distance.max() < 1e-14


def test_what_is_exact_at_its_limit_has_no_error_there():
    identity = {"key_projection": np.eye(T), "value_projection": np.eye(T)}
    assert max(map(np.max, approximation_error("linformer", QUERY, KEY, VALUE, **identity))) < 1e-14
    landmarks = functools.partial(effattn.nystrom_attention, num_landmarks=T, num_iterations=40)
    assert max(map(np.max, approximation_error(landmarks, QUERY, KEY, VALUE))) < 1e-6


@pytest.mark.parametrize("is_causal", [False, True])
def test_errors_are_those_of_the_dense_matrices(is_causal):
    given = DRAW.normal(size=(N, T, T)) / T
    function = mixing(given)
    if is_causal:
        plain, given = function, np.tril(given)

        def function(query, key, value, is_causal):
            assert is_causal
            return mixing(given)(query, key, value)

        with pytest.raises(ValueError, match="takes no `is_causal`"):
            approximation_error(plain, QUERY, KEY, VALUE, is_causal=True)

    error = approximation_error(function, QUERY, KEY, VALUE, is_causal=is_causal, keys_at_once=4)
    weights, values = exact(is_causal), np.repeat(VALUE, N // K, 2).swapaxes(1, 2)
    np.testing.assert_allclose(error.matrix, norm(given - weights) / norm(weights), rtol=1e-12)
    apart = norm((given - weights) @ values) / norm(weights @ values)
    np.testing.assert_allclose(error.output, apart, rtol=1e-12)


def test_zeros_have_an_error_of_one_and_no_batch_is_needed():
    error = approximation_error(mixing(np.zeros((T, T))), QUERY[0], KEY[0], VALUE[0])
    for distance in error:
        np.testing.assert_allclose(distance, np.ones(N), rtol=1e-14)


def test_queries_and_keys_may_differ_in_number():
    error = approximation_error("softmax", QUERY[:, :5], KEY, VALUE[..., :2], keys_at_once=6)
    assert max(map(np.max, error)) < 1e-14


def test_memory_is_linear_in_length():
    def temporaries(length):
        shape = jax.ShapeDtypeStruct((length, 1, 8), jnp.float32)
        run = functools.partial(_errors, effattn.linear_attention, {}, False, 64)
        return jax.jit(run).lower(shape, shape, shape).compile().memory_analysis()

    short, long = (temporaries(n).temp_size_in_bytes for n in (4096, 16384))
    assert long < 4.5 * short < 16384**2


def test_bfloat16_is_compared_in_float32():
    heads = [jnp.asarray(a, jnp.bfloat16) for a in (QUERY, KEY, VALUE)]
    error = approximation_error("softmax", *heads)
    assert error.matrix.dtype == jnp.float32 and error.matrix.max() < 1e-5


def with_values(*values):
    """A `(T, T)` matrix with these singular values; the other singular values are zero."""
    left, right = (np.linalg.qr(DRAW.normal(size=(T, T)))[0] for _ in range(2))
    return (left[:, : len(values)] * values) @ right[: len(values)]


def test_singular_values_are_those_of_the_weights():
    weights = mixing_weights("softmax", QUERY, KEY)
    expected = np.linalg.svd(weights, compute_uv=False)
    np.testing.assert_allclose(singular_values("softmax", QUERY, KEY), expected, atol=1e-14)


def test_the_largest_ones_come_from_products_alone():
    # The cases are grouped keys, fewer keys than queries, and mechanisms with a custom VJP.
    rng, key = jax.random.key(0), KEY[:, :11]
    weights = mixing_weights("softmax", QUERY, key)
    expected = np.linalg.svd(weights, compute_uv=False)
    found = singular_values("softmax", QUERY, key, count=7, rng=rng)
    assert found.shape == (2, N, 7) and (found <= expected[..., :7] + 1e-12).all()
    np.testing.assert_allclose(found[..., :2], expected[..., :2], rtol=1e-3)
    full = singular_values(mixing(exact()[0]), QUERY, KEY, count=T, rng=rng)
    of_first = np.linalg.svd(exact()[0], compute_uv=False)
    np.testing.assert_allclose(full[1], of_first, atol=1e-12)
    low = singular_values(mixing(with_values(3, 2, 1)), QUERY, KEY, count=5, rng=rng)
    np.testing.assert_allclose(low, np.tile([3, 2, 1, 0, 0], (2, N, 1)), atol=1e-12)


@pytest.mark.parametrize(
    ("values", "rank"),
    [
        ((1,), 1),
        ((2, 2, 2), 3),
        ((1,) * T, T),
        # The entropy of the weights (1/2, 1/4, 1/4) is 3/2 bits.
        ((4, 2, 2), 2**1.5),
    ],
)
def test_effective_ranks_of_known_matrices(values, rank):
    rank_of = jax.jit(effective_rank)
    singular = singular_values(mixing(with_values(*values)), QUERY, KEY)
    np.testing.assert_allclose(rank_of(singular), np.full((2, N), rank), rtol=1e-10)
    np.testing.assert_allclose(rank_of(np.array(values, float)), rank, rtol=1e-12)


def test_the_effective_rank_has_bounds():
    singular = np.sort(DRAW.exponential(size=(50, 20)))[:, ::-1]
    rank = jax.jit(effective_rank)
    whole, part = np.asarray(rank(singular)), np.asarray(rank(singular[:, :7]))
    assert (1 <= part).all() and (part <= whole).all() and (whole <= 20).all()
    np.testing.assert_allclose(rank(5 * singular), whole, rtol=1e-12)
    assert rank(np.zeros(3)) == 0
    assert rank(np.array([3, 3, 0])) == pytest.approx(2)


def long(**options):
    ones = np.ones((LONGEST + 1, 1, 2))
    return singular_values("softmax", ones, ones, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: approximation_error("flash", QUERY, KEY, VALUE),
            "unknown mechanism 'flash'; registered are softmax",
        ),
        (
            lambda: approximation_error("nystrom", QUERY, KEY, VALUE, is_causal=True),
            "'nystrom' lacks 'causal'.*mechanisms that have it: softmax",
        ),
        (
            lambda: approximation_error("sparse_transformer", QUERY, KEY, VALUE),
            "'sparse_transformer' lacks 'bidirectional'",
        ),
        (
            lambda: approximation_error("softmax", QUERY, KEY, VALUE, keys_at_once=0),
            "keys_at_once must be an int, 1 or more keys, got 0",
        ),
        (
            lambda: approximation_error("softmax", QUERY, KEY[:, 1:], VALUE),
            "value must have the length and heads of key",
        ),
        (
            lambda: approximation_error(lambda q, k, v: v, QUERY, KEY, VALUE),
            r"must return one array of shape \(2, 13, 4, 3\) .* got \(2, 13, 2, 3\)",
        ),
        (long, f"the number of tokens must be an int from 1 to {LONGEST}"),
        (lambda: long(count=3), "count=3 needs rng, a jax.random key, got None"),
        (lambda: long(rng=jax.random.key(0)), "rng needs count"),
        (
            lambda: singular_values("softmax", QUERY, KEY, count=T + 1, rng=jax.random.key(0)),
            "count must be an int from 1 to 13, the number of tokens, got 14",
        ),
        (lambda: effective_rank(np.ones((2, 0))), r"singular must have shape .* got \(2, 0\)"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
