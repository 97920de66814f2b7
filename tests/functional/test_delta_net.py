"""The delta rule: its limits, its published form, and refused arguments."""

import chex
import jax
import numpy as np
import pytest

from effattn import delta_rule_attention, linear_attention


def draw(length=8, heads=4, key_heads=2, size=4, value_size=3, seed=0):
    """Query, key of length 1, value, beta and log_decay, for two rows of whole chunks."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(2, length, heads, size))
    key = rng.normal(size=(2, length, key_heads, size))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.normal(size=(2, length, key_heads, value_size))
    beta = rng.uniform(size=(2, length, key_heads))
    arrays = query, key, value, beta, -rng.uniform(size=beta.shape)
    return tuple(x.astype(np.float32) for x in arrays)


@jax.jit
def attend(query, key, value, beta, log_decay=None, initial_state=None):
    return delta_rule_attention(
        query,
        key,
        value,
        beta=beta,
        log_decay=log_decay,
        initial_state=initial_state,
        return_state=True,
        chunk_size=4,
    )


@jax.jit
def linear(query, key, value):
    return linear_attention(
        query, key, value, feature_map="identity", is_causal=True, return_state=True
    )


def close(actual, expected, atol=1e-6):
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=atol)


def test_strength_0_writes_nothing():
    query, key, value, beta, _ = draw()
    out, state = attend(query, key, value, 0 * beta)
    assert not np.any(out) and not np.any(state)
    initial = np.random.default_rng(1).normal(size=state.shape).astype(np.float32)
    np.testing.assert_array_equal(attend(query, key, value, 0 * beta, None, initial)[1], initial)


def test_orthogonal_keys_are_linear_attention():
    """The state holds nothing under a key that is orthogonal to all earlier keys."""
    query, _, value, beta, _ = draw(length=8, size=8)
    key = np.stack(
        [np.linalg.qr(np.random.default_rng(row).normal(size=(8, 8)))[0] for row in (0, 1)]
    )
    key = np.repeat(key[:, :, None], 2, 2).astype(np.float32)
    out, state = attend(query, key, value, beta)
    close((out, state), linear(query, key, value * beta[..., None]))


def test_weak_strengths_are_linear_attention_to_first_order():
    query, key, value, beta, _ = draw()
    out, state = attend(query, key, value, beta * 1e-4)
    expected = linear(query, key, value * beta[..., None] * 1e-4)
    close((out, state), expected, atol=1e-7)
    assert np.abs(expected[0]).max() > 1e-5


def test_a_decay_of_1_is_no_decay():
    arrays = draw()[:4]
    close(attend(*arrays, np.zeros_like(arrays[3])), attend(*arrays))


def test_a_decay_of_0_sees_the_token_alone():
    query, key, value, beta, _ = draw()
    for forgets in (-np.inf, -1e4):
        out, _ = attend(query, key, value, beta, np.full_like(beta, forgets))
        score = np.einsum("btnh,btnh->btn", query, np.repeat(key, 2, 2)) / 4**0.5
        expected = score[..., None] * np.repeat(beta[..., None] * value, 2, 2)
        close(out, expected)


def test_a_key_of_strength_1_reads_its_last_value():
    """Earlier values of the key do not matter, nor do other keys, which are orthogonal."""
    rng = np.random.default_rng(0)
    length, size = 24, 6
    keys = np.linalg.qr(rng.normal(size=(size, size)))[0]
    which = rng.integers(0, size, size=length)
    value = rng.normal(size=(1, length, 1, 3)).astype(np.float32)
    key = keys[which][None, :, None].astype(np.float32)
    ask = rng.integers(0, size, size=length)
    query = keys[ask][None, :, None].astype(np.float32) * size**0.5
    out, state = attend(query, key, value, np.ones((1, length, 1), np.float32))
    for t in range(length):
        written = np.flatnonzero(which[: t + 1] == ask[t])
        last = value[0, written[-1], 0] if len(written) else np.zeros(3)
        close(out[0, t, 0], last, atol=3e-6)
    # A full state holds one value for each key, as a table does.
    held = keys.astype(np.float32) @ np.asarray(state[0, 0])
    for k in set(which):
        close(held[k], value[0, np.flatnonzero(which == k)[-1], 0], atol=3e-6)


def test_strengths_up_to_2_keep_the_state_bounded():
    """A strength beta = 2 reflects the state, which keeps its norm."""
    _, key, value, beta, _ = draw(length=64)
    state = np.random.default_rng(1).normal(size=(2, 2, 4, 3)).astype(np.float32)
    query = np.repeat(key, 2, 2)
    _, after = attend(query, key, 0 * value, np.full_like(beta, 2), None, state)
    close(np.linalg.norm(after, axis=-2), np.linalg.norm(state, axis=-2))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"beta": np.ones((2, 8))}, r"beta must be floating point of shape \(2, 8, 2\)"),
        ({"beta": np.ones((2, 8, 2), int)}, "beta must be floating point"),
        ({"log_decay": np.zeros((2, 8, 2, 5))}, r"log_decay must be .* shape \(2, 8, 2, 4\)"),
        ({"log_decay": np.ones((2, 8, 2))}, "must be 0 or less, the logarithm of a decay"),
        ({"initial_state": np.zeros((2, 2, 4, 4))}, r"initial_state must .*\(2, 2, 4, 3\)"),
        ({"scale": np.ones(2)}, "scale must be a number or an array of shape"),
    ],
)
def test_bad_options_are_named(options, message):
    query, key, value, beta, _ = draw()
    with pytest.raises(ValueError, match=message):
        delta_rule_attention(query, key, value, **{"beta": beta, **options})
