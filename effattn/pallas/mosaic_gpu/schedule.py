"""The order in which the blocks of a block-attention kernel start on a Hopper GPU.

In practice, a GPU starts the blocks of a grid of one axis in the order of their index. The next
block starts on the first multiprocessor that is free.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn.pallas.block_tiles import Arrays, Plan

# Bytes that the blocks of a section read. The L2 cache of an H100 has 50 MB, in two halves that
# copy from each other.
_CACHED = 32 * 2**20
# Smallest number of blocks of a section, three for each multiprocessor of an H100. With fewer, the
# short tiles at the end of the last section do not fill the time until its long tiles end.
_LEAST_BLOCKS = 3 * 132


class Schedule(NamedTuple):
    """Blocks of a kernel, in the order in which they start.

    The blocks of a section start with its longest tiles, so that all multiprocessors finish it at
    about the same time. Blocks of one section read arrays that fit in the L2 cache together, if a
    section then has enough blocks.

    Attributes:
      examples: B.
      key_heads: K.
      group: blocks of a key head for one tile.
      tiles: tiles of a key head.
      at_once: number of key heads in a section; heads of different examples count separately. The
        last section may have fewer.
    """

    examples: int
    key_heads: int
    group: int
    tiles: int
    at_once: int

    @classmethod
    def of(cls, examples, key_heads, group, tiles, read_bytes: int) -> "Schedule":
        """Returns the schedule of blocks that read `read_bytes` for all heads together."""
        rows = examples * key_heads
        most = max(1, rows * group * tiles // _LEAST_BLOCKS)
        sections = max(1, min(rows, most, -(-read_bytes // _CACHED)))
        at_once = -(-rows // sections)
        while at_once < rows and ((rows - 1) % at_once + 1) * group * tiles < _LEAST_BLOCKS:
            at_once += 1  # the last section would have too few blocks
        return cls(examples, key_heads, group, tiles, at_once)

    @property
    def size(self) -> int:
        """Number of blocks."""
        return self.examples * self.key_heads * self.group * self.tiles

    def at(self, index) -> tuple[Any, Any, Any, Any]:
        """Returns the example, key head, number in the group, and rank of the tile of a block."""
        # lax.div and lax.rem, as // and % need several more operations for negative numbers.
        rows, at_once, group = self.examples * self.key_heads, self.at_once, np.int32(self.group)
        of_section = np.int32(at_once * self.group * self.tiles)
        first = lax.div(index, of_section) * np.int32(at_once)
        together = jnp.minimum(np.int32(at_once), rows - first) * group
        place = lax.rem(index, of_section)
        inner = lax.rem(place, together)
        row = first + lax.div(inner, group)
        heads = np.int32(self.key_heads)
        example, key_head = lax.div(row, heads), lax.rem(row, heads)
        return example, key_head, lax.rem(inner, group), lax.div(place, together)


def schedule_of(plan: Plan, x: Arrays, rows: Any, *, of_keys: bool) -> Schedule:
    """Returns the schedule; a block reads keys and values or, if `of_keys`, queries and dO."""
    streamed = (x.query, rows.d_out) if of_keys else (x.key, x.value)
    read_bytes = sum(array.size * array.dtype.itemsize for array in streamed)
    if plan.layout_tile is not None:
        # Few blocks may take most of the time, such as those of global tokens. All start first.
        read_bytes = 0
    group, tiles = (1 if of_keys else plan.group), plan.grid[of_keys]
    return Schedule.of(x.query.shape[0], plan.heads[1], group, tiles, read_bytes)
