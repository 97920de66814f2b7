"""Attention over patterns and layouts against its definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effattn import (
    BlockLayout,
    dot_product_attention,
    sliding_window_attention,
    sparse_attention,
)
from effattn.patterns import (
    BlockMask,
    Causal,
    Custom,
    Dilated,
    Documents,
    Fixed,
    Global,
    Prefix,
    RandomBlocks,
    SlidingWindow,
    Strided,
)
from effattn.testing.functions import assert_close
from tests.dense import dense_with_gradients, draw, with_gradients
from tests.marks import slow

QUERIES, KEYS = 21, 26


pytestmark = pytest.mark.usefixtures("x64")


def attend(pattern, options, arrays, known):
    return sparse_attention(
        **arrays, **known, **options, pattern=pattern, tile=(8, 4), return_residual=True
    )


parts = (
    Causal(),
    SlidingWindow(3, 2),
    Dilated((2, 1), 3),
    Global((0, 7, 20)),
    Strided(5),
    Fixed(6, 2),
    RandomBlocks(4, 2, seed=1),
    BlockMask(np.random.default_rng(0).random((6, 7)) < 0.4, 4),
    Documents((9, 5, 12)),
    Prefix(4),
    Custom(lambda i, j: (i * j) % 3 == 1),
)
causal, window, dilated, everywhere, strided, fixed, random, blocks, documents, prefix, custom = (
    parts
)
patterns = st.recursive(
    st.sampled_from(parts),
    lambda some: st.one_of(
        st.builds(lambda a, b: a & b, some, some),
        st.builds(lambda a, b: a | b, some, some),
        some.map(lambda a: ~a),
    ),
    max_leaves=4,
)


@pytest.mark.parametrize(
    "pattern",
    [
        slow(causal & (window | random | ~strided)),
        dilated | everywhere & custom | ~prefix & fixed,
        slow(~(blocks | ~documents)),
    ],
)
def test_any_pattern_is_the_dense_form(pattern):
    """The cases combine all parts of patterns; each pattern compiles a program of its own."""
    arrays = draw(QUERIES, KEYS, batch=(1,))
    lengths = np.array([23])
    known = {"key_value_seq_lengths": lengths}
    expected = dense_with_gradients(arrays, **known, mask=pattern.mask(QUERIES, KEYS)[None, None])
    found = with_gradients(functools.partial(attend, pattern, {}), arrays, known)
    assert_close(found, expected, 1e-12)


def attend_over(arrays, known):
    return sparse_attention(**arrays, layout=known["layout"], return_residual=True)


@pytest.mark.slow
@settings(max_examples=300)
@given(patterns)
def test_any_layout_is_the_dense_form(pattern):
    """All tiles are full and hold one pair, so that one program serves all patterns."""
    arrays = draw(QUERIES, KEYS, batch=(1,))
    layout = pattern.layout(QUERIES, KEYS, tile=(1, 1))
    assert not layout.partial_counts.any()
    indices = np.pad(layout.full_indices, [(0, 0), (0, KEYS - layout.full_indices.shape[-1])])
    layout = dataclasses.replace(layout, full_indices=indices)
    expected = dense_with_gradients(arrays, mask=pattern.mask(QUERIES, KEYS)[None, None])
    assert_close(with_gradients(attend_over, arrays, {"layout": layout}), expected, 1e-12)


@pytest.mark.slow
def test_all_options_together():
    arrays = draw(QUERIES, KEYS)
    options = {
        "is_causal": True,
        "query_offset": 3,
        "segment_ids": tuple(np.arange(n)[None].repeat(2, 0) // 9 for n in (QUERIES, KEYS)),
        "logits_soft_cap": 2.0,
        "dropout_rate": 0.3,
        "dropout_rng": jax.random.key(2),
        "score_mod": lambda x, b, h, i, j: x + 0.1 * (i - j) * (h + 1) + 0.2 * b,
    }
    pattern = SlidingWindow(7, 2) | Global(3)
    expected_options = options | {"score_mod_of": lambda arrays: options["score_mod"]}
    del expected_options["score_mod"]
    mask = pattern.mask(QUERIES + 3, KEYS)[3:]
    expected = dense_with_gradients(arrays, **expected_options, mask=mask[None, None])
    found = with_gradients(functools.partial(attend, pattern, options), arrays)
    assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("key_heads", [1, slow(2), slow(4)])
def test_a_pattern_may_differ_by_head(key_heads):
    arrays = draw(QUERIES, KEYS, key_heads=key_heads)
    blocks = np.random.default_rng(0).random((4, 6, 7)) < 0.4
    pattern = BlockMask(blocks, 4) & SlidingWindow(9, 9)
    out, lse = jax.jit(functools.partial(attend, pattern, {}))(arrays, {})
    mask = pattern.mask(QUERIES, KEYS)
    for n in range(4):
        one = {"query": arrays["query"][:, :, n : n + 1]}
        k = n * key_heads // 4
        one |= {name: arrays[name][:, :, k : k + 1] for name in ("key", "value")}
        (expected, expected_lse), _ = dense_with_gradients(one, mask=mask[n][None, None])
        assert_close((out[:, :, n : n + 1], lse[:, :, n : n + 1]), (expected, expected_lse), 1e-12)


@pytest.mark.slow
def test_blocks_chosen_by_the_data_under_jit():
    """Each block of queries takes the key blocks of highest mean score, as in MoBA."""
    size, chosen, heads = 4, 2, 2
    arrays = draw(24, 24, heads=4, key_heads=heads)

    def layout(query, key):
        means = [a.reshape(2, 6, size, heads, -1, a.shape[-1]).mean((2, 4)) for a in (query, key)]
        scores = jnp.einsum("bnkh,bmkh->bknm", *means)
        scores = jnp.where(jnp.tri(6, dtype=bool), scores, -jnp.inf)
        indices = jax.lax.top_k(scores, chosen)[1]
        return BlockLayout.from_indices(indices, tile=(size, size), lengths=(24, 24))

    def function(arrays, known):
        kept = jax.lax.stop_gradient(layout(arrays["query"], arrays["key"]))
        return sparse_attention(**arrays, layout=kept, is_causal=True, return_residual=True)

    out, gradients = with_gradients(function, arrays)
    blocks = jax.jit(lambda query, key: layout(query, key).block_mask())
    kept = np.asarray(blocks(arrays["query"], arrays["key"])).repeat(size, -1).repeat(size, -2)
    for k in range(heads):
        one = {n: a[:, :, 2 * k : 2 * k + 2] for n, a in arrays.items() if n == "query"}
        one |= {n: arrays[n][:, :, k : k + 1] for n in ("key", "value")}
        expected, _ = dense_with_gradients(one, is_causal=True, mask=kept[:, k, None])
        assert_close(tuple(o[:, :, 2 * k : 2 * k + 2] for o in out), expected, 1e-12)
    assert all(np.abs(g).max() > 0 for g in gradients.values())


def test_a_full_pattern_is_exact_attention():
    arrays = draw(QUERIES, KEYS)
    found = jax.jit(functools.partial(attend, SlidingWindow(30, 30), {}))(arrays, {})
    exact = jax.jit(functools.partial(dot_product_attention, return_residual=True))
    assert_close(found, exact(**arrays), 1e-12)


def test_a_pattern_that_allows_nothing_gives_zeros():
    arrays = draw(QUERIES, KEYS)
    out, lse = jax.jit(functools.partial(attend, Causal() & ~Causal(), {}))(arrays, {})
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


ANY = BlockLayout.from_block_mask(np.ones((3, 7), bool), tile=(8, 4), lengths=(QUERIES, KEYS))


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "needs one of pattern and layout, got neither"),
        ({"pattern": Causal(), "layout": ANY}, "needs one of pattern and layout, got both"),
        ({"pattern": lambda i, j: i > j}, r"becomes one with effattn.patterns.Custom\(mask\)"),
        ({"layout": np.ones((3, 7))}, "layout must be an effattn.BlockLayout, got ndarray"),
        (
            {"layout": ANY, "tile": (8, 8)},
            r"tile must be None or the tile of layout, \(8, 4\), got \(8, 8\)",
        ),
        ({"pattern": Causal(), "query_offset": jnp.int32(3)}, "query_offset must be an int"),
        (
            {"pattern": BlockMask(np.ones((3, 6, 7), bool), 4)},
            "the 4 heads of query, got a pattern of 3 heads",
        ),
        ({"pattern": Global((3, 40))}, "40"),
        ({"pattern": RandomBlocks(4, 9)}, "9"),
        ({"pattern": BlockMask(np.ones((2, 7), bool), 4)}, "blocks"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        sparse_attention(**draw(QUERIES, KEYS), **options)


def test_a_layout_of_other_lengths_is_refused():
    with pytest.raises(ValueError, match="lengths of query and key, .11, 14., got .21, 26."):
        sparse_attention(**draw(), layout=ANY)


def test_a_layout_for_each_query_head_is_refused():
    blocks = np.ones((4, 3, 7), bool)
    layout = BlockLayout.from_block_mask(blocks, tile=(8, 4), lengths=(QUERIES, KEYS))
    with pytest.raises(ValueError, match=r"layout.* one for each key head, got \(4,\)"):
        sparse_attention(**draw(QUERIES, KEYS), layout=layout)


@pytest.mark.parametrize("queries, keys", [(0, 5), (5, 0)])
def test_there_may_be_no_tokens(queries, keys):
    out = sparse_attention(**draw(queries, keys), pattern=Causal() & Global(2))
    np.testing.assert_array_equal(out, np.zeros((2, queries, 4, 5)))


@pytest.mark.parametrize(
    "attend",
    [
        functools.partial(sliding_window_attention, local_window_size=(255, 0), is_causal=True),
        slow(functools.partial(sparse_attention, pattern=Causal() & SlidingWindow(255, 0))),
        functools.partial(
            sparse_attention, pattern=Causal() & (SlidingWindow(255, 0) | Global(16))
        ),
    ],
    ids=["window", "pattern", "pattern with global tokens"],
)
def test_a_window_over_131072_tokens_fits(attend):
    """Forward and backward, with one head of size 64, need less than 192 MB of temporaries."""

    def both(query, key, value):
        out, pull_back = jax.vjp(attend, query, key, value)
        return out, pull_back(out)

    one = jax.ShapeDtypeStruct((1, 131072, 1, 64), jnp.float32)
    compiled = jax.jit(both).lower(one, one, one).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 192e6
