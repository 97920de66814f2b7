import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effattn.patterns import Causal, SlidingWindow, bigbird
from effattn.patterns.layouts import BlockLayout


@st.composite
def masks(draw):
    """(blocks, full): bool (*L, nq, nk); full blocks are among the blocks."""
    lead = draw(st.sampled_from([(), (2,), (2, 1, 3)]))
    shape = (*lead, draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    blocks = rng.random(shape) < draw(st.floats(0, 1))
    return blocks, blocks & (rng.random(shape) < 0.5)


def built(blocks, full):
    # The last tiles of 3 x 5 reach one token past the lengths.
    lengths = 3 * blocks.shape[-2] - 1, 5 * blocks.shape[-1] - 1
    return BlockLayout.from_block_mask(blocks, tile=(3, 5), lengths=lengths, full=full)


def named(counts, indices):
    """Sets of the indices that count in each row, after checks of the rules of a layout."""
    counts, indices = np.asarray(counts), np.asarray(indices)
    assert counts.dtype == indices.dtype == np.int32
    rows = []
    for count, row in zip(counts.ravel(), indices.reshape(-1, indices.shape[-1]), strict=True):
        assert (np.diff(row[:count]) > 0).all() and (row >= 0).all()
        rows.append(set(row[:count].tolist()))
    return rows


@settings(max_examples=100)
@given(masks())
def test_a_layout_is_its_mask_and_its_transpose_the_masks(pair):
    blocks, full = pair
    layout = built(blocks, full)
    expected = [set(np.flatnonzero(row)) for row in full.reshape(-1, full.shape[-1])]
    assert named(layout.full_counts, layout.full_indices) == expected
    partial = (blocks & ~full).reshape(-1, full.shape[-1])
    expected = [set(np.flatnonzero(row)) for row in partial]
    assert named(layout.partial_counts, layout.partial_indices) == expected
    np.testing.assert_array_equal(layout.block_mask(), blocks)
    assert layout.kept == blocks.sum() and layout.density == pytest.approx(blocks.mean())
    back = layout.transpose()
    assert back.tile == (5, 3) and back.lengths == layout.lengths[::-1]
    np.testing.assert_array_equal(back.block_mask(), np.swapaxes(blocks, -1, -2))
    np.testing.assert_array_equal(back._mask("full"), np.swapaxes(full, -1, -2))
    named(back.partial_counts, back.partial_indices)
    chex.assert_trees_all_equal(layout, back.transpose())


@settings(max_examples=6)
@given(masks())
def test_traced_layouts_are_the_known_ones(pair):
    blocks, full = pair

    @jax.jit
    def traced(blocks, full):
        layout = built(blocks, full)
        back = layout.transpose()
        return layout, back, layout.block_mask(), back.block_mask(), layout.kept

    layout, back, mask, back_mask, kept = traced(blocks, full)
    known = built(blocks, full)
    assert jax.tree.structure(layout) == jax.tree.structure(known)
    for one, other in ((layout, known), (back, known.transpose())):
        for kind in ("partial", "full"):
            rows = [
                named(getattr(x, f"{kind}_counts"), getattr(x, f"{kind}_indices"))
                for x in (one, other)
            ]
            assert rows[0] == rows[1]
    np.testing.assert_array_equal(mask, blocks)
    np.testing.assert_array_equal(back_mask, np.swapaxes(blocks, -1, -2))
    assert kept == known.kept


def test_known_arrays_stay_known_under_jit():
    blocks = jnp.array([[True, False], [True, True]])
    layout = BlockLayout.from_block_mask(blocks, tile=(8, 8), lengths=(16, 16))
    held = jax.tree.map(jnp.asarray, layout)

    @jax.jit
    def held_under_jit(x):
        again = BlockLayout.from_block_mask(blocks, tile=(8, 8), lengths=(16, 16))
        for layout in (again, held, held.transpose().transpose()):
            assert (layout.block_mask() == np.asarray(blocks)).all()
        return x

    held_under_jit(0)


def test_a_mask_alone_means_full_tiles():
    blocks = np.array([[True, False], [True, True]])
    layout = BlockLayout.from_block_mask(blocks, tile=(8, 8), lengths=(16, 16))
    assert layout.full_counts.tolist() == [1, 2] and layout.partial_counts.tolist() == [0, 0]


def test_selected_indices_are_full_tiles_in_order():
    indices = np.array([[[3, 0], [1, 2], [2, 0]]] * 2)
    make = lambda indices: BlockLayout.from_indices(indices, tile=(4, 4), lengths=(11, 16))  # noqa: E731
    known, traced = make(indices), jax.jit(make)(indices)
    for layout in (known, traced):
        assert layout.full_counts.tolist() == [[2, 2, 2]] * 2
        assert layout.full_indices.tolist() == [[[0, 3], [1, 2], [0, 2]]] * 2
        assert layout.full_indices.dtype == np.int32
        assert layout.kept == 12 and not layout._mask("partial").any()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32"])
def test_indices_of_narrow_integers_are_the_same_tiles(dtype):
    """There are more key tiles than the integers of 8 bits can count."""
    indices = np.array([[3, 0, 99], [1, 2, 7], [2, 0, 2]])
    partial = np.array([[3], [2], [5]])

    def make(indices, partial):
        return BlockLayout.from_indices(indices, tile=(4, 1), lengths=(11, 320), partial=partial)

    narrow = indices.astype(dtype), partial.astype(dtype)
    for layout in (make(*narrow), jax.jit(make)(*narrow)):
        for kind in ("partial", "full"):
            expected = make(indices, partial).block_mask(kind)
            np.testing.assert_array_equal(layout.block_mask(kind), expected)


def test_indices_may_be_fewer_repeated_and_partial():
    indices = np.array([[0, -1, -1], [2, 1, 2], [-1, 3, 0]])
    partial = np.array([[[0], [2], [-1]], [[-1], [-1], [1]]])

    def make(indices, partial):
        return BlockLayout.from_indices(indices, tile=(4, 4), lengths=(11, 16), partial=partial)

    for layout in (make(indices, partial), jax.jit(make)(indices, partial)):
        assert layout.full_counts.tolist() == [[0, 1, 2], [1, 2, 2]]
        assert layout.partial_counts.tolist() == [[1, 1, 0], [0, 0, 1]]
        for head, row, half, expected in (
            (0, 1, "full", [1]),
            (1, 1, "full", [1, 2]),
            (1, 2, "full", [0, 3]),
            (0, 1, "partial", [2]),
        ):
            held = getattr(layout, f"{half}_indices")[head, row]
            assert held[: len(expected)].tolist() == expected
            assert ((held >= 0) & (held < 4)).all()


def test_it_draws_itself():
    layout = (Causal() & SlidingWindow(3, 0)).layout(12, tile=(4, 4))
    assert layout.draw() == "▒▒····\n▒▒▒▒··\n··▒▒▒▒"


def test_a_layout_is_a_pytree_that_transformations_may_fill():
    layout = bigbird(4).layout(64, tile=(8, 8))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(layout)]
    assert paths == [".partial_counts", ".partial_indices", ".full_counts", ".full_indices"]
    shapes = jax.tree.map(lambda x: x.shape, layout)
    assert shapes.partial_counts == (8,) and shapes.lengths == (64, 64)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), layout)
    masks = jax.vmap(BlockLayout.block_mask)(stacked)
    np.testing.assert_array_equal(masks[1], layout.block_mask())
    kept = jax.lax.scan(lambda total, x: (total + x.kept, None), 0, stacked)[0]
    assert kept == 2 * layout.kept
    # Layouts are compared by identity, because arrays have no single truth value.
    assert layout != bigbird(4, seed=1).layout(64, tile=(8, 8))


