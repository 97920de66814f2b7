"""Which tiles block attention visits, and how large they are."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# A window whose keys, with a tile of queries, number no more than this is read as one slice.
_WIDEST_BAND = 1024


class BlockLayout(NamedTuple):
    """The key tiles that each tile of queries visits, the same for all heads and examples.

    Attributes:
      counts: int32 `(query tiles,)`.
      indices: int32 `(query tiles, most key tiles)`; row n holds counts[n] distinct key tiles first.
    """

    counts: jax.Array
    indices: jax.Array

    @classmethod
    def from_block_mask(cls, blocks: jax.Array) -> "BlockLayout":
        """From bool `(query tiles, key tiles)`, True where a tile is to be visited."""
        blocks = jnp.asarray(blocks)
        indices = jnp.argsort(~blocks, axis=-1, stable=True)
        return cls(blocks.sum(-1, dtype=jnp.int32), indices.astype(jnp.int32))


def choose_tile(
    lengths: tuple[int, int], rows: int, left: int | None, right: int | None
) -> tuple[int, int]:
    """Queries and keys of a tile, for `rows` = batch x heads computed together.

    The logits of a tile, `rows` x queries x keys, are what must stay near the processor: larger
    products run nearer the peak until the logits fall out of its cache. Tiles divide the lengths
    evenly, so that the last one is not mostly overlap.
    """
    on_cpu = jax.default_backend() == "cpu"
    budget, largest = (2**20, 512) if on_cpu else (2**26, 1024)
    side = largest
    while side > 64 and rows * side * side > budget:
        side //= 2
    if left is not None and right is not None:
        # Queries beyond the window's own width only add pairs that the window forbids.
        side = min(side, max(64, 2 ** math.ceil(math.log2(left + right + 1))))
    return tuple(_even_share(length, side) for length in lengths)


def _even_share(length: int, side: int) -> int:
    pieces = max(1, math.ceil(length / side))
    share = math.ceil(length / pieces)
    return min(length, 8 * math.ceil(share / 8))


@dataclasses.dataclass(frozen=True)
class Walk:
    """The tiles of a program: all query tiles, and for each the key tiles that may be non-empty.

    Where the length is no multiple of the tile, the last tile is shifted back to fit, and covers
    tokens of the one before again.

    Attributes:
      tile: queries and keys in a tile.
      lengths: T and S.
      left, right: the window around a query's position; None is without limit.
      offset: position of the first query, known or traced; None if it differs by example.
      always_masked: every tile has pairs that may not attend.
      layout: the tiles to visit, in place of the window's.
    """

    tile: tuple[int, int]
    lengths: tuple[int, int]
    left: int | None
    right: int | None
    offset: Any
    always_masked: bool
    layout: BlockLayout | None

    @property
    def query_tile(self) -> int:
        return min(self.tile[0], self.lengths[0])

    @property
    def query_tiles(self) -> int:
        return math.ceil(self.lengths[0] / self.query_tile) if self.query_tile else 0

    @property
    def queries_overlap(self) -> bool:
        """The last query tile is shifted back over the one before."""
        return self.lengths[0] % self.query_tile != 0

    @property
    def is_band(self) -> bool:
        """One slice of keys, wherever it starts, holds all that a query tile may see."""
        return (
            None not in (self.left, self.right, self.offset)
            and self.layout is None
            and self._band <= _WIDEST_BAND
        )

    @property
    def _band(self) -> int:
        return self.left + self.query_tile + self.right

    @property
    def key_tile(self) -> int:
        return min(self._band if self.is_band else self.tile[1], self.lengths[1])

    @property
    def keys_overlap(self) -> bool:
        """The last key tile is shifted back over the one before."""
        return not self.is_band and self.lengths[1] % self.key_tile != 0

    def query_start(self, n):
        return jnp.minimum(n * self.query_tile, self.lengths[0] - self.query_tile)

    def first_new_key(self, n, m):
        """The first key of the tile that no other tile covers."""
        if self.layout is not None:
            m = self.layout.indices[n, m]
        return m * self.key_tile

    def key_start(self, n, m):
        last = self.lengths[1] - self.key_tile
        if self.is_band:
            return jnp.clip(self.query_start(n) + self.offset - self.left, 0, last)
        return jnp.minimum(self.first_new_key(n, m), last)

    def over_queries(self, step: Callable, carry):
        """Folds `step(n, carry)` over the query tiles."""
        return _loop(0, self.query_tiles, step, carry)

    def over_keys(self, n, step: Callable, carry):
        """Folds `step(masked, m, carry)` over the key tiles of query tile n."""
        for low, high, masked in self._ranges(n):
            carry = _loop(low, high, lambda m, c, masked=masked: step(masked, m, c), carry)
        return carry

    def _ranges(self, n):
        """Runs of key tiles (low, high, masked); what lies outside is empty."""
        if self.is_band:
            return [(0, 1, True)]
        if self.layout is not None:
            return [(0, self.layout.counts[n], True)]
        size = self.key_tile
        tiles = math.ceil(self.lengths[1] / size)
        low, high = 0, tiles
        whole_low, whole_high = low, high
        if self.keys_overlap:
            whole_high = high - 1
        if self.offset is not None:
            first = self.query_start(n) + self.offset
            last = first + self.query_tile - 1
            if self.right is not None:
                high = jnp.clip((last + self.right) // size + 1, 0, tiles)
                whole_high = jnp.clip((first + self.right + 1) // size, 0, whole_high)
            if self.left is not None:
                low = jnp.clip((first - self.left) // size, 0, high)
                whole_low = jnp.clip(-((self.left - last) // size), low, high)
        elif self.left is not None or self.right is not None:
            return [(low, high, True)]
        if self.always_masked:
            return [(low, high, True)]
        whole_low = jnp.minimum(whole_low, high) if self.left is not None else whole_low
        runs = [(whole_low, whole_high, False)]
        if self.left is not None:
            whole_high = jnp.maximum(whole_low, whole_high)
            runs = [(low, whole_low, True), (whole_low, whole_high, False)]
        if self.right is not None or self.keys_overlap:
            runs.append((whole_high, high, True))
        return runs


def _loop(low, high, step, carry):
    if isinstance(low, int) and isinstance(high, int):
        if high - low <= 0:
            return carry
        if high - low == 1:
            return step(low, carry)
    return lax.fori_loop(low, high, step, carry)
