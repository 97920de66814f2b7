import functools

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
    with pytest.raises(
        ValueError, match=r"cu_seqlens must start at 0, never decrease and end at .*=16"
    ):
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


IDS = np.repeat([[3, 0, 1, 2], [1, 2, 4, 0]], [5, 3, 7, 9], axis=1)
# The lower 32 bits of some of these different ids are equal, and of some they are zero.
WIDE = np.array([0, 5, 2**32 + 5, 2**33, -(2**40)])
PACKED = {
    "softmax": effattn.dot_product_attention,
    "softmax by XLA": functools.partial(effattn.dot_product_attention, implementation="xla"),
    "a window": functools.partial(effattn.sliding_window_attention, local_window_size=4),
    "linear": effattn.linear_attention,
    "causal linear": functools.partial(effattn.linear_attention, is_causal=True),
    "retention": effattn.retention,
}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("name", PACKED)
def test_ids_of_64_bits_are_told_apart_by_all_of_them(name, traced):
    """The gradients agree too, both for known ids and for traced ids."""
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 24, 2, 8)).astype(np.float32)

    def gradients(ids):
        def loss(*arrays):
            return (PACKED[name](*arrays, segment_ids=ids) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    expected = gradients(IDS)
    with jax.enable_x64(True):
        wide = WIDE[IDS]
        found = jax.jit(gradients)(wide) if traced else gradients(wide)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, expected)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64"])
def test_pairs_of_ids_agree_across_queries_and_keys(dtype):
    """The tokens of a document may stand at different positions in queries and keys."""
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 24, 2, 8)).astype(np.float32)
    ids, others = IDS, IDS[:, ::-1]
    expected = effattn.dot_product_attention(query, key, value, segment_ids=(ids, others))
    large = np.array([0, 2**31, 2**31 + 1, 2**32 - 1, 7], dtype)
    with jax.enable_x64(True):
        pair = jnp.asarray(large[ids]), jnp.asarray(large[others])
        found = effattn.dot_product_attention(query, key, value, segment_ids=pair)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_pairs_of_which_no_integer_holds_both_are_refused():
    x = np.ones((1, 3, 1, 2), np.float32)
    with jax.enable_x64(True):
        pair = jnp.ones((1, 3), jnp.uint64), jnp.ones((1, 3), jnp.int64)
        with pytest.raises(ValueError, match="dtypes that promote to an integer dtype, got"):
            effattn.dot_product_attention(x, x, x, segment_ids=pair)


def test_lists_may_hold_ids_up_to_64_bits_beside_small_ones():
    """NumPy alone would read these ids as floats, among which different ids become equal."""
    x = np.random.default_rng(0).normal(size=(1, 6, 1, 2)).astype(np.float32)
    expected = effattn.dot_product_attention(x, x, x, segment_ids=np.array([[1, 1, 2, 2, 3, 0]]))
    ids = [[1, 1, 2**64 - 1, 2**64 - 1, 2**64 - 2, 0]]
    with jax.enable_x64(True):
        found = effattn.dot_product_attention(x, x, x, segment_ids=ids)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with pytest.raises(ValueError, match="segment_ids must fit in"):
        effattn.dot_product_attention(x, x, x, segment_ids=ids)


def test_nested_lists_of_ids_are_one_array():
    x = np.random.default_rng(0).normal(size=(2, 24, 2, 8)).astype(np.float32)
    for function in PACKED.values():
        expected = function(x, x, x, segment_ids=IDS)
        np.testing.assert_array_equal(function(x, x, x, segment_ids=IDS.tolist()), expected)


def test_lengths_and_offsets_beyond_32_bits_are_those_of_the_end():
    """64-bit lengths and offsets are not cut to their lower 32 bits."""
    x = np.random.default_rng(0).normal(size=(2, 24, 2, 8)).astype(np.float32)
    far = np.array([2**32 + 3, 2**40])
    call = effattn.dot_product_attention
    with jax.enable_x64(True):
        all_keys = call(x, x, x, key_value_seq_lengths=far)
        ahead = call(x, x, x, is_causal=True, query_offset=far)
        behind = call(x, x, x, is_causal=True, query_offset=-far)
    np.testing.assert_allclose(all_keys, call(x, x, x), atol=1e-6)
    np.testing.assert_allclose(ahead, call(x, x, x), atol=1e-6)
    np.testing.assert_array_equal(behind, 0)


@pytest.mark.parametrize("convert", [jnp.asarray, np.asarray, np.ndarray.tolist])
def test_the_id_of_masked_keys_is_refused(convert):
    x = jnp.ones((1, 3, 1, 4))
    for ids, is_refused in (([1, -(2**31), 0], True), ([1, 1 - 2**31, 0], False)):
        given = convert(np.array([ids], np.int32))
        if is_refused:
            with pytest.raises(
                ValueError, match=r"segment_ids of the query must be above -2\*\*31"
            ):
                effattn.dot_product_attention(x, x, x, segment_ids=given)
        else:
            effattn.dot_product_attention(x, x, x, segment_ids=given)
