"""Decoders: options that no law draws, rows of unequal lengths, and refused arguments."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn import registry
from effattn.decode import ContiguousDecoder, RingDecoder
from effattn.decode.state import check_capacity
from tests.marks import slow_but_for


def drawn(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


MECHANISMS = {
    "softmax": ("softmax", {}),
    "softmax, window": ("softmax", {"local_window_size": (3, 0)}),
    "window": ("sliding_window", {"local_window_size": (3, 0)}),
    "window of one": ("sliding_window", {"local_window_size": (0, 0)}),
    "window, dilated": ("sliding_window", {"local_window_size": (2, 0), "dilation": 3}),
    "longformer": ("longformer", {"local_window_size": (3, 0), "max_global": None}),
    "strided": ("sparse_transformer", {"stride": 4}),
    "linear": ("linear", {}),
    "hierarchical": ("hierarchical", {"segment_size": 4, "num_summaries": 2}),
    "hierarchical, learned": (
        "hierarchical",
        {
            "segment_size": 2,
            "num_levels": 2,
            "num_summaries": 2,
            "summary_query": np.linspace(-3, 3, 16, dtype=np.float32).reshape(2, 8),
        },
    ),
    "block linformer": (
        "block_linformer",
        {"key_projection": drawn(2, 4), "value_projection": drawn(2, 2, 4)},
    ),
    "long-short": (
        "long_short",
        {"window_size": 3, "segment_size": 4, "projection": drawn(8, 2)},
    ),
    "long-short, window of one": ("long_short", {"window_size": 1, "projection": drawn(2, 8, 1)}),
    "routing": ("routing", {"centroids": drawn(4, 3, 8), "cluster_size": 2}),
    "moba": ("moba", {"block_size": 3, "top_k": 2}),
    "linear, identity": ("linear", {"feature_map": "identity"}),
}

SELECTION = ("selection_query", "selection_key")

# Mechanisms whose window, segment or projection is longer than a row may be.
WIDE = {
    "window, wide": ("sliding_window", {"local_window_size": (2**30, 0)}),
    "window, wide steps": ("sliding_window", {"local_window_size": (4, 0), "dilation": 6}),
    "window, steps too wide": ("sliding_window", {"local_window_size": (4, 0), "dilation": 2**20}),
    "longformer, wide": ("longformer", {"local_window_size": (10**5, 0), "max_global": None}),
    "softmax, wide window": ("softmax", {"local_window_size": (10**5, 0)}),
    "hierarchical, wide": ("hierarchical", {"segment_size": 2**20, "num_summaries": 2}),
    "block linformer, wide": (
        "block_linformer",
        {"key_projection": drawn(2, 64), "value_projection": drawn(2, 64)},
    ),
    "long-short, wide": (
        "long_short",
        {"window_size": 2**20, "segment_size": 4, "projection": drawn(8, 2)},
    ),
    "long-short, wide segments": (
        "long_short",
        {"window_size": 2, "segment_size": 2**20, "projection": drawn(8, 2)},
    ),
    "routing, wide": ("routing", {"centroids": drawn(4, 3, 8), "cluster_size": 2**20}),
    "moba, wide": ("moba", {"block_size": 2**20, "top_k": 2}),
    "based, wide": ("based", {"local_window_size": (2**20, 0)}),
    "strided, wide": ("sparse_transformer", {"stride": 2**20}),
}
MECHANISMS |= WIDE


def heads(time, batch=2, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    sizes = (4, 8), (2, 8), (2, 6)
    return [rng.normal(size=(batch, time, *size)).astype(dtype) for size in sizes]


def decoder_of(name, options):
    return registry.load(registry.get(name).decoder)(registry.get(name).function, options)


# Slow cases; the laws test the same mechanisms with other options.
SLOW = (
    "hierarchical",
    "hierarchical, learned",
    "block linformer",
    "long-short",
    "long-short, window of one",
    "strided",
    "routing",
    *WIDE,
)


@pytest.fixture(params=slow_but_for(MECHANISMS.keys() - SLOW, MECHANISMS))
def name(request):
    return request.param


@pytest.fixture
def decoder(name):
    return decoder_of(*MECHANISMS[name])


ROWS, LENGTH = 3, 15


@functools.cache
def compiled(name):
    """The decoder, its compiled step, and the outputs for the whole of `heads(LENGTH, ROWS)`."""
    decoder = decoder_of(*MECHANISMS[name])
    mechanism, options = MECHANISMS[name]
    function = registry.get(mechanism).function
    if "is_causal" in inspect.signature(function).parameters:
        options = {**options, "is_causal": True}
    whole = jax.jit(functools.partial(function, **options))(*heads(LENGTH, ROWS))
    return decoder, jax.jit(decoder.extend), np.asarray(whole)


def test_rows_of_unequal_lengths_equal_each_row_alone(name):
    assert_rows_of_unequal_lengths_equal_each_row_alone(name)


@pytest.mark.parametrize("name", WIDE)
def test_a_state_never_holds_more_tokens_than_a_row_may(name):
    """Every axis of the state is shorter than 64, and the decoder still gives correct outputs."""
    decoder = decoder_of(*MECHANISMS[name])
    for size in (0, 1, 7):
        state = jax.eval_shape(lambda n=size: decoder.init(2, n, 2, 8, 6, jnp.float32))
        assert max(max(leaf.shape) for leaf in jax.tree.leaves(state)) < 64
    assert_rows_of_unequal_lengths_equal_each_row_alone(name)


# Long-short attention keeps sums over a segment, which hold any number of tokens.
@pytest.mark.parametrize("name", [n for n in WIDE if n != "long-short, wide segments"])
def test_a_row_that_outgrows_a_state_that_it_bounds_is_refused(name):
    decoder = decoder_of(*MECHANISMS[name])
    state = decoder.init(2, 7, 2, 8, 6, jnp.float32)
    with pytest.raises(ValueError, match="holds at most 7 tokens a row, got 8"):
        decoder.extend(*heads(8), state)
    with pytest.raises(ValueError, match="holds at most 7 tokens a row, got 8"):
        jax.eval_shape(decoder.extend, *heads(8), state)  # known within a trace too
    full = dataclasses.replace(state, **_of_length(state, 7))
    with pytest.raises(ValueError, match="holds at most 7 tokens a row, got 8"):
        decoder.extend(*heads(1), full, jnp.array([0, 1]))


def _of_length(state, length):
    """The fields of the state that say how many tokens were seen."""
    length = jnp.full(2, length, jnp.int32)
    if hasattr(state, "ring"):
        return {"ring": dataclasses.replace(state.ring, length=length)}
    return {"length": length}


@pytest.mark.parametrize(
    ("name", "wider"),
    [
        ("window", {"local_window_size": (9, 0)}),
        ("long-short", {"window_size": 30}),
        ("hierarchical", {"segment_size": 30}),
        ("block linformer", {"key_projection": drawn(2, 30), "value_projection": drawn(2, 30)}),
        ("routing", {"cluster_size": 30}),
    ],
)
def test_the_state_of_a_narrower_layer_is_refused(name, wider):
    """The narrow state has its full width, so it is no wide state that short rows have cut."""
    mechanism, options = MECHANISMS[name]
    narrow, wide = (decoder_of(mechanism, {**options, **o}) for o in ({}, wider))
    state = jax.eval_shape(lambda: narrow.init(2, 20, 2, 8, 6, jnp.float32))
    with pytest.raises(
        ValueError, match="keep the last .* tokens, got .; it is the state of another layer"
    ):
        jax.eval_shape(wide.extend, *heads(1), state)
    state = jax.eval_shape(lambda: wide.init(2, 6, 2, 8, 6, jnp.float32))
    with pytest.raises(
        ValueError, match="keep the last . tokens, got 6; it is the state of another layer"
    ):
        jax.eval_shape(narrow.extend, *heads(1), state)


def assert_rows_of_unequal_lengths_equal_each_row_alone(name):
    decoder, extend, whole = compiled(name)
    query, key, value = heads(LENGTH, ROWS)
    state = decoder.init(ROWS, LENGTH, 2, 8, 6, jnp.float32)
    start = np.zeros(ROWS, int)
    outs = [[], [], []]
    for lengths in ([5, 0, 2], [1, 5, 4], [1, 1, 1]):
        pieces = [np.full((ROWS, 5, *x.shape[2:]), np.nan, np.float32) for x in (query, key, value)]
        for piece, x in zip(pieces, (query, key, value), strict=True):
            for b, (s, n) in enumerate(zip(start, lengths, strict=True)):
                piece[b, :n] = x[b, s : s + n]
        out, state = extend(*pieces, state, jnp.array(lengths))
        start += lengths
        for b, n in enumerate(lengths):
            outs[b].append(np.asarray(out)[b, :n])
            np.testing.assert_array_equal(np.asarray(out)[b, n:], 0)
    np.testing.assert_array_equal(state.length, start)
    for b in range(ROWS):
        row = np.concatenate(outs[b])
        np.testing.assert_allclose(row, whole[b, : start[b]], rtol=1e-5, atol=1e-6)


def test_a_jitted_step_keeps_the_structure_of_the_state(decoder):
    state = decoder.init(2, 4, 2, 8, 6, jnp.bfloat16)
    after = jax.eval_shape(decoder.extend, *heads(1, dtype=jnp.bfloat16), state)[1]
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), after)


@pytest.mark.parametrize(
    "dtype", [jnp.int8, jnp.uint32, bool, jnp.complex64, jnp.float8_e4m3fn, "floaty", None], ids=str
)
def test_a_state_of_a_dtype_that_cannot_hold_it_is_refused(decoder, dtype):
    with pytest.raises(ValueError, match="dtype of a decode state must be one of float16, .* got"):
        decoder.init(2, 4, 2, 8, 6, dtype)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, "bfloat16", np.dtype("float32")])
def test_a_state_may_be_of_any_float_of_16_bits_or_more(decoder, dtype):
    state = jax.eval_shape(lambda: decoder.init(2, 4, 2, 8, 6, dtype))
    known = {jnp.dtype(d) for d in (dtype, jnp.float32, jnp.int32)}
    assert {x.dtype for x in jax.tree.leaves(state)} <= known


def test_a_ring_holds_its_window_and_no_more():
    decoder = decoder_of("sliding_window", {"local_window_size": (5, 0), "dilation": 2})
    state = decoder.init(1, 10**6, 2, 8, 6, jnp.float32)
    assert state.key.shape == (1, 10, 2, 8)
    assert state.value.shape == (1, 10, 2, 6)


@pytest.mark.parametrize(
    ("name", "given", "missing"),
    [
        ("block_linformer", {"key_projection": drawn(2, 4)}, "needs value_projection among"),
        ("long_short", {"window_size": 3}, "needs one of projection and slot_scores"),
        ("block_linformer", {"dropout_rate": 0.1}, "does not take dropout_rate"),
        ("long_short", {"dropout_rate": 0.1}, "does not take dropout_rate"),
    ],
)
def test_options_that_decoding_needs_or_does_not_take(name, given, missing):
    with pytest.raises(ValueError, match=missing):
        decoder_of(name, given).init(1, 8, 2, 8, 8, jnp.float32)


@pytest.mark.parametrize("name", ["block_linformer", "long_short"])
def test_slots_are_all_that_grows_and_past_their_room_is_an_error(name):
    """The last segment needs no slots: 24 tokens in segments of 4 take 10 slots."""
    options = {
        "block_linformer": {"key_projection": drawn(2, 4), "value_projection": drawn(2, 4)},
        "long_short": {"window_size": 4, "projection": drawn(8, 2)},
    }
    decoder = decoder_of(name, options[name])
    small, large = (decoder.init(1, size, 2, 8, 6, jnp.float32) for size in (24, 240))
    grown = [
        a.shape
        for a, b in zip(*map(jax.tree.leaves, (small, large)), strict=True)
        if a.shape != b.shape
    ]
    assert grown == [(1, 10, 2, 8), (1, 10, 2, 6)]
    with pytest.raises(ValueError, match="holds at most 24 tokens a row, got 25"):
        decoder.extend(*heads(25, batch=1), small)


def test_sizes_of_a_ring_may_be_integers_of_numpy():
    options = {"local_window_size": (5, 0), "dilation": 2}
    of_numpy = {"local_window_size": np.int64(5), "dilation": np.int64(2)}
    (out, _), (expected, _) = (
        decoder.extend(*heads(1), decoder.init(2, 8, 2, 8, 6, jnp.float32))
        for decoder in (decoder_of("sliding_window", o) for o in (of_numpy, options))
    )
    np.testing.assert_array_equal(out, expected)


def test_a_ring_needs_a_window():
    decoder = RingDecoder(effattn.sliding_window_attention, {})
    with pytest.raises(ValueError, match="local_window_size"):
        decoder.init(1, 8, 2, 8, 6, jnp.float32)


def test_longformer_decodes_without_global_tokens():
    """`max_global` bounds only a mask that comes with each call, so it has no effect here."""
    options = {"local_window_size": (3, 0), "dilation": 2}
    decoder = decoder_of("longformer", {**options, "max_global": 2, "global_mask": None})
    assert decoder == decoder_of("sliding_window", options)
    with pytest.raises(NotImplementedError, match="takes no global tokens, got global_mask"):
        decoder_of("longformer", {**options, "global_mask": jnp.ones((1, 8), bool)})


@pytest.mark.parametrize(
    ("name", "options", "arrays"),
    [
        ("path", {}, {"reflection": drawn(1, 4, 2, 8), "beta": drawn(1, 4, 2)}),
        ("selective", {}, dict.fromkeys(SELECTION, drawn(1, 4, 1, 8))),
        (
            "learned_blocks",
            {"block_size": 2, "top_k": 2},
            dict.fromkeys(SELECTION, drawn(1, 4, 2, 8)),
        ),
    ],
)
def test_decoding_in_xla_alone_refuses_other_implementations(name, options, arrays):
    decoder = decoder_of(name, {**options, "implementation": "llvm"})
    x, of_token = drawn(1, 4, 2, 8), {name: array[:, :1] for name, array in arrays.items()}
    state = decoder.init(1, 4, 2, 8, 8, jnp.float32, **of_token)
    with pytest.raises(NotImplementedError, match="has no 'llvm' implementation"):
        decoder.extend(x, x, x, state, **arrays)


def test_a_ring_shows_score_mod_the_positions_of_the_whole_sequence():
    def score_mod(logit, b, h, i, j):
        return logit + jnp.cos(1.0 + b + h + i * j)

    options = {"local_window_size": (3, 0), "score_mod": score_mod}
    decoder = decoder_of("sliding_window", options)
    query, key, value = heads(9)
    state = decoder.init(2, 9, 2, 8, 6, jnp.float32)
    extend = jax.jit(decoder.extend)
    _, state = extend(query[:, :6], key[:, :6], value[:, :6], state)
    out, _ = extend(query[:, 6:], key[:, 6:], value[:, 6:], state)
    function = functools.partial(effattn.sliding_window_attention, is_causal=True, **options)
    whole = jax.jit(function)(query, key, value)
    np.testing.assert_allclose(out, whole[:, 6:], rtol=1e-5, atol=1e-6)


def test_a_step_reads_only_the_keys_of_a_dilated_window():
    """Single steps from an empty ring read 4 keys each, not the 9 of the ring and the new one."""

    def score_mod(logit, b, h, i, j):
        return logit + jnp.cos(1.0 + b + h + i * j)

    options = {"local_window_size": (3, 0), "dilation": 3, "score_mod": score_mod}
    function = functools.partial(effattn.sliding_window_attention, is_causal=True)
    read = []

    def spied(query, key, *args, **given):
        read.append(key.shape[1])
        return function.func(query, key, *args, **given)

    decoder = RingDecoder(spied, options)
    query, key, value = heads(13)
    state, outs = decoder.init(2, 13, 2, 8, 6, jnp.float32), []
    extend = jax.jit(decoder.extend)
    for t in range(13):
        out, state = extend(*(x[:, t : t + 1] for x in (query, key, value)), state)
        outs.append(out)
    whole = jax.jit(functools.partial(function, **options))(query, key, value)
    np.testing.assert_allclose(np.concatenate(outs, 1), whole, rtol=1e-5, atol=1e-6)
    assert read == [4]


def test_a_step_copies_no_contiguous_cache():
    """The cache is written and read in place."""
    decoder, found = decoder_of("softmax", {}), []
    for capacity in (512, 4096):
        state = jax.eval_shape(lambda n=capacity: decoder.init(2, n, 2, 8, 6, jnp.float32))
        lowered = jax.jit(decoder.extend, donate_argnums=3).lower(*heads(1), state)
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= 2 * capacity * 2 * (8 + 6) * 4
        found.append(memory.temp_size_in_bytes)
    assert found[1] == found[0]


def test_a_hierarchy_keeps_one_segment_and_summaries():
    """The state keeps 1 segment of 1024, 1 part at each of 3 levels, and 127 summaries."""
    decoder = decoder_of("hierarchical", {"segment_size": 8, "num_levels": 4})
    state = decoder.init(1, 8 * 1024, 2, 8, 6, jnp.bfloat16)
    assert state.key.shape == (1, 8, 2, 8)
    assert [runs.key.shape for runs in state.siblings] == [(1, 1, 2, 8)] * 3
    assert state.summary_key.shape == (1, 127, 2, 8)
    # With enough levels for the whole sequence, no units are left to keep.
    decoder = decoder_of("hierarchical", {"segment_size": 8, "num_levels": 12})
    state = decoder.init(1, 8 * 1024, 2, 8, 6, jnp.bfloat16)
    assert len(state.siblings) == 10 and state.summary_key.size == 0


def test_a_hierarchy_with_no_units_to_keep_has_gradients():
    decoder = decoder_of("hierarchical", {"segment_size": 2})
    tokens, state = heads(2), decoder.init(2, 2, 2, 8, 6, jnp.float32)
    assert state.summary_key.size == 0
    gradients = jax.grad(lambda *tokens: jnp.sum(decoder.extend(*tokens, state)[0]), (0, 1, 2))
    found = jax.eval_shape(gradients, *tokens)
    assert [x.shape for x in found] == [x.shape for x in tokens]


def test_a_hierarchy_is_told_its_options():
    decoder = decoder_of("hierarchical", {"segment_size": 4, "dropout_rate": 0.5})
    with pytest.raises(ValueError, match="does not take dropout_rate"):
        decoder.init(1, 8, 2, 8, 6, jnp.float32)
    with pytest.raises(ValueError, match="needs segment_size"):
        decoder_of("hierarchical", {}).init(1, 8, 2, 8, 6, jnp.float32)


def test_a_full_hierarchy_raises_or_overwrites_nothing():
    """With known lengths the call raises; with traced lengths extra summaries are not stored."""
    decoder = decoder_of("hierarchical", {"segment_size": 2})
    query, key, value = heads(12)
    state = decoder.init(2, 7, 2, 8, 6, jnp.float32)
    with pytest.raises(ValueError, match="holds at most 8 tokens a row, got 12"):
        decoder.extend(query, key, value, state)
    extend = jax.jit(decoder.extend)
    _, full = extend(query[:, :8], key[:, :8], value[:, :8], state)
    _, over = extend(query[:, 8:], key[:, 8:], value[:, 8:], full)
    np.testing.assert_array_equal(over.summary_key, full.summary_key)
    np.testing.assert_array_equal(over.summary_value, full.summary_value)


def test_a_full_contiguous_cache_raises_when_the_lengths_are_known():
    decoder = decoder_of("softmax", {})
    state = decoder.init(2, 5, 2, 8, 6, jnp.float32)
    state = dataclasses.replace(state, length=jnp.array([4, 2]))
    with pytest.raises(ValueError, match="holds at most 5 tokens a row, got 6"):
        decoder.extend(*heads(2), state)
    check_capacity(state.length, jnp.array([1, 2]), 5)  # exactly full


def test_a_traced_overflow_of_a_contiguous_cache_overwrites_nothing():
    decoder = decoder_of("softmax", {})
    state = decoder.init(2, 5, 2, 8, 6, jnp.float32)
    query, key, value = heads(8)
    extend = jax.jit(decoder.extend)
    _, before = extend(query[:, :4], key[:, :4], value[:, :4], state)
    _, after = extend(query[:, 4:], key[:, 4:], value[:, 4:], before)
    np.testing.assert_array_equal(after.key, key[:, :5])
    np.testing.assert_array_equal(after.value, value[:, :5])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (jnp.array([1, 2, 3]), "of shape"),
        (jnp.array([1.0, 2.0]), "integers"),
        (jnp.array([1, 4]), "between 0 and the 3 tokens"),
        (jnp.array([-1, 2]), "between 0 and the 3 tokens"),
    ],
)
def test_wrong_lengths_are_named(decoder, lengths, message):
    state = decoder.init(2, 8, 2, 8, 6, jnp.float32)
    with pytest.raises(ValueError, match=message):
        decoder.extend(*heads(3), state, lengths)


def test_the_state_of_another_decoder_or_batch_is_refused(decoder):
    with pytest.raises(ValueError, match="init_state returned"):
        decoder.extend(*heads(3), object())
    with pytest.raises(ValueError, match="call init_state with batch=2"):
        decoder.extend(*heads(3), decoder.init(3, 8, 2, 8, 6, jnp.float32))


def test_an_empty_extension_is_refused(decoder):
    with pytest.raises(ValueError, match="at least one token"):
        decoder.extend(*heads(0), decoder.init(2, 8, 2, 8, 6, jnp.float32))


def test_a_cache_of_another_dtype_than_the_computation_is_cast():
    decoder = ContiguousDecoder(effattn.dot_product_attention)
    state = decoder.init(2, 8, 2, 8, 6, jnp.bfloat16)
    out, state = jax.eval_shape(decoder.extend, *heads(3), state)
    assert out.dtype == jnp.float32
    assert state.key.dtype == jnp.bfloat16
