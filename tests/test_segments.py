import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import effattn
from effattn.nn import SelfAttention


def test_ids_from_lengths_are_one_up_to_the_length():
    ids = effattn.segment_ids_from_lengths(np.array([[3, 0], [5, 5]]), 5)
    assert ids.dtype == jnp.int32
    expected = [[[1, 1, 1, 0, 0], [0] * 5], [[1] * 5, [1] * 5]]
    np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize(
    "cu_seqlens, expected",
    [
        ([0, 2, 5], [1, 1, 2, 2, 2, 0, 0]),
        ([0, 2, 2, 7], [1, 1, 3, 3, 3, 3, 3]),
        ([0, 7], [1] * 7),
        ([0, 0], [0] * 7),
    ],
)
def test_ids_from_borders_count_the_documents(cu_seqlens, expected):
    ids = effattn.segment_ids_from_cu_seqlens(np.array(cu_seqlens), 7)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize(
    "ids, expected",
    [
        ([1, 1, 2, 2, 2, 0, 0], [0, 1, 0, 1, 2, 0, 1]),
        ([5], [0]),
        ([3, 3, 3], [0, 1, 2]),
        ([0, 1, 0, 1], [0, 0, 0, 0]),
        ([], []),
    ],
)
def test_positions_count_from_the_start_of_each_run(ids, expected):
    ids = np.array(ids, np.int32)
    np.testing.assert_array_equal(effattn.positions_from_segment_ids(ids), expected)
    rows = effattn.positions_from_segment_ids(np.broadcast_to(ids, (2, 3, ids.size)))
    np.testing.assert_array_equal(rows, np.broadcast_to(expected, rows.shape))


@pytest.mark.parametrize("borders", [[0, 9, 4], [0, 90], [1, 4], [-1, 4], [0, 3, 2, 16]])
def test_borders_that_are_none_are_refused(borders):
    with pytest.raises(ValueError, match=r"cu_seqlens must start at 0 and never fall, up to .*=16"):
        effattn.segment_ids_from_cu_seqlens(borders, 16)
    with pytest.raises(ValueError, match="cu_seqlens must start"):
        jax.jit(lambda: effattn.segment_ids_from_cu_seqlens(np.array(borders), 16))()


@pytest.mark.parametrize("lengths", [[3, -1], [9]])
def test_lengths_that_are_none_are_refused(lengths):
    with pytest.raises(ValueError, match="lengths must lie between 0 and max_length=5, got"):
        effattn.segment_ids_from_lengths(np.array(lengths), 5)


def test_traced_ones_are_cut():
    ids = jax.jit(lambda lengths: effattn.segment_ids_from_lengths(lengths, 5))(np.array([-2, 9]))
    np.testing.assert_array_equal(ids, [[0] * 5, [1] * 5])
    ids = jax.jit(lambda borders: effattn.segment_ids_from_cu_seqlens(borders, 4))(np.array([0, 9]))
    np.testing.assert_array_equal(ids, [1] * 4)


def test_all_take_traced_arrays():
    @jax.jit
    def traced(lengths, cu_seqlens):
        ids = effattn.segment_ids_from_cu_seqlens(cu_seqlens, 4)
        positions = effattn.positions_from_segment_ids(ids)
        return effattn.segment_ids_from_lengths(lengths, 4), ids, positions

    results = traced(jnp.array([1]), jnp.array([0, 1, 3]))
    expected = [[1, 0, 0, 0]], [1, 2, 2, 0], [0, 0, 1, 0]
    for result, rows in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result, rows)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: effattn.segment_ids_from_lengths(np.array([1.5]), 3), "lengths must be integers"),
        (
            lambda: effattn.segment_ids_from_cu_seqlens(np.array([0.0, 1.0]), 3),
            "cu_seqlens must be integers, got dtype float",
        ),
        (
            lambda: effattn.segment_ids_from_cu_seqlens(np.array([[0, 1]]), 3),
            r"cu_seqlens must be one-dimensional .* got \(1, 2\)",
        ),
        (
            lambda: effattn.segment_ids_from_cu_seqlens(np.array([0]), 3),
            r"at least 2 entries, got \(1,\)",
        ),
        (
            lambda: effattn.segment_ids_from_lengths(np.array([1]), 1.5),
            "max_length must be an int, 0 or more tokens, got 1.5",
        ),
        (
            lambda: effattn.segment_ids_from_cu_seqlens(np.array([0, 1]), -1),
            "total_length must be an int, 0 or more tokens, got -1",
        ),
        (
            lambda: effattn.positions_from_segment_ids(np.ones((2, 3))),
            "segment_ids must be integers, got dtype float",
        ),
        (
            lambda: effattn.positions_from_segment_ids(1),
            r"segment_ids must have shape \(\*batch, length\), got \(\)",
        ),
    ],
)
def test_says_what_it_got_and_needs(call, message):
    with pytest.raises(ValueError, match=message):
        call()


X, FAR = jnp.ones((1, 3, 1, 2)), np.array([[1, 2**32 + 1, 2**32 + 1]])


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: effattn.positions_from_segment_ids(FAR), "segment_ids"),
        (lambda: effattn.segment_ids_from_lengths(FAR, 3), "lengths"),
        (lambda: effattn.dot_product_attention(X, X, X, segment_ids=FAR), "segment_ids"),
        (lambda: effattn.dot_product_attention(X, X, X, query_seq_lengths=FAR[:, 1]), "lengths"),
        (lambda: effattn.dot_product_attention(X, X, X, query_seq_lengths=[2**32 + 1]), "lengths"),
        (
            lambda: SelfAttention(4, 2, rngs=nnx.Rngs(0))(jnp.ones((1, 3, 4)), segment_ids=FAR),
            "ids",
        ),
    ],
)
def test_bits_that_jax_would_drop_are_not_lost_in_silence(call, name):
    with pytest.raises(ValueError, match=f"{name} must fit in int32, .* to 4294967297"):
        call()
