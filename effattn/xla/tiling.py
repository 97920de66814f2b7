"""Which tiles block attention visits, and how large they are."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# A window whose keys, with a tile of queries, number no more than this is read as one slice.
_WIDEST_BAND = 1024

# In smaller tiles halves multiply too slowly to be worth their own step.
_SMALLEST_STAIRS = 128


class BlockLayout(NamedTuple):
    """The key tiles that each tile of queries visits, the same for all heads and examples.

    Attributes:
      counts: int32 `(query tiles,)`.
      indices: int32 `(query tiles, most key tiles)`; the first counts[n] of row n, all distinct.
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
    return _even_share(lengths[0], side), _even_share(lengths[1], side)


def _even_share(length: int, side: int) -> int:
    pieces = max(1, math.ceil(length / side))
    share = math.ceil(length / pieces)
    return min(length, 8 * math.ceil(share / 8))


class Patch(NamedTuple):
    """A rectangle of pairs, the work of one step; starts may be traced, sizes are static.

    Attributes:
      first_row: the first query, counted within its tile; the patch takes those from there on.
      query_start, queries: the first query, and how many.
      key_start, keys: the first key, and how many.
      new_query, new_key: the first that no patch before covers.
      masked: some pairs may not attend.
    """

    first_row: int
    query_start: Any
    queries: int
    key_start: Any
    keys: int
    new_query: Any
    new_key: Any
    masked: bool


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
        """Queries in a tile."""
        return min(self.tile[0], self.lengths[0])

    @property
    def query_tiles(self) -> int:
        """How many tiles of queries there are."""
        return -(-self.lengths[0] // self.query_tile)

    @property
    def queries_overlap(self) -> bool:
        """The last query tile is shifted back over the one before."""
        return self.lengths[0] % self.query_tile != 0

    @property
    def band(self) -> int | None:
        """The width of one slice that holds all the keys a query tile may see, if it is narrow."""
        if (
            self.left is None
            or self.right is None
            or self.offset is None
            or self.layout is not None
        ):
            return None
        # Processors multiply matrices of odd widths at a fraction of their speed.
        width = 64 * -(-(self.left + self.query_tile + self.right) // 64)
        return width if width <= _WIDEST_BAND else None

    @property
    def key_tile(self) -> int:
        """Keys in a tile."""
        return min(self.band or self.tile[1], self.lengths[1])

    @property
    def keys_overlap(self) -> bool:
        """The last key tile is shifted back over the one before."""
        return self.band is None and self.lengths[1] % self.key_tile != 0

    def query_start(self, n) -> jax.Array:
        """The first query of tile n."""
        return jnp.minimum(n * self.query_tile, self.lengths[0] - self.query_tile)

    @property
    def stairs(self) -> int | None:
        """How many key tiles the diagonal is ahead of the query tile, if it crosses one alone.

        Then the lower half of the queries alone reads the second half of that tile's keys.
        """
        if self.right is None or not isinstance(self.offset, int) or self.layout is not None:
            return None
        (queries, keys), size, ahead = self.lengths, self.query_tile, self.offset + self.right
        if size < _SMALLEST_STAIRS or size % 2 or size != self.key_tile or self.band is not None:
            return None
        if queries % size or ahead % size or ahead < 0 or queries + ahead > keys:
            return None
        return ahead // size

    def patch(self, n, m, masked: bool) -> Patch:
        """All queries of tile n and the keys of tile m of those that it visits."""
        query_start, last = self.query_start(n), self.lengths[1] - self.key_tile
        if self.band is not None:
            new_key = key_start = jnp.clip(query_start + self.offset - self.left, 0, last)
        else:
            tile = m if self.layout is None else self.layout.indices[n, m]
            new_key = tile * self.key_tile
            key_start = jnp.minimum(new_key, last)
        return Patch(
            first_row=0,
            query_start=query_start,
            queries=self.query_tile,
            key_start=key_start,
            keys=self.key_tile,
            new_query=n * self.query_tile,
            new_key=new_key,
            masked=masked,
        )

    def _step_of_stairs(self, n, m, step: int) -> Patch:
        """Step 0 or 1 of the tile m that the diagonal crosses."""
        half = self.query_tile // 2
        patch = self.patch(n, m, masked=True)
        return patch._replace(
            first_row=step * half,
            query_start=patch.query_start + step * half,
            queries=self.query_tile - step * half,
            key_start=patch.key_start + step * half,
            keys=half,
            new_key=patch.new_key + step * half,
        )

    def over_queries(self, step: Callable, carry: Any) -> Any:
        """Folds `step(n, carry)` over the query tiles."""
        return _loop(0, self.query_tiles, step, carry)

    def over_keys(self, n, step: Callable, carry: Any) -> Any:
        """Folds `step(patch, carry)` over the patches of query tile n."""
        for low, high, masked in self._runs(n):

            def key_tile(m, carry, masked=masked):
                return step(self.patch(n, m, masked), carry)

            carry = _loop(low, high, key_tile, carry)
        if self.stairs is not None:
            for i in (0, 1):
                carry = step(self._step_of_stairs(n, n + self.stairs, i), carry)
        return carry

    def _runs(self, n) -> list[tuple[Any, Any, bool]]:
        """Runs of key tiles (low, high, masked); what lies outside them is empty."""
        size = self.key_tile
        tiles = -(-self.lengths[1] // size)
        if self.band is not None:
            return [(0, 1, True)]
        if self.layout is not None:
            return [(0, self.layout.counts[n], True)]
        bounded = self.left is not None or self.right is not None
        if bounded and self.offset is None:
            return [(0, tiles, True)]
        low: Any = 0
        high: Any = tiles
        whole_low: Any = 0
        whole_high: Any = tiles - self.keys_overlap
        first = self.query_start(n) + (0 if self.offset is None else self.offset)
        last = first + self.query_tile - 1
        if self.stairs is not None:
            high = whole_high = n + self.stairs
        elif self.right is not None:
            high = jnp.clip((last + self.right) // size + 1, 0, tiles)
            whole_high = jnp.clip((first + self.right + 1) // size, 0, whole_high)
        if self.left is not None:
            low = jnp.clip((first - self.left) // size, 0, high)
            whole_low = jnp.clip(-((self.left - last) // size), low, high)
            whole_high = jnp.maximum(whole_low, whole_high)
        if self.always_masked:
            return [(low, high, True)]
        runs = [(whole_low, whole_high, False)]
        if self.left is not None:
            runs.insert(0, (low, whole_low, True))
        if self.stairs is None and (self.right is not None or self.keys_overlap):
            runs.append((whole_high, high, True))
        return runs


def _loop(low, high, step, carry):
    """`lax.fori_loop` over int32 counters, without a loop where there is one step."""
    if isinstance(low, int) and isinstance(high, int) and high - low <= 1:
        return step(np.int32(low), carry) if high > low else carry
    return lax.fori_loop(_int32(low), _int32(high), step, carry)


def _int32(bound):
    return np.int32(bound) if isinstance(bound, int) else bound.astype(jnp.int32)
