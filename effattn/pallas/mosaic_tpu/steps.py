"""Steps of the grids of block attention on TPUs: the pair of tiles that each step visits."""

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


class Grid(NamedTuple):
    """The grid of a kernel.

    Attributes:
      axes: its axes after the example and the head.
      shapes: the shapes of the arrays that `at_step` reads. In scalar memory these arrays have one
        axis, as each row of an array of more axes would take 128 entries.
    """

    axes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def rank(self) -> int:
        """Number of axes."""
        return 2 + len(self.axes)


def grid_of(plan, arrays, x, *, of_keys) -> tuple[Grid, tuple[jax.Array, ...]]:
    """Returns the grid, and the arrays that `at_step` reads."""
    order = _order(plan, arrays, x, of_keys)
    if order is not None:
        return Grid((len(order[0]),), ()), tuple(map(jnp.asarray, order))
    found = visited_tiles.walk_arrays(plan, arrays, x, of_keys=of_keys)
    tiles = (plan.grid[1], plan.group) if of_keys else (plan.grid[0],)
    axes = *tiles, _most_steps(plan, x, of_keys=of_keys)
    return Grid(axes, tuple(array.shape for array in found)), tuple(map(jnp.ravel, found))


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


# Bits of an entry of an order; the bits above them are the query head of the key head.
_VISITED, _MASKED, _FIRST, _LAST, _HEAD = 1, 2, 4, 8, 4


def _order(plan, arrays, x, of_keys):
    """Returns all steps in order: three int32 arrays with an entry for each step, or None.

    The arrays have the tile of the results ("own"), the tile that the step visits ("other"), and
    bits. A tile of the results that visits none has one step. None: the visited tiles are not known
    when the program is traced, or they are too many.
    """
    ranges = visited_tiles.known_ranges(plan, arrays, x, of_keys=of_keys)
    heads = plan.group if of_keys else 1
    if ranges is None:
        return None
    counts = np.maximum(ranges[:, 1] - ranges[:, 0], 1) * heads
    if 3 * counts.sum() > MOST_SCALARS:
        return None
    others, bits = [], []
    for low, high, first, stop in ranges.tolist():
        masked = [*range(low, first), *range(stop, high)]
        visited = [_VISITED | _MASKED] * len(masked) + [_VISITED] * (stop - first)
        tiles = [*masked, *range(first, stop)] or [0]
        others += tiles * heads
        of_row = np.tile(visited or [0], heads)
        of_row |= np.repeat(np.arange(heads) << _HEAD, len(tiles))
        of_row[0] |= _FIRST
        of_row[-1] |= _LAST
        bits.append(of_row)
    own = np.repeat(np.arange(len(ranges)), counts)
    return own.astype(np.int32), np.array(others, np.int32), np.concatenate(bits).astype(np.int32)


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


class Step(NamedTuple):
    """A step of a grid.

    Attributes:
      b, h, n, m: example, query head, query tile and key tile.
      visited: whether the step visits this pair of tiles; extra steps repeat the last pair.
      masked: whether some pairs of tokens in it may not attend.
      first, last: whether the step is the first or the last of the results' tile.
    """

    b: Any
    h: Any
    n: Any
    m: Any
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
        return _known_step(plan, of_keys, b, head, own, walk)
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
    return Step(b, head, n, m, step < total, masked, first, last)


def _known_step(plan, of_keys, b, head, step, order):
    own, other, bits = (array[step] for array in order)

    def has(bit):
        return lax.bitwise_and(bits, np.int32(bit)) != 0

    n, m = (other, own) if of_keys else (own, other)
    if of_keys:
        head = head * plan.group + lax.shift_right_logical(bits, np.int32(_HEAD))
    return Step(b, head, n, m, has(_VISITED), has(_MASKED), has(_FIRST), has(_LAST))


def _within(at, count):
    return jnp.clip(at, 0, jnp.maximum(count, 1) - 1)
