"""Layouts as the CPU kernels read them: the steps list the pairs of the layout, each once."""

import numpy as np
import pytest

from effattn import patterns
from effattn.llvm import layouts
from effattn.llvm.tiles import TILE
from effattn.patterns.layouts import BlockLayout, KnownLayout


def pairs_of(steps, lengths, group, row=0):
    """The pairs that the steps of a row list, bool `lengths`; no tile may be listed twice."""
    starts = steps.starts[row]
    tiles = [-(-length // TILE) for length in lengths]
    found = np.zeros((tiles[0], tiles[1], TILE, TILE), bool)
    words = steps.masks.astype("<i4").view(np.uint8).reshape(-1, TILE, TILE // 8)
    masks = np.unpackbits(words, axis=-1, bitorder="little").astype(bool)  # (masks, keys, queries)
    for n, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        columns = steps.steps[start:stop, 0]
        assert (np.diff(columns) > 0).all()
        for column, *numbers in steps.steps[start:stop]:
            for place, number in enumerate(numbers):
                row = n * group + place
                if number == layouts.SKIPPED:
                    continue
                assert row < tiles[0]
                found[row, column] = True if number == layouts.WHOLE else masks[number].T
    return np.moveaxis(found, 2, 1).reshape(tiles[0] * TILE, -1)[: lengths[0], : lengths[1]]


def of_blocks(tile, lengths):
    grid = [-(-length // side) for length, side in zip(lengths, tile, strict=True)]
    blocks, full = np.random.default_rng(0).random((2, *grid)) < 0.4
    return BlockLayout.from_block_mask(blocks, full=full & blocks, tile=tile, lengths=lengths)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("offset", [0, 70])
@pytest.mark.parametrize(
    ("tile", "lengths"),
    [
        ((64, 64), (300, 400)),
        ((128, 192), (300, 400)),
        ((16, 32), (130, 90)),
        ((100, 7), (100, 65)),
    ],
)
def test_the_steps_list_the_pairs_of_the_layout(tile, lengths, offset, group):
    layout, rule = of_blocks(tile, lengths), patterns.Custom(lambda i, j: (i + 2 * j) % 3 != 0)
    i, j = np.arange(lengths[0])[:, None], np.arange(lengths[1])
    of_tiles = {
        kind: np.asarray(layout.block_mask(kind))[i // tile[0], j // tile[1]]
        for kind in ("partial", "full")
    }
    for pattern in (None, rule):
        by_rule = True if pattern is None else pattern.allows(i + offset, j)
        steps = layouts.steps_of(layout, pattern, offset, group)
        expected = of_tiles["full"] | (of_tiles["partial"] & by_rule)
        np.testing.assert_array_equal(pairs_of(steps, lengths, group), expected)


def test_a_layout_without_tiles_has_no_steps():
    none = BlockLayout.from_block_mask(np.zeros((2, 3), bool), tile=(64, 64), lengths=(70, 140))
    steps = layouts.steps_of(none, None, 0, 2)
    assert steps.starts.tolist() == [[0, 0]]
    assert not pairs_of(steps, (70, 140), 2).any()


def test_heads_may_have_layouts_and_rules_of_their_own():
    by_head = patterns.BlockMask(np.random.default_rng(1).random((4, 20, 20)) < 0.2, 10)
    i, j = np.arange(200)[:, None], np.arange(200)
    layout = by_head.layout(200, tile=(64, 32), key_heads=2)
    steps = layouts.steps_of(layout, by_head, 0, 2)
    for head in range(4):
        np.testing.assert_array_equal(
            pairs_of(steps, (200, 200), 2, head), by_head.allows(i, j, head)
        )
    of_keys = patterns.SlidingWindow(30, 0)
    layout = BlockLayout.from_indices(
        np.array([[[0], [1]], [[1], [0]]]), tile=(64, 64), lengths=(128, 128)
    )
    steps = layouts.steps_of(layout, of_keys, 0, 2)
    for head in range(2):
        expected = np.asarray(layout.block_mask())[head][i[:128] // 64, j[:128] // 64]
        np.testing.assert_array_equal(pairs_of(steps, (128, 128), 2, head), expected)


def test_equal_masks_are_stored_once():
    window = patterns.Causal() & patterns.SlidingWindow(100, 0)
    layout = window.layout(4096, tile=(128, 64))
    steps = layouts.steps_of(layout, window, 0, 4)
    assert len(steps.masks) == 3  # the diagonal, and the two tiles where the window begins
    whole = (steps.steps[:, 1:] == layouts.WHOLE).sum()
    assert whole == 0 and (steps.steps[:, 1:] >= 0).sum() == 64 + 63 + 62


def test_layouts_of_the_same_tiles_are_equal_as_static_arguments():
    one, other = (KnownLayout(of_blocks((64, 64), (300, 400))) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != KnownLayout(of_blocks((64, 64), (300, 401)))
    assert one != KnownLayout(of_blocks((64, 32), (300, 400)))
