"""Retention: its limits, its decays, its state, and refused arguments."""

import functools

import jax
import numpy as np
import pytest

from effattn import linear_attention, retention
from effattn.functional.retention import retention_log_decay


def draw(length=8, heads=4, key_heads=2, size=4, value_size=3):
    """Query, key, value and log_decay, for two rows of whole chunks."""
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, length, heads, size))
    key = rng.normal(size=(2, length, key_heads, size))
    value = rng.normal(size=(2, length, key_heads, value_size))
    arrays = query, key, value, -rng.uniform(0.1, 1, size=key_heads)
    return tuple(x.astype(np.float32) for x in arrays)


@jax.jit
def attend(query, key, value, log_decay=None, initial_state=None):
    return retention(
        query,
        key,
        value,
        log_decay=log_decay,
        initial_state=initial_state,
        return_state=True,
        chunk_size=4,
    )


def close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), actual, expected
    )


def test_a_decay_of_1_is_linear_attention():
    query, key, value, log_decay = draw()
    linear = functools.partial(
        linear_attention, feature_map="identity", is_causal=True, return_state=True
    )
    expected = jax.jit(linear)(query, key, value)
    close(attend(query, key, value, 0 * log_decay), expected)


def test_a_decay_of_0_sees_the_token_alone():
    query, key, value, _ = draw()
    out, state = attend(query, key, value, np.full(2, -np.inf, np.float32))
    score = np.einsum("btnh,btnh->btn", query, np.repeat(key, 2, 2)) / 4**0.5
    close(out, score[..., None] * np.repeat(value, 2, 2))
    close(state, np.einsum("bkh,bkd->bkhd", key[:, -1], value[:, -1]))


def test_the_decays_of_the_paper():
    """The default decays are 1 - 2^(-5 - h)."""
    expected = np.log(1 - 2.0 ** -np.arange(5, 13))
    np.testing.assert_allclose(retention_log_decay(8), expected, rtol=1e-6)
    arrays = draw()[:3]
    close(attend(*arrays), attend(*arrays, np.asarray(retention_log_decay(2))))
    with pytest.raises(ValueError, match="num_heads must be an int, 1 or more heads, got -1"):
        retention_log_decay(-1)


def test_a_value_decays_once_a_token():
    """Only the first token is not zero; head h reads it at gamma_h^t."""
    ones = np.ones((1, 8, 2, 1), np.float32)
    first = ones * (np.arange(8) == 0)[:, None, None]
    log_decay = np.log([0.5, 0.9]).astype(np.float32)
    out, state = attend(ones, ones, first, log_decay)
    expected = np.array([0.5, 0.9]) ** np.arange(8)[:, None]
    close(out[0, ..., 0], expected)
    close(state[0, :, 0, 0], expected[-1])


def test_query_heads_that_share_a_key_head_are_repeated_keys():
    query, key, value, log_decay = draw()
    shared, state = attend(query, key, value, log_decay)
    repeated = [np.repeat(x, 2, axis=-2) for x in (key, value)]
    out, states = attend(query, *repeated, np.repeat(log_decay, 2))
    close((shared, np.repeat(state, 2, 1)), (out, states))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"log_decay": np.zeros(4)}, r"log_decay must be floating point of shape \(2,\), got .*4"),
        ({"log_decay": np.zeros((2, 8, 2))}, r"log_decay must .*shape \(2,\), got .*\(2, 8, 2\)"),
        ({"log_decay": np.zeros(2, int)}, "log_decay must be floating point .*, got int"),
        (
            {"log_decay": np.array([-1.0, 0.5])},
            "log_decay must be 0 or less, the logarithm of a decay, got up to 0.5; .* pass jnp.log",
        ),
        ({"initial_state": np.zeros((2, 4, 4, 3))}, r"initial_state must .*\(2, 2, 4, 3\)"),
        (
            {"scale": np.ones(2)},
            r"scale must be a number or an array of shape .*, got .* of shape \(2,\)",
        ),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        retention(*draw()[:3], **options)
