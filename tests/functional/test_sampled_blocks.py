"""sampled_block_attention: the policy, its log-probabilities, and training by REINFORCE."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import LearnedBlockSelfAttention, policy_loss

ROWS, BLOCKS, SIZE = 512, 5, 2
TIME = BLOCKS * SIZE
SCORES = np.array([0.5, -0.4, 1.2, 0.1, 9.0], np.float32)  # that of the own block is not read


def sample(scores, rng, top_k=2, rows=ROWS, **options):
    """Attention with equal logits; block n has the value e_n, and the score `scores[n]`."""
    value = jnp.repeat(jnp.eye(BLOCKS), SIZE, 0)[None, :, None].repeat(rows, 0)
    nothing = jnp.zeros((rows, TIME, 1, 3))
    selection = jnp.broadcast_to(scores, (rows, TIME, 1, BLOCKS))
    return effattn.sampled_block_attention(
        nothing,
        nothing,
        value,
        selection_query=selection,
        selection_key=BLOCKS**0.5 * value,
        block_size=SIZE,
        top_k=top_k,
        rng=rng,
        **options,
    )


def test_blocks_are_drawn_with_the_probabilities_that_are_returned():
    out, logs = jax.jit(functools.partial(sample, SCORES))(jax.random.key(0))
    drawn = np.asarray(out[:, -1, 0]) > 0
    assert (drawn[:, -1] & (drawn.sum(-1) == 2)).all()
    policy = np.asarray(jax.nn.log_softmax(SCORES[:-1]))
    picked = drawn[:, :-1].argmax(-1)
    np.testing.assert_allclose(logs[:, -1, 0], policy[picked], rtol=1e-5, atol=1e-6)
    found = np.bincount(picked, minlength=4) / ROWS
    error = np.sqrt(np.exp(policy) * (1 - np.exp(policy)) / ROWS)
    assert (np.abs(found - np.exp(policy)) < 4 * error).all()
    # The first block has no earlier block to draw.
    np.testing.assert_array_equal(logs[:, :SIZE], 0)


def test_draws_without_replacement_have_the_product_of_their_probabilities():
    """With two of two earlier blocks, both orders occur, and their probabilities sum to 1."""
    run = jax.jit(functools.partial(sample, SCORES, top_k=3, rows=64))
    out, logs = run(jax.random.key(0))
    at = 2 * SIZE  # the first token of the third block
    np.testing.assert_allclose(out[:, at, 0, :2], 0.4, rtol=1e-5)
    found = np.unique(np.round(np.exp(logs[:, at, 0]), 5))
    policy = np.exp(SCORES[:2]) / np.exp(SCORES[:2]).sum()
    np.testing.assert_allclose(found, np.sort(policy), atol=1e-4)


def test_a_policy_learns_which_block_to_read():
    """The reward is the value of one block at the last token; greedy evaluation then reads it."""
    task = 3

    @jax.jit
    def step(scores, rng):
        def loss(scores):
            out, logs = sample(scores, rng, rows=32)
            reward = jnp.zeros((32, TIME)).at[:, -1].set(out[:, -1, 0, task])
            return policy_loss(logs, reward)

        return scores - 2 * jax.grad(loss)(scores)

    scores = jnp.asarray(SCORES)
    for seed in range(20):
        scores = step(scores, jax.random.key(seed))
    assert jax.nn.softmax(scores[:-1])[task] > 0.8


def test_the_layer_samples_and_pads():
    mixer = LearnedBlockSelfAttention(8, 2, num_kv_heads=1, block_size=3, top_k=2, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 11, 8)).astype(np.float32)
    x[1, 7:] = np.nan

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(mixer, x):
        y, logs = mixer.sample(x, jax.random.key(0), lengths=np.array([11, 7]))
        return logs.sum(), (y, logs)

    (_, (y, logs)), gradient = run(mixer, x)
    assert np.isfinite(y).all() and logs.shape == (2, 11, 1)
    np.testing.assert_array_equal(logs[1, 7:], 0)
    assert np.any(gradient.selection_query.kernel[...] != 0)
    assert not np.any(gradient.query.kernel[...])


def test_the_loss_is_that_of_reinforce():
    logs = np.array([[[-1.0, -2.0]], [[-3.0, -4.0]]], np.float32)
    rewards = np.array([5.0, 1.0], np.float32)
    # The baseline of each row is the reward of the other one.
    np.testing.assert_allclose(policy_loss(logs, rewards), -(4 * -3 + -4 * -7) / 2)
    ones = np.ones(2, np.float32)
    np.testing.assert_allclose(policy_loss(logs, rewards, baseline=ones), -(4 * -3) / 2)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="rng must be a jax.random key, got 3"):
        sample(SCORES, 3)
    with pytest.raises(ValueError, match=r"policy_loss needs log_probs \(B, T, K\) and rewards"):
        policy_loss(np.zeros((2, 3, 1)), np.zeros(3))
    with pytest.raises(ValueError, match="baseline must have the shape of rewards"):
        policy_loss(np.zeros((2, 3, 1)), np.zeros(2), baseline=np.zeros(1))
