"""Tile sizes of block attention in XLA."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from effattn.patterns.layouts import BlockLayout

# Most tiles that a sparse pattern is cut into: a pattern with a full row stores 4 bytes per tile.
_MOST_TILES = 2**23


def known_product(sizes: Iterable[Any]) -> int:
    """Product of batch sizes; sizes that an exported program leaves open count as 1."""
    return math.prod(size for size in sizes if isinstance(size, int))


def is_open(*lengths: Any) -> bool:
    """True if an exported program leaves one of the lengths open."""
    return not all(isinstance(length, int) for length in lengths)


def choose_tile(
    lengths: tuple[int, int],
    rows: int,
    left: int | None,
    right: int | None,
    *,
    backward: bool = False,
    smallest: int = 64,
) -> tuple[int, int]:
    """Tile size (queries, keys), for `rows` = batch x heads computed together.

    Larger tiles make faster matrix products, as long as the logits of a tile (`rows` x queries x
    keys) fit in the cache. Tiles divide the lengths evenly, so that the last tile overlaps little
    with the previous one.
    """
    on_cpu = jax.default_backend() == "cpu"
    budget, largest = (2**20, 512) if on_cpu else (2**26, 1024)
    side = largest
    while side > smallest and rows * side * side > budget:
        side //= 2
    if left is not None and right is not None:
        # A query tile longer than the window only adds pairs that the window forbids.
        side = min(side, max(64, 2 ** math.ceil(math.log2(left + right + 1))))
    # The backward pass holds two arrays of logits at once.
    key_side = max(smallest, side // 2) if backward else side
    return _even_share(lengths[0], side), _even_share(lengths[1], key_side)


def choose_rows(lengths: tuple[int, int], rows: int) -> int:
    """Queries in a tile with all keys, for `rows` = batch x heads computed together."""
    budget, most = (2**20, 256) if jax.default_backend() == "cpu" else (2**26, 1024)
    side = most
    while side > 8 and rows * side * lengths[1] > budget:
        side //= 2
    return _even_share(lengths[0], side)


def choose_sparse_tile(lengths: tuple[int, int], *, for_kernels: bool = False) -> tuple[int, int]:
    """Tile size (queries, keys) for a sparse pattern; small tiles compute fewer forbidden pairs.

    With `for_kernels` the tile may be longer than the sequence, because device kernels have fixed
    tile sizes. The tile grows for long sequences: all query tiles store equally long lists of key
    tiles, so one query tile that sees all keys makes the layout quadratic in the number of tiles.
    """
    queries, keys = (128, 128) if for_kernels else (128, 64)
    while math.ceil(lengths[0] / queries) * math.ceil(lengths[1] / keys) > _MOST_TILES:
        queries, keys = 2 * queries, 2 * keys
    if for_kernels:
        return queries, keys
    return min(queries, lengths[0]), min(keys, lengths[1])


def choose_width(layout: BlockLayout, rows: int) -> int:
    """Number of key tiles of a layout to read in one step, for `rows` = batch x heads.

    Wider steps make larger matrix products, but compute more unused slots.
    """
    listed = layout.partial_indices.shape[-1] + layout.full_indices.shape[-1]
    widest = max(1, min(listed, 16, 2**20 // (rows * math.prod(layout.tile))))
    counts = (layout.partial_counts, layout.full_counts)
    if any(isinstance(array, jax.core.Tracer) for array in counts):
        return widest
    tiles = np.asarray(counts[0]) + np.asarray(counts[1])
    widths = np.arange(1, widest + 1)
    # The overhead of a step is about the cost of one tile.
    costs = [(-(-tiles // width)).sum() * (width + 1) for width in widths]
    return int(widths[np.argmin(costs)])


def _even_share(length: int, side: int) -> int:
    """Length of a piece if `length` is cut into ceil(length / side) pieces.

    It is rounded up to a multiple of 8, and at most `length`.
    """
    pieces = max(1, math.ceil(length / side))
    share = math.ceil(length / pieces)
    return min(length, 8 * math.ceil(share / 8))
