"""Sparse Sinkhorn attention: the permutation, its limits, and messages."""

import jax
import numpy as np
import pytest

import effattn
from effattn import sinkhorn_attention
from effattn.functional.sinkhorn import soft_permutation
from effattn.testing.functions import assert_close

BATCH, LENGTH, HEADS, SIZE, BLOCK = 2, 12, 2, 4, 3
BLOCKS = LENGTH // BLOCK
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = RNG.normal(size=(3, BATCH, LENGTH, HEADS, SIZE))
PROJECTION = RNG.normal(size=(HEADS, BLOCKS, SIZE))


pytestmark = pytest.mark.usefixtures("x64")


def by_block(x):
    return x.reshape(BATCH, BLOCKS, BLOCK, HEADS, SIZE)


def test_rows_and_columns_approach_a_sum_of_one():
    logits = 3 * RNG.normal(size=(2, 5, 5))
    present = np.ones(5, bool)
    for iterations, error in ((1, 1e-1), (200, 1e-10)):
        sorting = np.asarray(soft_permutation(logits, present, iterations))
        np.testing.assert_allclose(sorting.sum(-2), 1, rtol=1e-12)
        largest = np.abs(sorting.sum(-1) - 1).max()
        assert largest < error if iterations > 1 else largest > error


def test_one_iteration_divides_the_rows_and_then_the_columns():
    logits = RNG.normal(size=(1, 4, 4))
    expected = np.exp(logits[0])
    expected = expected / expected.sum(1, keepdims=True)
    expected = expected / expected.sum(0)
    got = soft_permutation(logits, np.ones(4, bool), 1)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_blocks_of_padding_take_no_part():
    logits = RNG.normal(size=(2, 3, 5, 5))
    exists = np.arange(5) < np.array([[2], [5]])
    whole = np.asarray(soft_permutation(logits, exists, 4))
    alone = soft_permutation(logits[:1, :, :2, :2], np.ones((1, 2), bool), 4)
    np.testing.assert_allclose(whole[:1, :, :2, :2], alone, rtol=1e-12)
    assert (whole[0, :, 2:] == 0).all() and (whole[0, :, :, 2:] == 0).all()


def test_a_cold_permutation_reads_the_own_block_and_one_other():
    """The keys of block u have the sum e_u, and w prefers the block after it."""
    key = np.zeros((BATCH, BLOCKS, BLOCK, HEADS, SIZE))
    key[:, :, 0] = np.eye(BLOCKS)[:, None]  # as many features as blocks
    key[:, :, 1], key[:, :, 2] = (f * by_block(KEY)[:, :, 0] for f in (1, -1))
    after = np.roll(np.eye(BLOCKS), 1, 0)
    out = sinkhorn_attention(
        QUERY,
        key.reshape(KEY.shape),
        VALUE,
        sort_projection=np.broadcast_to(after, (HEADS, *after.shape)),
        block_size=BLOCK,
        temperature=1e-3,
    )

    def attend(shift):
        keys, values = (np.roll(x, -shift, 1) for x in (key, by_block(VALUE)))
        return effattn.dot_product_attention(by_block(QUERY), keys, values)

    expected = (attend(0) + attend(1)).reshape(QUERY.shape)
    assert_close(out, expected, 1e-12)


def test_one_block_is_exact_attention_twice():
    out = sinkhorn_attention(QUERY, KEY, VALUE, sort_projection=PROJECTION, block_size=LENGTH + 1)
    assert_close(out, 2 * effattn.dot_product_attention(QUERY, KEY, VALUE), 1e-12)


def test_the_sorting_is_trained():
    def loss(projection):
        options = {"sort_projection": projection, "block_size": BLOCK}
        return (sinkhorn_attention(QUERY, KEY, VALUE, **options) ** 2).sum()

    assert (np.asarray(jax.grad(loss)(PROJECTION)) != 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be an int, 1 or more tokens, got 0"),
        ({"block_size": 2}, "a vector for each of the 6 blocks of 2 of the 12 tokens, got 4"),
        ({"num_iterations": 0}, "num_iterations must be an int, 1 or more, got 0"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0, got 0.0"),
        ({"sort_projection": PROJECTION[0]}, r"sort_projection must be .* \(1, m, 4\), or"),
        ({"key": KEY[:, :9], "value": VALUE[:, :9]}, "sinkhorn_attention"),
    ],
)
def test_bad_arguments_are_named(options, message):
    given = {"query": QUERY, "key": KEY, "value": VALUE}
    given |= {"sort_projection": PROJECTION, "block_size": BLOCK, **options}
    with pytest.raises(ValueError, match=message):
        sinkhorn_attention(**given)
