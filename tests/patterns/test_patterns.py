import dataclasses
import operator
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effattn import patterns
from effattn.patterns import (
    Axial,
    BlockMask,
    Causal,
    Custom,
    Dilated,
    Documents,
    Fixed,
    Full,
    Global,
    GlobalBlocks,
    Grid,
    Prefix,
    RandomBlocks,
    SlidingWindow,
    Strided,
    algebra,
    base,
    bigbird,
    longformer,
    sparse_transformer,
    zones,
)
from effattn.patterns.blocks import BlockLists
from tests.marks import slow

BLOCKS = np.random.default_rng(0).random((3, 7, 6)) < 0.4


def document(position):
    return next((n for n, end in enumerate((4, 4, 13, 20)) if position < end), None)


# The definitions of the papers, for one pair of tokens.
DEFINITIONS = [
    (Full(), lambda i, j: True),
    (Causal(), lambda i, j: j <= i),
    (SlidingWindow(3, 1), lambda i, j: j in range(i - 3, i + 2)),
    (SlidingWindow(1, 0, 4), lambda i, j: j // 4 in (i // 4 - 1, i // 4)),
    (Dilated((2, 1), 3), lambda i, j: j in (i - 6, i - 3, i, i + 3)),
    (Dilated(1, 2), lambda i, j: j in (i - 2, i, i + 2)),
    (Global(2), lambda i, j: i < 2 or j < 2),
    (Global((7, 0, 7, 9, 11, 13, 15)), lambda i, j: bool({i, j} & {0, 7, 9, 11, 13, 15})),
    # With blocks of 4 tokens there are 7 query blocks and 6 key blocks.
    (GlobalBlocks(4, 1, 2), lambda i, j: bool({i // 4} & {0, 5, 6} or {j // 4} & {0, 4, 5})),
    (Strided(4), lambda i, j: (i - j) % 4 == 0),
    (Fixed(5, 2), lambda i, j: j % 5 in (3, 4)),
    (Prefix(6), lambda i, j: j < 6),
    (Documents((4, 0, 9, 7)), lambda i, j: document(i) is not None and document(i) == document(j)),
    (BlockMask(BLOCKS[0], 4), lambda i, j: BLOCKS[0][i // 4, j // 4]),
    (
        Grid(4, 5, (1, 2)),
        lambda i, j: max(i, j) < 20 and abs(i // 5 - j // 5) <= 1 and abs(i % 5 - j % 5) <= 2,
    ),
    (Axial(4, 5), lambda i, j: max(i, j) < 20 and (i // 5 == j // 5 or i % 5 == j % 5)),
    (Custom(lambda i, j: (i * j) % 3 == 1), lambda i, j: i * j % 3 == 1),
    (longformer(2, 1), lambda i, j: abs(i - j) <= 2 or i == 0 or j == 0),
    (
        longformer((2, 0), (3, 5), dilation=2, causal=True),
        lambda i, j: j <= i and (i - j in (0, 2, 4) or i in (3, 5) or j in (3, 5)),
    ),
    (
        sparse_transformer(4),
        lambda i, j: j <= i and (i - j <= 4 or (i - j) % 4 == 0),
    ),
    (
        sparse_transformer(4, "fixed", 2),
        lambda i, j: j <= i and (i // 4 == j // 4 or j % 4 in (2, 3)),
    ),
]


@pytest.mark.parametrize("pattern, definition", DEFINITIONS, ids=[repr(p) for p, _ in DEFINITIONS])
def test_mask_is_the_papers_definition(pattern, definition):
    for T, S, offset in ((26, 23, 0), (7, 23, 19)):
        expected = [[definition(t + offset, j) for j in range(S)] for t in range(T)]
        np.testing.assert_array_equal(pattern.mask(T, S, offset=offset), expected)


@pytest.mark.parametrize(
    "pattern", [p for p, _ in DEFINITIONS] + [BlockMask(BLOCKS, 4), bigbird(4)], ids=repr
)
def test_traced_rule_is_the_known_one(pattern):
    i, j, h = np.arange(26)[:, None], np.arange(23), np.arange(3)[:, None, None]
    rule = pattern.sized(7, 23, offset=19).allows
    traced = jax.jit(rule)(i, j, h)
    mask = pattern.mask(26, 23)
    assert traced.dtype == bool
    np.testing.assert_array_equal(traced, np.broadcast_to(mask, traced.shape))
    assert bool(rule(5, 3)) == mask[..., 5, 3].flat[0]


# Random compositions


@dataclasses.dataclass(frozen=True)
class Case:
    pattern: patterns.Pattern
    size: tuple[int, int, int]
    tile: tuple[int, int]

    @property
    def mask(self):
        T, S, offset = self.size
        return self.pattern.mask(T, S, offset=offset)

    def layout(self):
        """The same as `layout` of a pattern, without its cache."""
        T, S, offset = self.size
        frame = algebra._frame(self.pattern, T, S, offset, self.tile)
        return algebra._compiled.__wrapped__(self.pattern, frame, None)

    def tiles(self):
        """Tiles that hold a pair, and full tiles, by the dense mask."""
        (T, S, _), (t, s) = self.size, self.tile
        mask = np.atleast_3d(self.mask.T).T
        rest = [(0, 0), (0, -T % t), (0, -S % s)]
        some, every = (np.pad(mask, rest, constant_values=fill) for fill in (False, True))
        grid = (len(mask), -(-T // t), t, -(-S // s), s)
        some, every = some.reshape(grid).any((2, 4)), every.reshape(grid).all((2, 4))
        return (some, every) if self.pattern.heads else (some[0], every[0])


def arithmetic(queries, keys, heads):
    """Base patterns whose tiles are computed exactly without reading elements."""
    side, longest = st.integers(0, 9), max(queries, keys)
    size = st.integers(1, 9)

    @st.composite
    def blocks(draw):
        b = draw(size)
        shape = (-(-queries // b), -(-keys // b))
        if draw(st.booleans()):
            shape = (heads, *shape)
        seed, density = draw(st.integers(0, 99)), draw(st.floats(0, 1))
        return BlockMask(np.random.default_rng(seed).random(shape) < density, b)

    return st.one_of(
        st.just(Full()),
        st.just(Causal()),
        st.builds(SlidingWindow, side, side, st.sampled_from([1, 1, 3, 8])),
        st.builds(Global, st.integers(0, min(5, longest))),
        st.builds(Global, st.lists(st.integers(0, longest - 1), max_size=7)),
        st.builds(
            GlobalBlocks,
            st.integers(1, max(1, longest // 4)),
            st.integers(0, min(2, longest // 4)),
            st.integers(0, min(2, longest // 4)),
        ),
        st.builds(Prefix, st.integers(0, 20)),
        st.builds(Documents, st.lists(st.integers(0, 15), max_size=6)),
        blocks(),
    )


def others(queries, keys):
    side, size = st.integers(0, 4), st.integers(1, 9)
    window = st.one_of(side, st.tuples(side, side))
    return st.one_of(
        st.builds(Dilated, window, size),
        st.builds(Strided, size),
        size.flatmap(lambda n: st.builds(Fixed, st.just(n), st.integers(1, n))),
        st.builds(Grid, size, size, window),
        st.builds(Axial, size, size),
        size.flatmap(
            lambda b: st.builds(
                RandomBlocks,
                st.just(b),
                st.integers(0, min(3, -(-keys // b))),
                st.integers(0, 99),
                st.booleans(),
                st.sampled_from([0, 1, 3]),
                st.tuples(st.integers(0, 2), st.integers(0, 2)),
            )
        ),
        st.just(Custom(lambda i, j: (i + 2 * j) % 7 == 1)),
        st.builds(bounded, side, side),
    )


def bounded(left, right):
    """A window of even keys, with bounds; rows 8 to 15 see nothing."""

    def rule(i, j):
        return (j >= i - left) & (j <= i + right) & (j % 2 == 0) & (i // 8 != 1)

    def bounds(rows):
        inside = [i for i in rows if i // 8 != 1]
        return (inside[0] - left, inside[-1] + right) if inside else None

    return Custom(rule, bounds)


def compositions(queries, keys, negated=True, every=True):
    base = arithmetic(queries, keys, heads=2)
    if every:
        base = base | others(queries, keys)

    def composed(part):
        pair = st.tuples(part, part)
        both, either = (pair.map(lambda p, op=op: op(*p)) for op in (operator.and_, operator.or_))
        return both | either | (part.map(operator.invert) if negated else both)

    return st.recursive(base, composed, max_leaves=6)


@st.composite
def cases(draw, **kinds):
    T, S = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    offset = draw(st.sampled_from([0, 0, 1, 9]))
    pattern = draw(compositions(T + offset, S, **kinds))
    return Case(pattern, (T, S, offset), (draw(st.integers(1, 11)), draw(st.integers(1, 11))))


@pytest.mark.parametrize("examples", [100, slow(400)])
def test_layout_is_the_oracle_at_tile_grain(examples):
    settings(max_examples=examples)(given(cases())(assert_layout_is_the_oracle))()


def assert_layout_is_the_oracle(case):
    some, every = case.tiles()
    layout = case.layout()
    np.testing.assert_array_equal(layout.block_mask(), some)
    np.testing.assert_array_equal(layout._mask("full"), every & some)
    assert not (layout._mask("full") & layout._mask("partial")).any()


def test_tiles_of_a_head():
    alike = Causal()
    assert {alike.tile(range(4), range(4), h=h) for h in (0, 3)} == {"partial"}
    by_head = BlockMask(BLOCKS, 4)
    for h, block in enumerate(BLOCKS[:, 2, 1]):
        found = by_head.tile(range(8, 12), range(4, 8), (28, 24), h=h)
        assert found == ("full" if block else "empty")
    with pytest.raises(ValueError, match="h must be an int from 0 to 2, got 3"):
        by_head.tile(range(4), range(4), (28, 24), h=3)


@settings(max_examples=120)
@given(cases(negated=False, every=False))
def test_arithmetic_alone_is_exact_for_windows_globals_documents_prefixes_and_blocks(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zones, "MOST_CHECKED", 0)
        layout = case.layout()
    some, every = case.tiles()
    np.testing.assert_array_equal(layout.block_mask(), some)
    assert not (layout._mask("full") & ~every).any()


@settings(max_examples=120)
@given(cases(), st.booleans())
def test_no_pair_is_lost_where_budgets_are_small(case, checked):
    some, every = case.tiles()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zones, "MOST_PAIRS", 3)
        patch.setattr(zones, "_RANGES_AT_ONCE", 5)
        patch.setattr(zones, "_PAIRS_AT_ONCE", 50)
        patch.setattr(base, "_MOST_STRIPES", 2)
        if not checked:
            patch.setattr(zones, "MOST_CHECKED", 0)
        layout = case.layout()
    kept, full = layout.block_mask(), layout._mask("full")
    assert not (some & ~kept).any()
    assert not (full & ~every).any()
    if checked:
        np.testing.assert_array_equal(kept, some)


@settings(max_examples=120)
@given(cases(), st.data())
def test_answers_about_a_pattern_are_those_of_its_mask(case, data):
    T, S, offset = case.size
    mask = case.pattern.mask(T + offset, S)
    assert case.pattern.density(T + offset, S) == pytest.approx(mask.mean(), abs=1e-12)
    i, j = (data.draw(st.integers(0, n - 1)) for n in (T + offset, S))
    rows, keys = range(i, min(i + 5, T + offset)), range(j, min(j + 6, S))
    h = (case.pattern.heads or 1) - 1
    part = np.atleast_3d(mask.T).T[h, rows.start : rows.stop, keys.start : keys.stop]
    state = "full" if part.all() else "partial" if part.any() else "empty"
    assert case.pattern.tile(rows, keys, (T + offset, S), h) == state
    chunk = case.mask
    np.testing.assert_array_equal(chunk, mask[..., offset:, :])


@settings(max_examples=40)
@given(compositions(33, 29), compositions(33, 29))
def test_de_morgan(a, b):
    p, q = a.mask(33, 29), b.mask(33, 29)
    np.testing.assert_array_equal((a & b).mask(33, 29), p & q)
    np.testing.assert_array_equal((a | b).mask(33, 29), p | q)
    for one, other in ((~(a & b), ~a | ~b), (~(a | b), ~a & ~b), (~(~a), a)):
        np.testing.assert_array_equal(one.mask(33, 29), other.mask(33, 29))
        tiles = [x.layout(33, 29, tile=(5, 7)) for x in (one, other)]
        np.testing.assert_array_equal(*(layout.block_mask() for layout in tiles))
    np.testing.assert_array_equal((~a).mask(33, 29), ~p)


def test_patterns_are_equal_and_hashed_by_value():
    assert Global((2, 1, 0)) == Global(3) == Global(np.arange(3))
    assert hash(BlockMask(BLOCKS, 4)) == hash(BlockMask(BLOCKS.copy(), 4))
    assert BlockMask(BLOCKS, 4) != BlockMask(~BLOCKS, 4)
    assert Dilated(2, 3) == Dilated((2, 2), 3)
    a, b, c = Causal(), Prefix(3), Global(1)
    assert (a & b) & c == a & (b & c) and (a & b) != (a | b) and ~~a is a
    assert a.layout(64, tile=(8, 8)) is Causal().layout(64, tile=(8, 8))
    assert repr((a & ~b) | c) == "((Causal() & ~Prefix(n=3)) | Global(positions=1))"


# Heads


def test_a_layout_for_each_key_head_is_the_union_over_its_query_heads():
    blocks = np.random.default_rng(1).random((4, 6, 6)) < 0.5
    pattern = Causal() & BlockMask(blocks, 4)
    each = pattern.layout(24, tile=(4, 4))
    grouped = pattern.layout(24, tile=(4, 4), key_heads=2)
    pairs = each.block_mask().reshape(2, 2, 6, 6), each._mask("full").reshape(2, 2, 6, 6)
    np.testing.assert_array_equal(grouped.block_mask(), pairs[0].any(1))
    np.testing.assert_array_equal(grouped._mask("full"), pairs[1].all(1))
    assert grouped.partial_counts.shape == (2, 6)
    assert Causal().layout(24, tile=(4, 4), key_heads=2).partial_counts.shape == (6,)
    with pytest.raises(ValueError, match="key_heads must divide the 4 heads of the pattern, got 3"):
        pattern.layout(24, key_heads=3)
    with pytest.raises(ValueError, match=r"same heads to compose, got \[3, 4\]"):
        pattern | BlockMask(BLOCKS, 4)


# Keys that one query reaches, for decoding


def assert_reaches_the_mask(pattern, length):
    """Checks that lists hold each key of the mask once, and no other key up to the query."""
    mask = pattern.mask(length)
    reached = jax.vmap(lambda i: pattern.reach(i, length))(np.arange(length))
    for i, lists in enumerate(np.asarray(reached)):
        assert lists.shape[:-1] == ((pattern.heads,) if pattern.heads else ())
        for h, row in enumerate(np.atleast_2d(lists)):
            seen = np.flatnonzero((mask[h] if pattern.heads else mask)[i, : i + 1])
            assert sorted(j for j in row if 0 <= j <= i) == seen.tolist()


@settings(max_examples=40)
@given(compositions(17, 17).filter(lambda pattern: "last=" not in repr(pattern)))
def test_a_query_reaches_its_row_of_the_mask(pattern):
    assert_reaches_the_mask(pattern, 17)


@pytest.mark.parametrize(
    "pattern",
    [
        BlockLists(np.array([[1, -1], [0, 0], [2, 0], [1, 5], [0, 4]]), 4),
        BlockLists(np.array([[[1], [0], [-1], [2], [2]], [[0], [0], [1], [1], [0]]]), 4),
        RandomBlocks(4, 2, num_heads=3),
        bigbird(3, causal=True, num_heads=2),
        SlidingWindow(9, 0, 6) & ~Causal() | Strided(4) & Fixed(5, 2),
    ],
    ids=repr,
)
def test_lists_of_blocks_are_reached_and_laid_out(pattern):
    """Lists may be by head, name a block twice, or name a block after the end."""
    assert_reaches_the_mask(pattern, 17)
    for one in (pattern, ~pattern):
        assert_layout_is_the_oracle(Case(one, (13, 17, 4), (3, 5)))


# Cost


def test_a_window_and_globals_over_a_million_tokens_compile_in_a_moment():
    pattern = Causal() & (SlidingWindow(2047, 0) | Global(64))
    pattern.layout(2**14, tile=(512, 512))
    tracemalloc.start()
    start = time.process_time()
    layout = pattern.layout(2**20, tile=(512, 512))
    layout.transpose()
    seconds = time.process_time() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Each row has five tiles of the window and one global tile, minus those that the first rows
    # lack.
    assert layout.kept == 6 * 2048 - (5 + 4 + 3 + 2 + 1)
    # The layout keeps 12 273 of 4 194 304 tiles. In the transposed layout, a row is as long as the
    # column of global tiles.
    assert peak < 2**25
    assert seconds < 0.2


def test_the_time_of_a_layout_follows_what_is_kept():
    documents = Documents((1000,) * 1000)
    pattern = documents & (SlidingWindow(255, 0) | Global(tuple(range(0, 64000, 1000))))
    start = time.perf_counter()
    layout = pattern.layout(1_000_000, tile=(500, 500))
    assert time.perf_counter() - start < 2
    assert 2000 < layout.kept < 4000


def test_density_of_a_million_tokens_is_exact():
    pattern = Causal() & (SlidingWindow(2047, 0) | Global(64))
    T = 2**20
    window = 2048 * T - 2048 * 2047 // 2
    globals_ = 64 * T - sum(min(T, g + 2048) for g in range(64))
    assert pattern.density(T) == (window + globals_) / T**2
    assert Causal().density(T) == (T + 1) / (2 * T)
    # Ten documents: each of the first four has a global token, which meets 1999 pairs in its
    # document.
    pattern = Documents((1000,) * 10) | Global((0, 1000, 2000, 3000))
    assert pattern.density(10_000) == (10 * 1000**2 + 8 * 10_000 - 4**2 - 4 * 1999) / 10_000**2


def test_density_is_sampled_where_it_can_be_neither_computed_nor_counted(monkeypatch):
    monkeypatch.setattr(algebra, "_MOST_COUNTED", 100)
    pattern = Custom(lambda i, j: (i + j) % 4 == 0)
    assert pattern.density(4000) == pytest.approx(0.25)


# User-defined patterns


def test_a_custom_rule_is_compiled_under_jit_too():
    pattern = Custom(lambda i, j: jnp.abs(i - j) <= 3, name="near") & Causal()

    @jax.jit
    def kept(x):
        return x + pattern.layout(40, tile=(8, 8)).block_mask().sum()

    assert kept(0) == 9
    assert repr(pattern) == "(Custom(near) & Causal())"


def test_bounds_let_a_custom_rule_be_long():
    def bounds(rows):
        return max(0, rows[0] - 100), rows[-1]

    def rule(i, j):
        return (j <= i) & (i - j <= 100) & ((i + j) % 2 == 0)

    layout = Custom(rule, bounds).layout(65536, tile=(512, 512))
    assert layout.kept == 2 * 128 - 1
    with pytest.raises(
        ValueError, match=r"needs bounds for more than 32768 tokens, .* all 65536 x 65536 pairs"
    ):
        Custom(rule).layout(65536)
    with pytest.raises(ValueError, match="must return bools, got int"):
        Custom(lambda i, j: i + j).mask(8)


# Bad input


def test_rows_that_see_nothing_are_legal():
    pattern = Causal() & ~SlidingWindow(3, 0)
    assert not pattern.mask(8)[:4].any()
    layout = pattern.layout(8, tile=(4, 4))
    assert layout.partial_counts.tolist() == [0, 1] and layout.full_counts.tolist() == [0, 0]
    assert (~Full()).layout(8, tile=(4, 4)).kept == 0 and (~Full()).density(8) == 0


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SlidingWindow(-1, 0), "left must be an int, 0 or more, got -1"),
        (lambda: SlidingWindow(0, 1.5), "right must be an int, 0 or more, got 1.5"),
        (lambda: Dilated(2, 0), "dilation must be an int, 1 or more, got 0"),
        (lambda: Dilated((1, -2), 2), "window must be an int, 0 or more, got -2"),
        (lambda: Dilated((1, 2, 3), 2), r"window must be an int or a pair of ints, got \(1, 2, 3"),
        (lambda: Global((1, -4)), "positions must be an int, 0 or more, got -4"),
        (lambda: Global((1, 64)).mask(64), "at most 63, the last position of the sequence, got 64"),
        (
            lambda: Global(65).layout(60, 64),
            "at most 63, the last position of the sequence, got 64",
        ),
        (lambda: Strided(0), "stride must be an int, 1 or more, got 0"),
        (lambda: Fixed(4, 5), "summary must be at most the stride, 4, got 5"),
        (lambda: Documents((3, -1)), "lengths must be an int, 0 or more, got -1"),
        (
            lambda: RandomBlocks(8, 9).mask(64),
            "at most 8, the number of key blocks of 8 in 64 tokens, got 9",
        ),
        (
            lambda: bigbird(8, num_random_blocks=9).layout(64),
            "at most 8, the number of key blocks .* got 9",
        ),
        (lambda: RandomBlocks(8, 1, window=2), "window must be odd, or 0 for none, got 2"),
        (lambda: bigbird(8, num_global_blocks=(1, -1)), "num_global_blocks must be .* got -1"),
        (
            lambda: GlobalBlocks(8, 5, 4).mask(64),
            "at most 8, .* of 8 tokens, got 5 first and 4 last",
        ),
        (lambda: RandomBlocks(8, 1).allows(1, 2), r"call allows of pattern.sized\(T, S\)"),
        (lambda: bigbird(8, num_window_blocks=2), "num_window_blocks must be odd, got 2"),
        (lambda: BlockMask(BLOCKS, 8).mask(56, 40), "must have 7 x 5 blocks of 8 .* got 7 x 6"),
        (lambda: BlockMask(BLOCKS, 8).mask(40, 48), "must have 5 x 6 blocks of 8 .* got 7 x 6"),
        (lambda: BlockMask(BLOCKS * 1, 8), r"array must be bool .* got int64 of shape \(3, 7, 6\)"),
        (lambda: jax.jit(lambda x: BlockMask(x, 8))(BLOCKS), "array must be known when"),
        (lambda: Grid(0, 4, 1), "height must be an int, 1 or more, got 0"),
        (lambda: sparse_transformer(4, "other"), "kind must be 'strided' or 'fixed', got 'other'"),
        (lambda: sparse_transformer(4, summary=2), "summary needs kind='fixed', got summary=2"),
        (lambda: Causal().layout(0), "T must be an int, 1 or more, got 0"),
        (lambda: Causal().layout(8, tile=(4, 0)), "tile must be a pair .* got"),
        (lambda: Causal().layout(8, offset=-1), "offset must be an int, 0 or more, got -1"),
        (lambda: Causal().tile(range(0), range(4)), "queries must be a range of consecutive"),
    ],
)
def test_bad_input_names_the_number_and_the_limit(make, message):
    with pytest.raises(ValueError, match=message):
        make()
