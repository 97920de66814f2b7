"""Tiles that the programs of the block-attention kernels visit, and lists of them.

A program of a kernel holds one tile of queries and walks over tiles of keys. In the gradients of
keys and values, a program holds one tile of keys and walks over tiles of queries. The list of
visited tiles is computed before the kernel starts:

- Without a block-sparse layout, the list is a range for each tile. Causality, a window, lengths and
  packed documents leave one range of tiles. Within this range, the tiles that need no mask form one
  run, and the tiles before and after the run need a mask.
- With a block-sparse layout, the layout lists the tiles.

NumPy computes the ranges when the program is traced, if the query offset is static, there are no
ids and no gathered tokens, and there are at most `_MOST_PAIRS` pairs of tiles. Otherwise XLA
computes them. Shapes are those of `effattn.pallas.block_tiles`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn.interfaces.block_attention import NO_KEY, Inputs
from effattn.pallas.block_tiles import Arrays, Plan
from effattn.patterns.layouts import BlockLayout

_MOST_PAIRS = 2**22  # largest number of pairs of tiles that NumPy compares
_MOST_TILES = 2**16 - 1  # CUDA's limit on the second axis of a grid
_AT_ONCE = 128  # rows of tiles that are compared at a time with all tiles of the other side


class Walk(NamedTuple):
    """Tiles that a program visits: masked tiles and whole tiles (tiles that need no mask).

    Attributes:
      masked: number of masked tiles.
      whole: number of whole tiles.
      masked_tile: `(m) -> tile`, the index of the m-th masked tile.
      whole_tile: `(m) -> tile`, the index of the m-th whole tile.
    """

    masked: Any
    whole: Any
    masked_tile: Callable[[Any], Any]
    whole_tile: Callable[[Any], Any]


def layout_of(x: Inputs, *, of_keys: bool) -> BlockLayout | None:
    """Returns the layout of the walk over keys or, if `of_keys`, over queries; None without one."""
    if not of_keys or x.layout is None:
        return x.layout
    return x.layout.transpose() if x.layout_of_keys is None else x.layout_of_keys


def walk_arrays(plan: Plan, arrays: Arrays, x: Inputs, *, of_keys: bool) -> tuple[jax.Array, ...]:
    """Returns the arrays that `walk` reads, for each query tile or, if `of_keys`, each key tile.

    Without a layout: one array `(B or 1, 1, n, 4)` of the first visited tile, one past the last
    visited tile, the first whole tile and one past the last whole tile. With a layout: counts of
    partial tiles, counts of full tiles, indices of partial tiles and indices of full tiles.
    """
    layout = layout_of(x, of_keys=of_keys)
    if layout is None:
        return (_ranges(plan, arrays, of_keys)[:, None],)

    def by_head(array, axes):
        array = jnp.asarray(array)
        lead, rest = array.shape[: array.ndim - axes], array.shape[array.ndim - axes :]
        *batch, heads = lead if lead else (1,)
        if math.prod(batch) not in (1, arrays.query.shape[0]):
            raise AssertionError("a layout must have 1 example or as many as the query")
        return array.reshape(math.prod(batch), heads, *rest)

    none = np.zeros((1, 1, layout.grid[0], 1), np.int32)
    lists = (
        by_head(array, 2) if array.shape[-1] else none
        for array in (layout.partial_indices, layout.full_indices)
    )
    return (by_head(layout.partial_counts, 1), by_head(layout.full_counts, 1), *lists)


def walk(plan: Plan, read: Callable, walk: tuple[Any, ...], b, k, n, *, of_keys: bool) -> Walk:
    """Returns the tiles that tile n of example b and key head k visits.

    `read(array, *index)` reads one entry; it gets index 0 along axes of size 1.
    """

    def entry(array, *index):
        pairs = zip(index, array.shape, strict=True)
        return read(array, *(0 if size == 1 else at for at, size in pairs))

    if len(walk) == 1:
        low, high, first, stop = (entry(walk[0], b, k, n, c) for c in range(4))
        run = stop - first
        return Walk(
            high - low - run,
            run,
            lambda m: jnp.where(low + m < first, low + m, low + m + run),
            lambda m: first + m,
        )
    partial, full, partial_tiles, full_tiles = walk
    # One tile of the layout covers several tiles of the kernel.
    assert plan.layout_tile is not None
    row, column = (
        of_layout // own for of_layout, own in zip(plan.layout_tile, plan.tile, strict=True)
    )
    row, column = (column, row) if of_keys else (row, column)

    def tile(tiles, m):
        # lax.rem, as % needs several more operations to handle negative numbers.
        m, part = lax.div(m, np.int32(column)), lax.rem(m, np.int32(column))
        return entry(tiles, b, k, lax.div(n, np.int32(row)), m) * column + part

    return Walk(
        entry(partial, b, k, lax.div(n, np.int32(row))) * column,
        entry(full, b, k, lax.div(n, np.int32(row))) * column,
        functools.partial(tile, partial_tiles),
        functools.partial(tile, full_tiles),
    )


def kinds_of(layout: BlockLayout) -> jax.Array:
    """Returns int32 `(B or 1, K or 1, nq, nk)`: 0 for skipped, 1 for partial, 2 for full tiles."""
    visited, full = (jnp.asarray(layout.block_mask(kind)) for kind in (None, "full"))
    kinds = visited.astype(jnp.int32) + full
    *batch, heads = kinds.shape[:-2] or (1,)
    return kinds.reshape(math.prod(batch), heads, *kinds.shape[-2:])


def walk_and_order(
    plan: Plan, arrays: Arrays, x: Inputs, *, of_keys: bool
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns the arrays that `walk` reads, and the order in which the tiles of a GPU should start.

    The order is int32 `(B or 1, K or 1, n)`: the tiles sorted by the number of tiles that they
    visit, the largest first. Blocks that start in this order end at about the same time.
    """
    known = known_ranges(plan, arrays, x, of_keys=of_keys)
    if known is not None:
        order = np.argsort(known[:, 0] - known[:, 1], kind="stable").astype(np.int32)
        return (jnp.asarray(known[None, None]),), jnp.asarray(order[None, None])
    walk = walk_arrays(plan, arrays, x, of_keys=of_keys)
    if len(walk) == 1:
        counts = walk[0][..., 1] - walk[0][..., 0]
    else:
        assert plan.layout_tile is not None
        rows = jnp.arange(plan.grid[of_keys]) // (plan.layout_tile[of_keys] // plan.tile[of_keys])
        counts = (walk[0] + walk[1])[..., rows]
    return walk, jnp.argsort(-counts, axis=-1, stable=True).astype(jnp.int32)


