"""Gated linear attention: its limits, its decays, and refused arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import gated_linear_attention, linear_attention, retention


def draw(length=8, heads=4, key_heads=2, size=4, value_size=3):
    """Query, key, value and log_decay of each feature, for two rows of whole chunks."""
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, length, heads, size))
    key = rng.normal(size=(2, length, key_heads, size))
    value = rng.normal(size=(2, length, key_heads, value_size))
    arrays = query, key, value, -rng.uniform(0.1, 1, size=key.shape)
    return tuple(x.astype(np.float32) for x in arrays)


@jax.jit
def attend(query, key, value, log_decay):
    return gated_linear_attention(
        query, key, value, log_decay=log_decay, return_state=True, chunk_size=4
    )


def close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), actual, expected
    )


def test_decays_of_1_are_linear_attention():
    query, key, value, log_decay = draw()
    linear = functools.partial(
        linear_attention, feature_map="identity", is_causal=True, return_state=True
    )
    expected = jax.jit(linear)(query, key, value)
    close(attend(query, key, value, 0 * log_decay), expected)
    close(attend(query, key, value, 0 * log_decay[..., 0]), expected)


def test_features_that_decay_alike_are_the_decay_of_a_token():
    query, key, value, log_decay = draw()
    alike = np.broadcast_to(log_decay[..., :1], log_decay.shape)
    close(attend(query, key, value, alike), attend(query, key, value, log_decay[..., 0]))


def test_tokens_that_decay_alike_are_retention():
    query, key, value, log_decay = draw()
    of_heads = log_decay[0, 0, :, 0]
    expected = jax.jit(functools.partial(retention, return_state=True))(
        query, key, value, log_decay=of_heads
    )
    close(attend(query, key, value, np.broadcast_to(of_heads, (2, 8, 2))), expected)


@pytest.mark.parametrize("of_features", [True, False], ids=["features", "tokens"])
def test_a_decay_of_0_forgets_all_before_its_token(of_features):
    query, key, value, log_decay = draw()
    log_decay = log_decay if of_features else log_decay[..., 0]
    log_decay[:, 6] = -np.inf
    out, state = attend(query, key, value, log_decay)
    later = attend(*(np.roll(x, -6, 1) for x in (query, key, value, log_decay)))[0]
    close(out[:, 6:], later[:, :2])
    log_decay[:, :6] = -0.2
    key[:, :6] += 10
    close(attend(query, key, value, log_decay)[1], state)


def test_each_feature_decays_by_itself():
    """One feature is forgotten at token 3, and the other feature never decays."""
    ones = np.ones((1, 8, 1, 2), np.float32)
    log_decay = np.zeros((1, 8, 1, 2), np.float32)
    log_decay[0, 3, 0, 0] = np.log(0.25)
    value = np.zeros((1, 8, 1, 1), np.float32)
    value[0, 0] = 1
    out, state = attend(ones, ones, value, log_decay)
    close(out[0, :, 0, 0] * 2**0.5, [2] * 3 + [1.25] * 5)
    close(state[0, 0, :, 0], [0.25, 1])


def test_query_heads_that_share_a_key_head_are_repeated_keys():
    query, key, value, log_decay = draw()
    shared, state = attend(query, key, value, log_decay)
    out, states = attend(query, *(np.repeat(x, 2, 2) for x in (key, value, log_decay)))
    close((shared, np.repeat(state, 2, 1)), (out, states))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"log_decay": np.zeros(2)}, r"log_decay must .* shape \(2, 8, 2\), got .*\(2,\)"),
        (
            {"log_decay": np.zeros((2, 8, 2, 3))},
            r"log_decay must be floating point of shape \(2, 8, 2, 4\), got .*\(2, 8, 2, 3\)",
        ),
        ({"log_decay": np.zeros((2, 8, 2), int)}, "log_decay must be floating point .*, got int"),
        (
            {"log_decay": np.full((2, 8, 2), 0.5)},
            "log_decay must be 0 or less, the logarithm of a decay, got up to 0.5; .*log_sigmoid",
        ),
        ({"initial_state": np.zeros((2, 4, 4, 3))}, r"initial_state must .*\(2, 2, 4, 3\)"),
        (
            {"scale": np.ones(2)},
            r"scale must be a number or an array of shape .*, got .* of shape \(2,\)",
        ),
    ],
)
def test_bad_options_are_named(options, message):
    *arrays, log_decay = draw()
    with pytest.raises(ValueError, match=message):
        gated_linear_attention(*arrays, **{"log_decay": log_decay, **options})


def test_decays_that_a_trace_closes_over_are_known():
    x, decays = jnp.ones((1, 3, 1, 4)), jnp.array([-1.0, 0.5, 0]).reshape(1, 3, 1)

    def gated(x):
        return gated_linear_attention(x, x, x, log_decay=decays)

    with pytest.raises(ValueError, match=r"got up to 0\.5"):
        jax.eval_shape(gated, x)
