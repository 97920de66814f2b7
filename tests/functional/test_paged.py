"""Paged decode attention against the definition over the pages put in order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import effattn
from effattn.analysis import cost
from effattn.testing.functions import assert_close
from effattn.xla import paged_attention as xla
from tests.dense import dense_with_gradients
from tests.laws.sharding import BY_HEAD, BY_ROW, mesh, shard
from tests.marks import slow

PAGE, PAGES, HEADS, KEY_HEADS, SIZE, VALUE_SIZE = 4, 9, 4, 2, 6, 5


def draw(lengths, queries=1, dtype=np.float64, room=8, page_size=PAGE, sizes=(SIZE, VALUE_SIZE)):
    """Sequences in pages of a shuffled pool, with NaN at every place without a token."""
    rng = np.random.default_rng(0)
    batch = len(lengths)
    keys, values = (
        rng.normal(size=(batch, room * page_size, KEY_HEADS, size)).astype(dtype) for size in sizes
    )
    total = sum(-(-n // page_size) for n in lengths)
    free = list(rng.permutation(total + 3))
    table = np.full((batch, room), -1, np.int32)
    key_pages, value_pages = (
        np.full((total + 3, page_size, *x.shape[2:]), np.nan, dtype) for x in (keys, values)
    )
    for row, n in enumerate(lengths):
        for m in range(-(-n // page_size)):
            table[row, m] = page = free.pop()
            here = slice(m * page_size, min((m + 1) * page_size, n))
            key_pages[page, : here.stop - here.start] = keys[row, here]
            value_pages[page, : here.stop - here.start] = values[row, here]
    query = rng.normal(size=(batch, queries, HEADS, sizes[0])).astype(dtype)
    given = {"block_table": table, "lengths": np.asarray(lengths, np.int32)}
    return (query, key_pages, value_pages), given, {"query": query, "key": keys, "value": values}


def expected(arrays, lengths, **options):
    offset = np.asarray(lengths) - arrays["query"].shape[1]
    return dense_with_gradients(
        arrays,
        is_causal=True,
        query_offset=offset,
        key_value_seq_lengths=np.asarray(lengths),
        **options,
    )[0]


attend = jax.jit(
    functools.partial(effattn.paged_attention, return_residual=True),
    static_argnames=("local_window_size", "logits_soft_cap"),
)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("step", [1, slow(12), slow(512)])
@pytest.mark.parametrize("window", [None, 5])
def test_it_is_attention_over_the_pages_in_order(queries, step, window, monkeypatch):
    """Steps of one page, of three or of all; sequences of no tokens, of one, or of all."""
    monkeypatch.setattr(xla, "KEYS", step)
    xla.paged.clear_cache()
    attend.clear_cache()
    lengths = [0, 1, 13, 32, 7]
    with jax.enable_x64(True):
        paged, given, arrays = draw(lengths, queries)
        ours = attend(*paged, **given, local_window_size=window, logits_soft_cap=2.0)
        options = {} if window is None else {"local_window_size": (window, 0)}
        assert_close(ours, expected(arrays, lengths, logits_soft_cap=2.0, **options), 1e-12)
        out, lse = map(np.asarray, ours)
    assert (out[0] == 0).all() and (lse[0] == -np.inf).all()


def test_what_the_table_and_the_pool_hold_beside_the_tokens_changes_nothing():
    paged, given, _ = draw([13, 6], dtype=np.float32)
    out, lse = attend(*paged, **given)
    filled = [np.nan_to_num(x, nan=3.0) for x in paged]
    table = np.where(given["block_table"] < 0, 10**6, given["block_table"])
    again, lse_again = attend(*filled, **{**given, "block_table": table})
    np.testing.assert_array_equal(out, again)
    np.testing.assert_array_equal(lse, lse_again)


def test_scale_and_bfloat16():
    paged, given, arrays = draw([13, 6], dtype=np.float32)
    narrow = [x.astype(jnp.bfloat16) for x in paged]
    out, lse = attend(*narrow, **given, scale=0.3)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    exact = jax.jit(functools.partial(effattn.dot_product_attention, is_causal=True))
    true = exact(
        *(x.astype(jnp.bfloat16).astype(np.float32) for x in arrays.values()),
        scale=0.3,
        query_offset=np.array([12, 5]),
        key_value_seq_lengths=np.array([13, 6]),
    )
    np.testing.assert_allclose(np.asarray(out, np.float32), true, rtol=0.02, atol=0.02)


@jax.numpy_rank_promotion("raise")
def test_int8_pages_are_those_that_they_stand_for():
    paged, given, _ = draw([13, 6, 30], queries=2, dtype=np.float32)
    query, *pages = (np.nan_to_num(x) for x in paged)
    (keys, key_scales), (values, value_scales) = (
        jax.tree.map(np.asarray, jax.jit(effattn.quantize_pages)(x)) for x in pages
    )
    assert keys.dtype == values.dtype == jnp.int8
    assert key_scales.shape == keys.shape[:-1]
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    ours = attend(query, keys, values, **given, **scales)
    widened = (x * s[..., None] for x, s in ((keys, key_scales), (values, value_scales)))
    assert_close(ours, attend(query, *widened, **given), 1e-6)
    # The error is at most half a step; 127 steps reach the largest entry of a token.
    for page, quantized, scale in zip(
        pages, (keys, values), (key_scales, value_scales), strict=True
    ):
        error = np.abs(quantized * scale[..., None] - page).max(-1)
        assert (error <= scale / 2 * (1 + 1e-5)).all()


def test_time_follows_the_longest_sequence_and_memory_nothing():
    """Time and memory do not depend on the room in the block table or on the size of the pool."""

    def traced(room, pages):
        of = jax.ShapeDtypeStruct
        return attend.trace(
            of((2, 1, 8, 64), jnp.float32),
            of((pages, 16, 2, 64), jnp.float32),
            of((pages, 16, 2, 64), jnp.float32),
            block_table=of((2, room), jnp.int32),
            lengths=of((2,), jnp.int32),
        )

    small, large = cost.temporary_bytes(traced(64, 512)), cost.temporary_bytes(traced(4096, 16384))
    assert large <= small + 4 * 2 * 4096 * 2  # the clipped block table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": np.array([13])}, r"lengths must be integers of shape \(2,\)"),
        ({"lengths": np.array([13, 33])}, "at most 32, the number of tokens .* got \\[13, 33\\]"),
        ({"block_table": np.zeros((3, 8), int)}, r"block_table must be integers of shape \(2, M\)"),
        (
            {"block_table": np.zeros((2, 0), int)},
            r"M >= 1 pages of each sequence, got int\d+ of shape \(2, 0\)",
        ),
        ({"local_window_size": (3, 1)}, r"must be w or \(w, 0\)"),
        ({"key_scales": np.ones((8, PAGE, KEY_HEADS))}, "key_scales needs key_pages of int8"),
        ({"implementation": "mosaic_gpu"}, "has no 'mosaic_gpu' implementation"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    paged, given, _ = draw([13, 6], dtype=np.float32)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        effattn.paged_attention(*paged, **{**given, **changes})


def test_arguments_that_a_trace_closes_over_are_known():
    paged, given, _ = draw([13, 6], dtype=np.float32)
    given = {name: jnp.asarray(value) for name, value in given.items()}
    traced = jax.jit(lambda *paged: effattn.paged_attention(*paged, **given))(*paged)
    np.testing.assert_allclose(traced, effattn.paged_attention(*paged, **given), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32"])
def test_a_table_of_narrow_integers_names_the_same_pages(dtype):
    paged, given, _ = draw([13, 6], dtype=np.float32)
    (query, *pools), table = paged, np.maximum(given["block_table"], 0)
    # More pages than the integers can count.
    pools = [np.concatenate([x, np.zeros((70_000, *x.shape[1:]), x.dtype)]) for x in pools]
    expected = effattn.paged_attention(query, *pools, **{**given, "block_table": table})
    for pack in (np.asarray, jnp.asarray):
        narrow = {**given, "block_table": pack(table, dtype)}
        out = jax.jit(effattn.paged_attention)(query, *pools, **narrow)
        np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_wrong_pages_are_named():
    (query, keys, values), given, _ = draw([13, 6], dtype=np.float32)
    for pages, message in (
        ((keys[..., :3], values), r"key_pages must have shape \(P, p, K, 6\)"),
        ((keys, values[:, :2]), "value_pages must have the pages, tokens and heads of key_pages"),
        ((keys, np.zeros_like(values, np.int8)), "value_pages of int8 need value_scales"),
        ((keys.astype(np.float16), values), "key_pages must be float32, as the query, or int8"),
        ((np.repeat(keys, 3, 2), np.repeat(values, 3, 2)), "got 4 query heads and 6 key heads"),
    ):
        with pytest.raises(ValueError, match=message):
            effattn.paged_attention(query, *pages, **given)
    with pytest.raises(ValueError, match="pages must be floating point of shape .*, got int8"):
        effattn.quantize_pages(np.zeros((2, 3, 4), np.int8))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("implementation", ["xla", ("triton", "mosaic_tpu", "xla")])
def test_nothing_gives_nothing(axis, implementation):
    """The call has no sequences, or sequences without query tokens."""
    (query, *pages), given, _ = draw([13, 6], dtype=np.float32)
    query = np.take(query, [], axis)
    if axis == 0:
        given = {name: x[:0] for name, x in given.items()}
    out = effattn.paged_attention(query, *pages, **given, implementation=implementation)
    assert out.shape == (*query.shape[:-1], VALUE_SIZE)


def test_the_output_has_the_dtype_of_the_values():
    (query, keys, values), given, _ = draw([13, 6], dtype=np.float32)
    out = effattn.paged_attention(query, keys, values.astype(jnp.bfloat16), **given)
    assert out.dtype == jnp.bfloat16


def test_values_wider_than_the_queries_are_not_rounded():
    (query, keys, values), given, arrays = draw([13, 6], dtype=np.float32)
    query, keys = (x.astype(jnp.bfloat16) for x in (query, keys))
    out = effattn.paged_attention(query, keys, values, **given)
    assert out.dtype == np.float32
    rounded = {name: np.asarray(arrays[name], jnp.bfloat16) for name in ("query", "key")}
    true, _ = expected({k: np.float64(x) for k, x in (arrays | rounded).items()}, [13, 6])
    np.testing.assert_allclose(out, true, rtol=1e-5, atol=1e-5)


def test_traced_lengths_end_where_the_table_ends():
    (query, keys, values), given, _ = draw([32, 32], dtype=np.float32)
    whole = effattn.paged_attention(query, keys, values, **given)
    more = attend(query, keys, values, **given | {"lengths": jnp.array([40, 32])})[0]
    np.testing.assert_allclose(more, whole, rtol=1e-6)


def test_gradients_are_refused_in_a_sentence():
    (query, *pages), given, _ = draw([13], dtype=np.float32)
    with pytest.raises(TypeError, match="is for decoding and has no gradients"):
        jax.grad(lambda query: effattn.paged_attention(query, *pages, **given).sum())(query)


@pytest.mark.devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sequences_and_heads_on_several_devices_are_those_on_one(axis_type):
    """Devices are used by `shard_map`, or by types that carry the sharding."""
    (query, *pages), given, _ = draw([13, 6, 30, 1], queries=2, dtype=np.float32)
    pages = [np.nan_to_num(x) for x in pages]
    arrays = {"query": query, "key_pages": pages[0], "value_pages": pages[1], **given}
    pool = PartitionSpec(None, None, "heads")
    specs = dict(zip(arrays, (BY_HEAD, pool, pool, BY_ROW, BY_ROW), strict=True))
    devices, run = mesh(axis_type, rows=2), lambda arrays: attend(**arrays)
    if axis_type == AxisType.Auto:
        run = jax.shard_map(run, mesh=devices, in_specs=(specs,), out_specs=BY_HEAD)
    with jax.set_mesh(devices):
        found = jax.jit(run)(shard(devices, arrays, **specs))
    assert_close(found, attend(**arrays), 1e-6)
    for x in found:
        assert tuple(x.sharding.spec)[:3] == tuple(BY_HEAD)