def refusal_of_grid(x: Inputs, query_tile: int, key_tile: int) -> str | None:
    """Returns the reason why a CUDA grid with tiles on its second axis is too small, or None."""
    lengths = x.query.shape[-3], x.key.shape[-3]
    tiles = max(-(-n // size) for n, size in zip(lengths, (query_tile, key_tile), strict=True))
    if tiles > _MOST_TILES:
        return f"takes up to {_MOST_TILES} tiles of queries or of keys, got {tiles}"
    return None


class _Ids(NamedTuple):
    """Smallest and largest id of the tokens of each tile, `(B or 1, n)`.

    Attributes:
      all: smallest and largest id among all tokens.
      of_documents: smallest and largest id among the tokens that are not padding.
    """

    all: tuple[Any, Any]
    of_documents: tuple[Any, Any]


class _Side(NamedTuple):
    """Bounds of each query tile, or of each key tile, `(B or 1, n)`.

    Attributes:
      positions: smallest and largest position of the tokens.
      ids: bounds of the ids of the tokens; None without ids.
      ends: true for the last tile, if that tile reaches past the length.
    """

    positions: tuple[Any, Any]
    ids: _Ids | None
    ends: Any


def _ranges(plan, x, of_keys):
    """Returns int32 ranges `(B or 1, n, 4)`; O(nq nk) comparisons, `_AT_ONCE` rows at a time."""
    sides = _sides(plan, x)
    own, other = sides[::-1] if of_keys else sides

    def of_tile(tile):
        tile = jax.tree.map(lambda a: a[..., None], tile)
        return _range(plan, x, *((other, tile) if of_keys else (tile, other)))

    rows = jax.tree.map(lambda a: jnp.moveaxis(a, -1, 0), own)
    return jnp.moveaxis(lax.map(of_tile, rows, batch_size=_AT_ONCE), 0, 1)


def known_ranges(plan: Plan, arrays: Arrays, x: Inputs, *, of_keys: bool) -> np.ndarray | None:
    """Returns the ranges of `walk_arrays`, int32 `(n, 4)`, if they are known now, else None.

    They are known if the query offset is static, there is no layout, there are no ids and no
    gathered tokens, and there are few enough pairs of tiles to compare them all now.
    """
    offset = plan.config.offset
    if math.prod(plan.grid) > _MOST_PAIRS:
        return None
    unknown = arrays.query_ids, arrays.key_ids, arrays.query_positions, arrays.key_positions
    if layout_of(x, of_keys=of_keys) is not None or offset is None:
        return None
    if any(array is not None for array in unknown):
        return None
    sides = []
    for length, size, start in zip(plan.lengths, plan.tile, (offset, 0), strict=True):
        first = np.arange(0, length, size)
        positions = start + first, start + np.minimum(first + size, length) - 1
        sides.append(_Side(positions, None, (first + size > length)))
    own, other = sides[::-1] if of_keys else sides
    own = jax.tree.map(lambda a: a[:, None], own)
    of_query, of_key = (other, own) if of_keys else (own, other)
    return _range(plan, arrays, of_query, of_key, np)


def _range(plan, x, of_query: _Side, of_key: _Side, xp: Any = jnp):
    """Returns the four numbers of a tile's range; one side has that tile, the other all tiles.

    `xp` is NumPy for bounds in NumPy, else `jax.numpy`.
    """
    config = plan.config
    (first_i, last_i), (first_j, last_j) = of_query.positions, of_key.positions
    possible = (last_i >= first_i) & (last_j >= first_j)
    whole = possible & ~of_key.ends & (x.mask is None and config.pattern is None)
    if config.right is not None:
        possible &= first_j <= last_i + config.right
        whole &= last_j <= first_i + config.right
    if config.left is not None:
        possible &= last_j >= first_i - config.left
        whole &= first_j >= last_i - config.left
    if of_query.ids is not None and of_key.ids is not None:
        (low_i, high_i), (low_j, high_j) = of_query.ids.all, of_key.ids.all
        whole &= (low_i == high_i) & (low_j == high_j) & (low_i == low_j)
        # These bounds exclude padding, whose id is outside the ascending order of document ids.
        (low_i, high_i), (low_j, high_j) = of_query.ids.of_documents, of_key.ids.of_documents
        possible &= (low_j <= high_i) & (high_j >= low_i)
    whole &= possible
    tiles = possible.shape[-1]
    index = xp.arange(tiles, dtype=np.int32)
    low = xp.min(xp.where(possible, index, tiles), -1)
    high = xp.max(xp.where(possible, index + 1, 0), -1)
    first = xp.min(xp.where(whole, index, tiles), -1)
    past = xp.where(~whole & (index > first[..., None]), index, tiles)
    stop = xp.where(first < tiles, xp.min(past, -1), tiles)
    found = (
        xp.minimum(low, high),
        high,
        xp.minimum(first, high),
        xp.minimum(stop, high),
    )
    return xp.stack(found, -1).astype(np.int32)


def _sides(plan, x) -> tuple[_Side, _Side]:
    ids = x.query_ids
    if x.key_ids is not None and ids is None:
        ids = jnp.ones((1, plan.lengths[0]), jnp.int32)
    sides = []
    for axis, (positions, ids_of_axis, absent) in enumerate(
        zip(_positions(plan, x), (ids, x.key_ids), (0, NO_KEY), strict=True)
    ):
        size, tiles = plan.tile[axis], plan.grid[axis]
        ids_of_tiles = None
        if ids_of_axis is not None:
            extents = _extents(ids_of_axis, size), _extents(ids_of_axis, size, absent)
            ids_of_tiles = _Ids(*extents)
        ends = (jnp.arange(tiles) == tiles - 1) & (plan.lengths[axis] % size != 0)
        sides.append(_Side(positions, ids_of_tiles, ends[None]))
    return sides[0], sides[1]


def _positions(plan, x):
    """Yields the first and last positions `(B or 1, n)` of query tiles, then of key tiles."""
    for positions, length, size, start in (
        (x.query_positions, plan.lengths[0], plan.tile[0], x.offset[:, None]),
        (x.key_positions, plan.lengths[1], plan.tile[1], jnp.zeros((1, 1), jnp.int32)),
    ):
        if positions is not None:
            yield _extents(positions, size)
        else:
            first = jnp.arange(0, length, size, dtype=jnp.int32)
            yield start + first, start + jnp.minimum(first + size, length) - 1


def _extents(array, size, absent=None):
    """Returns minimum and maximum of each tile of `(B, L)`, skipping entries equal to `absent`."""
    widths = [(0, 0), (0, -array.shape[1] % size)]
    tiles = jnp.pad(array, widths, mode="edge").reshape(len(array), -1, size)
    limits = np.iinfo(np.int32)
    low, high = (
        (tiles, tiles)
        if absent is None
        else (jnp.where(tiles == absent, m, tiles) for m in (limits.max, limits.min))
    )
    return low.min(-1), high.max(-1)
