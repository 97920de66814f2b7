"""Tile sizes of block attention in XLA."""

import pytest

from effattn.xla.tiling import choose_tile


@pytest.mark.parametrize("rows", [1, 4, 64, 512])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 8192), (100, 3000), (520, 777), (8192, 8192)])
def test_the_tile_fits_the_lengths_and_the_budget(rows, lengths):
    tile = choose_tile(lengths, rows, None, None)
    assert all(1 <= side <= length for side, length in zip(tile, lengths, strict=True))
    smallest = 64 * 64
    assert rows * tile[0] * tile[1] <= max(2**20, rows * smallest)


@pytest.mark.parametrize("length", [65, 513, 520, 1000, 1025, 3000, 5001])
def test_tiles_share_a_length_evenly(length):
    tile, _ = choose_tile((length, length), 4, None, 0)
    tiles = -(-length // tile)
    # The last tile overlaps the tile before it by less than eight tokens for each tile.
    assert tiles * tile - length < 8 * tiles
    assert tiles == -(-length // 512)


def test_a_narrow_window_has_narrow_tiles():
    assert choose_tile((4096, 4096), 4, 100, 0) == (128, 128)
    assert choose_tile((4096, 4096), 4, 3, 3) == (64, 64)
    assert choose_tile((4096, 4096), 4, 5000, 0) == choose_tile((4096, 4096), 4, None, None)
