"""Steps of the grids of block attention on TPUs: the pairs of tiles that each step visits."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from effattn.interfaces.block_attention import Inputs
from effattn.pallas import visited_tiles
from effattn.pallas.visited_tiles import Walk

# Largest number of entries of the arrays that `at_step` reads: half of the 1 MB of scalar memory.
MOST_SCALARS = 2**17
# Largest number of tiles that a step visits. A step costs some hundreds of cycles besides its work.
_MOST_AT_ONCE = 4
# Largest ratio of copied to visited tiles, where a step visits several.
_MOST_COPIED = 1.25
# Largest block of an array that a step copies, in bytes; a v4 has 16 MB of VMEM.
_MOST_BYTES = 2**20


class Grid(NamedTuple):
    """The grid of a kernel.

    Attributes:
      axes: its axes after the example and the head.
      shapes: the shapes of the arrays that `at_step` reads. In scalar memory these arrays have one
        axis, as each row of an array of more axes would take 128 entries.
      at_once: number of tiles, of keys or, in the gradients of keys and values, of queries, that
        are copied together; a step visits some of them.
      visited: number of pairs of tiles that an example and a head of the grid visits; an upper
        bound if it is not known.
    """

    axes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    at_once: int
    visited: int

    @property
    def rank(self) -> int:
        """Number of axes."""
        return 2 + len(self.axes)


def grid_of(plan, arrays, x, *, of_keys) -> tuple[Grid, tuple[jax.Array, ...]]:
    """Returns the grid, and the arrays that `at_step` reads."""
    order = _order(plan, arrays, x, of_keys)
    if order is not None:
        scalars, at_once, visited = order
        return Grid((len(scalars[0]),), (), at_once, visited), tuple(map(jnp.asarray, scalars))
    found = visited_tiles.walk_arrays(plan, arrays, x, of_keys=of_keys)
    tiles = (plan.grid[1], plan.group) if of_keys else (plan.grid[0],)
    axes = *tiles, _most_steps(plan, x, of_keys=of_keys)
    shapes = tuple(array.shape for array in found)
    # If attention is causal, about half of the steps visit nothing.
    visited = math.prod(axes) // (2 if plan.config.right == 0 else 1)
    return Grid(axes, shapes, 1, visited), tuple(map(jnp.ravel, found))


def refusal(x: Inputs, tile: tuple[int, int]) -> str | None:
    """Reason why scalar memory does not hold the arrays that `at_step` reads, or None."""
    if x.layout is not None:
        layouts = x.layout, visited_tiles.layout_of(x, of_keys=True)
        entries = sum(array.size for array in jax.tree.leaves(layouts))
        if entries > MOST_SCALARS:
            return f"takes layouts of up to {MOST_SCALARS} counts and indices, got {entries}"
        return None
    examples, lengths = math.prod(x.query.shape[:-3]), (x.query.shape[-3], x.key.shape[-3])
    tiles = max(map(pl.cdiv, lengths, tile))
    if 4 * examples * tiles > MOST_SCALARS:
        of_examples = x.segments, x.key_mask, x.positions
        has_offsets = x.offset is not None and x.offset.ndim > 0
        if has_offsets or any(array is not None for array in of_examples):
            return (
                "takes packed or padded batches, and batches with offsets, of up to "
                f"{MOST_SCALARS // 4} tiles of {tile[0]} queries or {tile[1]} keys, got "
                f"{examples} examples of {tiles} tiles"
            )
    return None


# Bits of an entry of an order. From the bit `_PARTS` on are the four numbers of `Parts`, of
# `_BITS` bits each; above them is the query head of the key head.
_FIRST, _LAST, _PARTS, _BITS, _HEAD = 1, 2, 2, 3, 14


def _order(plan, arrays, x, of_keys):
    """Returns all steps in order, the tiles that are copied together, and the visited pairs.

    The steps are three int32 arrays with an entry for each step: the tile of the results ("own"),
    the number of the copied tiles ("other"), and bits. A tile of the results that visits none has
    one step. None: the visited tiles are not known when the program is traced, or they are too
    many.
    """
    ranges = visited_tiles.known_ranges(plan, arrays, x, of_keys=of_keys)
    if ranges is None:
        return None
    heads = plan.group if of_keys else 1
    is_dense = arrays.bias is not None or arrays.mask is not None
    at_once = 1 if is_dense else _at_once(plan, arrays, ranges, of_keys)
    starts, ends = ranges[:, 0] // at_once, -(-ranges[:, 1] // at_once)
    counts = np.where(ranges[:, 1] > ranges[:, 0], ends - starts, 1)
    if 3 * heads * counts.sum() > MOST_SCALARS:
        return None
    owns, others, bits = [], [], []
    for own, (low, high, first, stop) in enumerate(ranges.tolist()):
        copied = range(low // at_once, -(-high // at_once)) if high > low else ()
        of_row = []
        for number in copied:
            # Bounds of all visited tiles and of those without a mask, among the copied ones.
            bounds = np.clip((low, first, stop, high), 0, (number + 1) * at_once) - number * at_once
            places = np.maximum(bounds, 0) << (_PARTS + _BITS * np.arange(4))
            of_row.append(int(np.bitwise_or.reduce(places)))
        of_heads = np.tile(of_row or [0], heads)
        of_heads |= np.repeat(np.arange(heads) << _HEAD, len(of_row) or 1)
        of_heads[0] |= _FIRST
        of_heads[-1] |= _LAST
        owns += [own] * len(of_heads)
        others += [*copied] * heads or [0] * heads
        bits.append(of_heads)
    scalars = tuple(np.asarray(each, np.int32) for each in (owns, others, np.concatenate(bits)))
    visited = int((ranges[:, 1] - ranges[:, 0]).sum()) * heads
    return scalars, at_once, visited


def _at_once(plan, arrays, ranges, of_keys) -> int:
    """Returns the number of tiles to copy together.

    With more tiles there are fewer steps, and more tiles are copied but not visited.
    """
    low, high = ranges[:, 0], ranges[:, 1]
    visited = (high - low).sum()
    each = plan.tile[0 if of_keys else 1] * max(plan.sizes) * arrays.query.dtype.itemsize
    at_once = _MOST_AT_ONCE
    while at_once > 1:
        copied = np.where(high > low, -(-high // at_once) - low // at_once, 0).sum() * at_once
        if 0 < copied <= _MOST_COPIED * visited and at_once * each <= _MOST_BYTES:
            break
        at_once //= 2
    return at_once


def _most_steps(plan, x, *, of_keys):
    """Returns an upper bound on the number of tiles that a tile visits."""
    tiles, own = (plan.grid[0], plan.tile[1]) if of_keys else (plan.grid[1], plan.tile[0])
    config = plan.config
    layout = visited_tiles.layout_of(x, of_keys=of_keys)
    if layout is not None:
        listed = layout.partial_indices.shape[-1] + layout.full_indices.shape[-1]
        return max(1, listed * layout.tile[1] // plan.tile[0 if of_keys else 1])
    if config.left is not None and config.right is not None and x.positions is None:
        # A window overlaps few tiles; gathered tokens have arbitrary positions, so no such bound.
        other = plan.tile[0 if of_keys else 1]
        tiles = min(tiles, -(-(config.left + config.right + own) // other) + 1)
    return tiles


class Parts(NamedTuple):
    """Tiles that a step visits, counted from the first tile that is copied.

    Attributes:
      low: first visited tile.
      first, stop: first visited tile that needs no mask, and one past the last of these.
      high: one past the last visited tile.
    """

    low: Any
    first: Any
    stop: Any
    high: Any

    @property
    def masked(self) -> tuple[Any, Any]:
        """Number of tiles that need a mask, and the function from their ranks to the tiles."""
        before = self.first - self.low
        count = before + self.high - self.stop
        return count, lambda rank: rank + jnp.where(rank < before, self.low, self.stop - before)


class Step(NamedTuple):
    """A step of a grid.

    Attributes:
      b, h: example and query head.
      n, m: query tile and key tile; one of them is the number of a group of tiles if several are
        copied.
      parts: the tiles that the step visits; None if it copies one tile.
      visited: whether the step visits any; extra steps repeat the last pair.
      masked: whether some pairs of tokens may not attend.
      first, last: whether the step is the first or the last of the results' tile.
    """

    b: Any
    h: Any
    n: Any
    m: Any
    parts: Parts | None
    visited: Any
    masked: Any
    first: Any
    last: Any


class _Entries(NamedTuple):
    """An array in scalar memory, and its shape."""

    array: Any
    shape: tuple[int, ...]

    def at(self, *index):
        """The entry at an index."""
        place: Any = 0
        for size, n in zip(self.shape, index, strict=True):
            place = place * np.int32(size) + n
        return self.array[place]


def at_step(plan, of_keys, grid: Grid, *indices_and_scalars) -> Step:
    """Returns the step at indices of the grid, of which the first two are example and head.

    The arrays in scalar memory follow the indices.
    """
    axes = grid.rank
    (b, head, own, *rest), (_, *walk) = indices_and_scalars[:axes], indices_and_scalars[axes:]
    if not rest:
        return _known_step(plan, of_keys, grid, b, head, own, walk)
    *group, step = rest
    key_head = head if of_keys else lax.div(head, np.int32(plan.group))

    entries = tuple(map(_Entries, walk, grid.shapes))
    row: Walk = visited_tiles.walk(plan, _Entries.at, entries, b, key_head, own, of_keys=of_keys)
    total = row.masked + row.whole
    at = jnp.minimum(step, jnp.maximum(total, 1) - 1)
    masked = at < row.masked
    other = jnp.where(masked, row.masked_tile(_within(at, row.masked)), 0)
    other = jnp.where(masked, other, row.whole_tile(_within(at - row.masked, row.whole)))
    # A row without visited tiles still needs a valid index.
    other = jnp.clip(other, 0, plan.grid[0 if of_keys else 1] - 1)
    first, last = step == 0, step == pl.num_programs(axes - 1) - 1
    if of_keys:
        head = head * plan.group + group[0]
        first, last = first & (group[0] == 0), last & (group[0] == plan.group - 1)
    n, m = (other, own) if of_keys else (own, other)
    return Step(b, head, n, m, None, step < total, masked, first, last)


def _known_step(plan, of_keys, grid, b, head, step, order):
    own, other, bits = (array[step] for array in order)

    def has(bit):
        return lax.bitwise_and(bits, np.int32(bit)) != 0

    def part(number):
        above = lax.shift_right_logical(bits, np.int32(_PARTS + _BITS * number))
        return lax.bitwise_and(above, np.int32(2**_BITS - 1))

    n, m = (other, own) if of_keys else (own, other)
    if of_keys:
        head = head * plan.group + lax.shift_right_logical(bits, np.int32(_HEAD))
    parts = Parts(*map(part, range(4)))
    visited, masked = parts.high > parts.low, parts.stop == parts.first
    several = parts if grid.at_once > 1 else None
    return Step(b, head, n, m, several, visited, masked, has(_FIRST), has(_LAST))


def _within(at, count):
    return jnp.clip(at, 0, jnp.maximum(count, 1) - 1)