def test_a_layout_prints_its_counts():
    layout = (Causal() & SlidingWindow(511, 0)).layout(16384, tile=(128, 128))
    text = "BlockLayout(16384 x 16384 tokens in tiles of 128 x 128: 252 partial + 378 full of 16384"
    assert repr(layout) == f"{text} tiles (3.85 %))"
    heads = BlockLayout.from_block_mask(np.ones((2, 3, 4), bool), tile=(8, 4), lengths=(24, 16))
    text = "BlockLayout(24 x 16 tokens in tiles of 8 x 4 for 2 heads: 0 partial + 24 full of 24"
    assert repr(heads) == f"{text} tiles (100 %))"
    seen = []
    jax.jit(lambda x: seen.append(repr(x)))(heads)
    assert seen == ["BlockLayout(24 x 16 tokens in tiles of 8 x 4 for 2 heads, traced)"]
    assert "tokens" in repr(jax.tree.map(lambda x: None, heads))


def direct(partial_counts=(2,), partial_indices=(2, 1), dtype=np.int32, **sizes):
    arrays = np.zeros(partial_counts, dtype), np.zeros(partial_indices, np.int32)
    sizes = {"tile": (4, 4), "lengths": (8, 8)} | sizes
    return BlockLayout(*arrays, np.zeros(2, np.int32), np.zeros((2, 1), np.int32), **sizes)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: direct(dtype=np.int64), "partial_counts must be an int32 array, got int64"),
        (
            lambda: direct((3,)),
            r"partial_counts must have shape \(2,\), for 2 query tiles of 4 in 8",
        ),
        (lambda: direct((2,), (3, 1)), r"partial_indices must have shape \(2,\) and one more axis"),
        (lambda: direct(tile=(4, 0)), r"tile must be a pair .* got \(4, 0\)"),
        (lambda: direct(lengths=8), "lengths must be a pair .* got 8"),
        (
            lambda: BlockLayout.from_block_mask(np.ones((2, 3)), tile=(4, 4), lengths=(8, 12)),
            r"blocks must be bool of shape \(..., 2, 3\) .* got float64",
        ),
        (
            lambda: BlockLayout.from_block_mask(np.ones((2, 3), bool), tile=(4, 4), lengths=(8, 8)),
            r"blocks must be bool of shape \(..., 2, 2\) .* got bool of shape \(2, 3\)",
        ),
        (
            lambda: BlockLayout.from_block_mask(
                np.ones((2, 2, 2), bool), tile=(4, 4), lengths=(8, 8), full=np.ones((2, 2), bool)
            ),
            r"full must have the shape of blocks, \(2, 2, 2\), got \(2, 2\)",
        ),
        (
            lambda: BlockLayout.from_indices(np.zeros((3, 1), int), tile=(4, 4), lengths=(8, 8)),
            r"indices must be integers of shape \(..., 2, k\)",
        ),
        (
            lambda: BlockLayout.from_indices(np.array([[0], [2]]), tile=(4, 4), lengths=(8, 8)),
            "indices must lie in 0 to 1, for 2 key tiles of 4 in 8 tokens, or .* got 0 to 2",
        ),
        (
            lambda: BlockLayout.from_indices(
                np.zeros((2, 2), int), tile=(4, 4), lengths=(8, 8), partial=np.full((2, 1), -2)
            ),
            "partial must lie in 0 to 1, .* got -2 to -2",
        ),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
