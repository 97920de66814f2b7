"""DeltaProduct: its limits, rotations by two reflections, and wrong arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effattn import delta_product_attention, delta_rule_attention

B, T, N, H = 2, 9, 2, 4


def draw():
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, B, T, N, H)).astype(np.float32)
    beta = rng.uniform(0, 1, (B, T, N, 3)).astype(np.float32) / H
    keys, values = rng.normal(size=(2, B, T, N, 2, H)).astype(np.float32)
    return query, key, value, {"beta": beta, "later_keys": keys, "later_values": values}


def test_one_step_is_the_delta_rule():
    query, key, value, own = draw()
    log_decay = -own["beta"][..., 1]
    alone = {
        "later_keys": own["later_keys"][..., :0, :],
        "later_values": own["later_values"][..., :0, :],
    }
    beta = own["beta"][..., :1]
    out = delta_product_attention(query, key, value, beta=beta, log_decay=log_decay, **alone)
    expected = delta_rule_attention(query, key, value, beta=beta[..., 0], log_decay=log_decay)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_steps_of_strength_zero_change_nothing():
    query, key, value, own = draw()
    beta = own["beta"] * np.float32([1, 0, 0])
    out = delta_product_attention(query, key, value, **{**own, "beta": beta})
    expected = delta_rule_attention(query, key, value, beta=beta[..., 0])
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_two_reflections_rotate_the_state():
    """Keys at angles 0 and w with strength 2 turn what is stored by 2 w, in every token."""
    angle, tokens = 0.3, 16
    keys = np.float32([[1, 0], [np.cos(angle), np.sin(angle)]])
    shape = (tokens, 1)
    run = functools.partial(delta_product_attention, scale=1.0, initial_state=np.eye(2)[None])
    out = run(
        np.broadcast_to(np.float32([1, 0]), (*shape, 2)),
        np.broadcast_to(keys[0], (*shape, 2)),
        np.zeros((*shape, 2), np.float32),
        beta=np.full((*shape, 2), 2, np.float32),
        later_keys=np.broadcast_to(keys[1], (*shape, 1, 2)),
        later_values=np.zeros((*shape, 1, 2), np.float32),
    )
    turned = 2 * angle * np.arange(1, tokens + 1)
    np.testing.assert_allclose(out[:, 0, 0], np.cos(turned), atol=1e-4)
    np.testing.assert_allclose(np.abs(out[:, 0, 1]), np.abs(np.sin(turned)), atol=1e-4)


def test_chunks_do_not_change_the_result():
    query, key, value, own = draw()
    runs = [
        jax.jit(functools.partial(delta_product_attention, chunk_size=n, **own))(query, key, value)
        for n in (5, 64)
    ]
    np.testing.assert_allclose(*runs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"beta": jnp.ones((B, T, N))},
            r"beta must have shape \(2, 9, 2, 'M'\), .*got \(2, 9, 2\)",
        ),
        ({"later_keys": np.ones((B, T, N, 3, H))}, r"later_keys must .* shape \(2, 9, 2, 2, 4\)"),
        ({"later_values": np.ones((B, T, N, 2, 3))}, r"later_values must .* \(2, 9, 2, 2, 4\)"),
        ({"log_decay": np.ones((B, T, N))}, "must be 0 or less, the logarithm of a decay"),
        ({"initial_state": np.zeros((B, N, H, 3))}, r"initial_state must .*\(2, 2, 4, 4\)"),
        ({"query_seq_lengths": np.ones(3, int)}, r"query_seq_lengths must .*\(2,\)"),
    ],
)
def test_bad_options_are_named(options, message):
    query, key, value, own = draw()
    with pytest.raises(ValueError, match=message):
        delta_product_attention(query, key, value, **{**own, **options})


@pytest.mark.parametrize("lengths", [np.array([200], np.uint8), np.array([2**30], np.int32)])
def test_lengths_times_steps_do_not_overflow(lengths):
    """Lengths may be above the number of tokens, and in any integer dtype."""
    rng, tokens = np.random.default_rng(0), 210
    query, key, value = rng.normal(size=(3, 1, tokens, 1, H)).astype(np.float32)
    own = {"beta": np.full((1, tokens, 1, 2), 0.1, np.float32)}
    own["later_keys"], own["later_values"] = rng.normal(size=(2, 1, tokens, 1, 1, H))
    run = jax.jit(functools.partial(delta_product_attention, query, key, value, **own))
    known = min(int(lengths[0]), tokens)
    found = run(query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    np.testing.assert_allclose(found[:, :known], run()[:, :known], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found[:, known:], 0)
