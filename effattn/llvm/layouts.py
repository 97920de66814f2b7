"""Block-sparse layouts in the form that the CPU kernels read: lists of tiles and bit masks.

The layout of a call may have tiles of any size. Its pairs are sorted into tiles of `TILE` queries
and `TILE` keys, and query tiles are taken together in groups. Each step of a group has one tile of
keys, and says for each query tile of the group whether it skips that tile, reads all of it, or
which bit mask it applies. Equal masks are stored once, so a window has a few masks at any length.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from effattn.llvm.tiles import TILE, WORDS
from effattn.patterns.layouts import BlockLayout

# Entries of a query tile in a step; other entries are numbers of masks.
WHOLE, SKIPPED = -1, -2

_NOTHING, _PARTIAL, _FULL = range(3)  # kinds of cells
_AT_ONCE = 512  # tiles whose pairs are in memory at a time


class Steps(NamedTuple):
    """Steps of all groups of all rows: one row for all heads, for each key head, or for each head.

    Attributes:
      starts: int32 `(rows, groups + 1)`, the first step of each group, and one past the last step.
      steps: int32 `(steps, 1 + G)`: the tile of keys; for each query tile of the group `SKIPPED`,
        `WHOLE`, or the number of its mask.
      masks: int32 `(masks, WORDS)`: bit n % 32 of word 2 j + n // 32 says whether query n of the
        tile may attend to key j.
    """

    starts: np.ndarray
    steps: np.ndarray
    masks: np.ndarray


def steps_of(layout: BlockLayout, pattern: Any, offset: int, group: int) -> Steps:
    """Returns the steps of groups of G = `group` query tiles.

    Args:
      layout: a layout of NumPy arrays, with leading axes `()` or `(K,)`.
      pattern: `pattern.allows(i, j, h)` is the rule of partial tiles; None allows all pairs.
      offset: position of the first query.
      group: G.
    """
    queries, keys = (-(-length // TILE) for length in layout.lengths)
    layout_count = layout.partial_counts.size // layout.grid[0]
    rows = getattr(pattern, "heads", None) or layout_count
    masks = dict[bytes, int]()
    starts, steps = [], [np.zeros((0, 1 + group), np.int32)]
    for head in range(rows):
        listed = _listed(layout, head * layout_count // rows)
        row, column = _overlapping(layout, listed[0])
        number = _numbers(layout, pattern, offset, head, listed, (row, column), masks)
        kept = number != SKIPPED
        row, column, number = row[kept], column[kept], number[kept]
        codes, step = np.unique(row // group * keys + column, return_inverse=True)
        of_head = np.full((len(codes), 1 + group), SKIPPED, np.int32)
        of_head[:, 0] = codes % keys
        of_head[step, 1 + row % group] = number
        first = np.searchsorted(codes, np.arange(-(-queries // group) + 1) * keys)
        starts.append(first + sum(map(len, steps)))
        steps.append(of_head)
    words = np.array([np.frombuffer(mask, "<i4") for mask in masks], np.int32)
    return Steps(np.array(starts, np.int32), np.concatenate(steps), words.reshape(-1, WORDS))


def _numbers(layout, pattern, offset, head, listed, tiles, masks):
    """The entry of each tile: `SKIPPED`, `WHOLE`, or the number of its mask in `masks`."""
    number = np.full(len(tiles[0]), WHOLE)
    for start in range(0, len(number), _AT_ONCE):
        row, column = (x[start : start + _AT_ONCE] for x in tiles)
        kinds = _kinds(layout, listed, row, column)
        mixed = (kinds != _FULL).any((1, 2))
        row, column, kinds = (x[mixed] for x in (row, column, kinds))
        allowed = _pairs(layout, pattern, offset, head, row, column, kinds)
        bits = np.packbits(np.swapaxes(allowed, 1, 2), axis=-1, bitorder="little")
        is_any, is_all = allowed.any((1, 2)), allowed.all((1, 2))
        places = start + np.flatnonzero(mixed)
        for place, any_pair, all_pairs, mask in zip(places, is_any, is_all, bits, strict=True):
            if not any_pair:
                number[place] = SKIPPED
            elif not all_pairs:
                number[place] = masks.setdefault(mask.tobytes(), len(masks))
    return number


def _listed(layout, head):
    """The tiles of a head, in order: row times columns plus column, and the kind of each."""
    rows, columns = layout.grid
    codes, kinds = [], []
    for kind, name in ((_PARTIAL, "partial"), (_FULL, "full")):
        row, column = layout.tiles(name)
        mine = row // rows == head
        codes.append(row[mine] % rows * columns + column[mine])
        kinds.append(np.full(len(codes[-1]), kind))
    order = np.argsort(np.concatenate(codes))
    return np.concatenate(codes)[order], np.concatenate(kinds)[order]


def _kinds(layout, listed, row, column):
    """Kinds of the cells of tiles, `(n, cells of queries, cells of keys)`.

    The sides of a cell are the greatest common divisors of `TILE` and the sides of the layout's
    tiles, so each cell is in one tile of the layout. Cells past the ends are those of the last
    tokens.
    """
    codes, kinds = listed
    i, j = (
        np.minimum(number[:, None] * TILE + np.arange(0, TILE, math.gcd(TILE, side)), length - 1)
        // side
        for number, side, length in zip((row, column), layout.tile, layout.lengths, strict=True)
    )
    wanted = i[:, :, None] * layout.grid[1] + j[:, None]
    place = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
    return np.where(codes[place] == wanted, kinds[place], _NOTHING)


def _overlapping(layout, codes):
    """The distinct tiles of the kernels, in order, that overlap tiles of the layout."""
    row, column = np.divmod(codes, layout.grid[1])
    found: list[np.ndarray] = []
    for number, side, length in zip((row, column), layout.tile, layout.lengths, strict=True):
        first = number * side // TILE
        found += [first, (np.minimum((number + 1) * side, length) - 1) // TILE - first + 1]
    top, height, left, width = found
    count = height * width
    place = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
    top, left, width = (np.repeat(x, count) for x in (top, left, width))
    across = -(-layout.lengths[1] // TILE)
    return np.divmod(np.unique((top + place // width) * across + left + place % width), across)


def _pairs(layout, pattern, offset, head, row, column, kinds):
    """Pairs of tiles that may attend, bool `(n, TILE, TILE)`.

    Pairs past the ends are those of the last tokens.
    """
    for axis in (1, 2):
        kinds = np.repeat(kinds, TILE // kinds.shape[axis], axis)
    if pattern is None:
        return kinds != _NOTHING
    i, j = (
        np.minimum(number[:, None] * TILE + np.arange(TILE), length - 1)
        for number, length in zip((row, column), layout.lengths, strict=True)
    )
    by_rule = np.asarray(pattern.allows(i[:, :, None] + offset, j[:, None], head))
    return (kinds == _FULL) | ((kinds == _PARTIAL) & by_rule)
