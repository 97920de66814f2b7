"""RWKV-4's mixing at its limits: large keys, no decay, documents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.functional.rwkv4 import Sums
from tests.closeness import close

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 9, 6)).astype(np.float32)
D = X.shape[-1]


def test_mixing_takes_keys_of_any_size():
    """The largest key decides. Without decay and bonus, the result is a running softmax."""
    key = X.copy()
    key[:, 4] = 1e6
    zeros, run = np.zeros(D, np.float32), jax.jit(effattn.rwkv4_mixing)
    y = np.asarray(run(key, X, decay=zeros, bonus=zeros))
    close(y[:, 4:], np.broadcast_to(X[:, 4:5], X[:, 4:].shape))
    weights = np.exp(X)
    running = np.cumsum(weights * X, 1) / np.cumsum(weights, 1)
    close(run(X, X, decay=zeros, bonus=zeros), running)
    # The decay leaves only the present token and the one before it.
    far = np.full(D, 1e4, np.float32)
    y = np.asarray(run(X, X, decay=far, bonus=zeros))
    pair = (weights * X)[:, 1:] + (weights * X)[:, :-1]
    close(y[:, 1:], pair / (weights[:, 1:] + weights[:, :-1]))


def test_derivatives_along_a_tangent_are_those_of_the_gradients():
    key, value, tangent = np.random.default_rng(0).normal(size=(3, 1, 70, 3)).astype(np.float32)
    mix = functools.partial(effattn.rwkv4_mixing, value=value, decay=jnp.ones(3), bonus=jnp.ones(3))
    y, along = jax.jvp(mix, (key,), (tangent,))
    (gradient,) = jax.vjp(mix, key)[1](y)
    np.testing.assert_allclose((along * y).sum(), (gradient * tangent).sum(), rtol=1e-4)


def test_mixing_of_a_document_behind_one_of_far_larger_keys():
    """The weights of the second document do not underflow beside those of the first."""
    shift = np.where(np.arange(9) < 4, 100, -50)[:, None].astype(np.float32)
    ids = jnp.asarray([[1] * 4 + [2] * 5] * 2)

    @jax.jit
    def run(key, value, ids):
        mix = functools.partial(effattn.rwkv4_mixing, decay=jnp.ones(D), bonus=jnp.ones(D))
        y, pull_back = jax.vjp(lambda *arrays: mix(*arrays, segment_ids=ids), key, value)
        return y, pull_back(jnp.cos(y))

    together = run(X + shift, X, ids)
    alone = run((X + shift)[:, 4:], X[:, 4:], ids[:, 4:])
    for found, right in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        close(found[:, 4:], right, 2e-5)


def test_mixing_takes_zeros_for_the_state_of_no_token():
    """Zeros work even before keys for which exp(k) underflows."""
    key, value = np.full((1, 3, 2), -200, np.float32), np.ones((1, 3, 2), np.float32)
    zeros = Sums(*np.zeros((3, 1, 2), np.float32))
    mix = functools.partial(effattn.rwkv4_mixing, decay=np.ones(2), bonus=np.ones(2))
    np.testing.assert_allclose(mix(key, value, initial_state=zeros), 1, rtol=1e-6)


IDS = np.ones((2, 9), int)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: effattn.rwkv4_mixing(X, X[:, :3], decay=0, bonus=0), "value must be float32 of"),
        (
            lambda: effattn.rwkv4_mixing(X, X, decay=-0.1 * np.ones(D), bonus=np.ones(D)),
            "decay must be 0 or more, got -0.1",
        ),
        (
            lambda: effattn.rwkv4_mixing(X, X, decay=np.ones(3), bonus=np.ones(D)),
            r"decay must be floating point of shape \(6,\), got .* \(3,\)",
        ),
        (
            lambda: effattn.rwkv4_mixing(
                X, X, decay=np.ones(D), bonus=np.ones(D), segment_ids=IDS, initial_state=()
            ),
            "initial_state needs segment_ids=None",
        ),
        (
            lambda: effattn.rwkv4_mixing(
                X, X, decay=np.ones(D), bonus=np.ones(D), initial_state=Sums(X, X, X)
            ),
            r"initial_state.values must be floating point of shape \(2, 6\), got .* \(2, 9, 6\)",
        ),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
