"""State-space duality: its limits, its heads, and refused arguments."""

import functools

import jax
import numpy as np
import pytest

from effattn import gated_linear_attention, linear_attention, retention, state_space_duality


def draw(length=8, heads=2, value_heads=4, size=4, value_size=3):
    """Query, key, value, step_size, rate and skip, for two rows of whole chunks."""
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, length, heads, size))
    key = rng.normal(size=(2, length, heads, size))
    value = rng.normal(size=(2, length, value_heads, value_size))
    step_size = rng.uniform(0.1, 1, size=(2, length, value_heads))
    rate, skip = -rng.uniform(0.2, 2, size=value_heads), rng.normal(size=value_heads)
    arrays = query, key, value, step_size, rate, skip
    return tuple(x.astype(np.float32) for x in arrays)


@jax.jit
def attend(query, key, value, step_size, rate, skip=None, lengths=None):
    return state_space_duality(
        query,
        key,
        value,
        step_size=step_size,
        rate=rate,
        skip=skip,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        return_state=True,
        chunk_size=4,
    )


def close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), actual, expected
    )


def test_it_is_the_recurrence_of_the_paper():
    """S_t = exp(dt_t A) S_(t-1) + dt_t B_t x_t^T; out_t = S_t^T C_t + D x_t."""
    c, b, x, dt, a, d = (array.astype(np.float64) for array in draw())
    out, state = attend(*draw())
    c, b = np.repeat(c, 2, 2), np.repeat(b, 2, 2)
    expected = np.zeros((2, 4, 4, 3))
    for t in range(8):
        expected *= np.exp(dt[:, t] * a)[..., None, None]
        expected += np.einsum("bv,bvf,bvp->bvfp", dt[:, t], b[:, t], x[:, t])
        read = np.einsum("bvfp,bvf->bvp", expected, c[:, t])
        close(out[:, t], read + d[:, None] * x[:, t])
    close(state, expected)


def test_a_step_of_1_is_retention():
    """Retention has a scale of 1 here."""
    query, key, value, step_size, rate, _ = draw(value_heads=2)
    run = jax.jit(functools.partial(retention, scale=1.0, return_state=True))
    expected = run(query, key, value, log_decay=rate)
    close(attend(query, key, value, np.ones_like(step_size), rate), expected)


def test_a_rate_of_0_is_linear_attention():
    query, key, value, step_size, rate, _ = draw(value_heads=2)
    options = {"feature_map": "identity", "scale": 1.0, "is_causal": True, "return_state": True}
    run = jax.jit(functools.partial(linear_attention, **options))
    expected = run(query, key, value * step_size[..., None])
    close(attend(query, key, value, step_size, 0 * rate), expected)


def test_it_is_gated_linear_attention_of_scaled_values():
    query, key, value, step_size, rate, _ = draw(value_heads=2)
    run = jax.jit(functools.partial(gated_linear_attention, scale=1.0, return_state=True))
    expected = run(query, key, value * step_size[..., None], log_decay=step_size * rate)
    close(attend(query, key, value, step_size, rate), expected)


def test_a_step_of_0_changes_nothing():
    """The token of step 0 is not written and nothing decays, but the token still reads."""
    query, key, value, step_size, rate, _ = draw(length=9)
    step_size[:, 5] = 0
    out, state = attend(query, key, value, step_size, rate)
    rest = [np.delete(x, 5, 1) for x in (query, key, value, step_size)]
    expected, last = attend(*rest, rate)
    close((np.delete(np.asarray(out), 5, 1), state), (expected, last))


def test_value_heads_that_share_a_key_head_are_repeated_queries_and_keys():
    query, key, *others = draw()
    repeated = np.repeat(query, 2, 2), np.repeat(key, 2, 2)
    close(attend(query, key, *others), attend(*repeated, *others))


def test_query_heads_that_share_a_key_head_are_repeated_keys_and_values():
    query, key, value, step_size, rate, _ = draw(value_heads=2)
    query = np.concatenate([query, -query], 2)
    shared, state = attend(query, key, value, step_size, rate)
    repeated = (np.repeat(x, 2, 2) for x in (key, value, step_size))
    out, states = attend(query, *repeated, np.repeat(rate, 2))
    close((shared, np.repeat(state, 2, 1)), (out, states))


def test_the_skip_adds_values_and_none_in_the_padding():
    *arrays, skip = draw()
    lengths = np.array([8, 4])
    valid = (np.arange(8) < lengths[:, None])[..., None, None]
    out, state = attend(*arrays, None, lengths)
    assert not np.any(out[1, 4:])
    arrays[2] = np.where(valid, arrays[2], np.nan)
    expected = np.asarray(out) + np.where(valid, skip[:, None] * arrays[2], 0)
    close(attend(*arrays, skip, lengths), (expected, state))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"step_size": np.ones((2, 8, 2))}, r"step_size must .*\(2, 8, 4\)"),
        ({"step_size": -np.ones((2, 8, 4))}, "step_size must be 0 or more, got -1"),
        ({"rate": np.zeros(2)}, r"rate must be floating point of shape \(4,\), got .*\(2,\)"),
        (
            {"rate": np.full(4, 2.0)},
            "rate must be 0 or less, the logarithm of a decay, got up to 2",
        ),
        ({"skip": np.ones(2)}, r"skip must .*\(4,\)"),
        ({"initial_state": np.zeros((2, 2, 4, 3))}, r"initial_state must .*\(2, 4, 4, 3\)"),
    ],
)
def test_bad_options_are_named(options, message):
    *arrays, step_size, rate, _ = draw()
    with pytest.raises(ValueError, match=message):
        state_space_duality(*arrays, **{"step_size": step_size, "rate": rate, **options})


def test_heads_that_do_not_fit_are_named():
    query, key, value, step_size, rate, skip = draw()
    with pytest.raises(ValueError, match="got 2 query heads, 2 key heads and 3 value heads"):
        state_space_duality(query, key, value[:, :, :3], step_size=step_size, rate=rate)
    with pytest.raises(ValueError, match="got 4 query heads, 2 key heads and 4 value heads"):
        state_space_duality(np.repeat(query, 2, 2), key, value, step_size=step_size, rate=rate)
    with pytest.raises(
        ValueError, match="at least as many value heads as query heads, .* got 4 query heads and 2"
    ):
        state_space_duality(
            np.repeat(query, 2, 2),
            key,
            value[:, :, :2],
            step_size=step_size[..., :2],
            rate=rate[:2],
            skip=skip[:2],
        )
