"""Iteration over the non-empty tiles of block attention."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn.arrays.axes import lead
from effattn.arrays.forward_only import forward_only
from effattn.patterns.layouts import Array, BlockLayout

# A window is read as one slice of keys if it spans at most this many keys for a query tile.
_WIDEST_BAND = 1024

_NO_SECOND_REVERSE = (
    "a derivative of attention in tiles has derivatives in forward mode only, because the number "
    "of visited tiles is not known when the program is traced: use jax.jvp of jax.grad, jax.jacfwd "
    "of jax.grad or jax.hessian; for jax.grad of jax.grad use a dense form, such as "
    "jax.nn.dot_product_attention for softmax attention"
)

# Smaller steps multiply too slowly, and more steps take longer to compile.
_SMALLEST_STAIR, _MOST_STAIRS = 64, 4


class Patch(NamedTuple):
    """Query-key pairs computed in one step. Positions may be traced; sizes are static.

    The queries are consecutive, within one query tile. The keys are one run of consecutive keys, or
    in a layout W runs of equal size, which may differ by key head and by example.

    Attributes:
      first_row: index within the query tile of the first query of the patch.
      query_start, queries: position of the first query, and number of queries.
      key_start: position of the first key, or positions `(*L, W)` of the first key of each run; the
        axes L broadcast to `(*B, K)`.
      keys: total number of keys.
      new_query, new_key: first query, and first key of each run, that no earlier patch covers.
      masked: whether some pairs may not attend.
    """

    first_row: int
    query_start: Any
    queries: int
    key_start: Any
    keys: int
    new_query: Any
    new_key: Any
    masked: bool


# (low, high, patch): the patches patch(m) for low <= m < high.
Run = tuple[Any, Any, Callable[[Any], Patch]]


@dataclasses.dataclass(frozen=True)
class Walk:
    """Iteration over all query tiles, and for each query tile over its non-empty patches.

    If the length is not a multiple of the tile, the last tile is shifted back to fit, and overlaps
    the previous tile.

    Attributes:
      tile: (queries, keys) in a tile.
      lengths: query length T and key length S.
      always_masked: whether every tile may have pairs that may not attend.
    """

    tile: tuple[int, int]
    lengths: tuple[int, int]
    always_masked: bool

    @property
    def query_tile(self) -> int:
        """Number of queries in a tile."""
        return min(self.tile[0], self.lengths[0])

    @property
    def query_tiles(self) -> int:
        """Number of query tiles."""
        return -(-self.lengths[0] // self.query_tile)

    @property
    def queries_overlap(self) -> bool:
        """True if the last query tile overlaps the previous one."""
        return self.lengths[0] % self.query_tile != 0

    @property
    def key_tile(self) -> int:
        """Number of keys in a tile."""
        return min(self.tile[1], self.lengths[1])

    @property
    def keys_overlap(self) -> bool:
        """True if the last key tile overlaps the previous one."""
        return self.lengths[1] % self.key_tile != 0

    def query_start(self, n) -> jax.Array:
        """Position of the first query of tile n."""
        return jnp.minimum(n * self.query_tile, self.lengths[0] - self.query_tile)

    def patch(self, n, new_key, runs: int = 1, *, masked: bool) -> Patch:
        """Patch of all queries of tile n and the key tiles that start at `new_key`."""
        return Patch(
            first_row=0,
            query_start=self.query_start(n),
            queries=self.query_tile,
            key_start=jnp.minimum(new_key, self.lengths[1] - self.key_tile),
            keys=runs * self.key_tile,
            new_query=n * self.query_tile,
            new_key=new_key,
            masked=masked,
        )

    def runs(self, n) -> list[Run]:
        """Patches of query tile n, as runs `(low, high, patch)`."""
        raise NotImplementedError

    def over_queries(self, step: Callable, carry: Any) -> Any:
        """Folds `step(n, carry)` over the query tiles."""
        return _loop(0, self.query_tiles, step, carry)

    def over_keys(self, n, step: Callable, carry: Any) -> Any:
        """Folds `step(patch, carry)` over the patches of query tile n."""
        for low, high, patch in self.runs(n):
            carry = _loop(low, high, lambda m, carry, patch=patch: step(patch(m), carry), carry)
        return carry


@dataclasses.dataclass(frozen=True)
class Window(Walk):
    """Tiles that causality and a local window leave non-empty.

    Attributes:
      left, right: number of positions that a query sees on each side; None is without limit.
      offset: position of the first query: an int, or a traced array `()` or `(*B)`. None if
        positions are unknown; then all tiles are visited.
    """

    left: int | None
    right: int | None
    offset: Any

    @property
    def band(self) -> int | None:
        """Width of one slice with all keys that a query tile sees; None if the window is wide."""
        if self.left is None or self.right is None or self.offset is None:
            return None
        # A multiple of 64: processors multiply matrices of odd widths far more slowly.
        width = 64 * -(-(self.left + self.query_tile + self.right) // 64)
        return width if width <= _WIDEST_BAND else None

    @property
    def key_tile(self) -> int:
        """Number of keys in a tile."""
        return min(self.band or self.tile[1], self.lengths[1])

    @property
    def keys_overlap(self) -> bool:
        """True if the last key tile overlaps the previous one."""
        return self.band is None and self.lengths[1] % self.key_tile != 0

    @property
    def stairs(self) -> tuple[int, int] | None:
        """(keys in a step, key tiles from the query tile to the diagonal), or None.

        If the causal diagonal passes through tile corners, the tile on the diagonal is cut into
        steps of keys, and queries before a step skip the step.
        """
        if self.right is None or not isinstance(self.offset, int) or self.band is not None:
            return None
        (queries, keys), size, tile = self.lengths, self.query_tile, self.key_tile
        ahead, step = self.offset + self.right, min(tile, size // 2)
        if step < _SMALLEST_STAIR or tile % step or size % step or size // step > _MOST_STAIRS:
            return None
        if size % tile or queries % size or ahead % tile or ahead < 0 or queries + ahead > keys:
            return None
        return step, ahead // tile

    def runs(self, n) -> list[Run]:
        """Patches of query tile n. Only tiles at the edges of the window are masked."""
        size = self.key_tile
        tiles = -(-self.lengths[1] // size)
        first = self.query_start(n) + (0 if self.offset is None else self.offset)
        last = first + self.query_tile - 1
        if self.band is not None and self.left is not None:
            start = _of_examples(jnp.clip(first - self.left, 0, self.lengths[1] - size))
            return [(0, 1, lambda m: self.patch(n, start, masked=True))]

        def masked(m):
            return self.patch(n, m * size, masked=True)

        def whole(m):
            return self.patch(n, m * size, masked=False)

        bounded = self.left is not None or self.right is not None
        if bounded and (self.offset is None or np.ndim(self.offset)):
            if self.offset is None or self.left is None or self.right is None:
                # Examples have different empty tiles, so every tile is visited.
                return [(0, tiles, masked)]
            # The most tiles that a window can touch, from the first tile of each example's window.
            touched = min(tiles, (self.left + self.query_tile + self.right - 2) // size + 2)
            lowest = _of_examples(jnp.clip((first - self.left) // size, 0, tiles - touched))
            return [(0, touched, lambda m: self.patch(n, (lowest + m) * size, masked=True))]
        low: Any = 0
        high: Any = tiles
        whole_low: Any = 0
        whole_high: Any = tiles - self.keys_overlap
        if self.stairs is not None:
            high = whole_high = n * (self.query_tile // size) + self.stairs[1]
        elif self.right is not None:
            high = jnp.clip((last + self.right) // size + 1, 0, tiles)
            whole_high = jnp.clip((first + self.right + 1) // size, 0, whole_high)
        if self.left is not None:
            low = jnp.clip((first - self.left) // size, 0, high)
            whole_low = jnp.clip(-((self.left - last) // size), low, high)
            whole_high = jnp.maximum(whole_low, whole_high)
        runs: list[Run]
        if self.always_masked:
            runs = [(low, high, masked)]
        else:
            runs = [(whole_low, whole_high, whole)]
            ahead = self.stairs is None and (self.right is not None or self.keys_overlap)
            if self.left is not None:
                runs.append(_around((low, high if ahead else whole_high), runs[0], masked))
            elif ahead:
                runs.append((whole_high, high, masked))
        if self.stairs is not None:
            step = self.stairs[0]
            for row in range(0, self.query_tile, step):
                runs.append((0, 1, functools.partial(self._stair, masked(high), row, step)))
        return runs

    @staticmethod
    def _stair(corner: Patch, first: int, step: int, _) -> Patch:
        """Patch of one step of keys on the diagonal, and the queries from that step on."""
        return corner._replace(
            first_row=first,
            query_start=corner.query_start + first,
            queries=corner.queries - first,
            key_start=corner.key_start + first,
            keys=step,
            new_key=corner.new_key + first,
        )


@dataclasses.dataclass(frozen=True)
class Whole(Walk):
    """One tile of all queries and keys, for lengths that an exported program leaves open."""

    def query_start(self, n) -> jax.Array:
        """Position 0."""
        return jnp.zeros((), jnp.int32)

    def runs(self, n) -> list[Run]:
        """The one patch of all pairs."""
        zero = jnp.zeros((), jnp.int32)
        every = Patch(0, zero, self.lengths[0], zero, self.lengths[1], zero, zero, masked=True)
        return [(0, 1, lambda m: every)]


@dataclasses.dataclass(frozen=True)
class Rows(Walk):
    """Tiles of queries, each with all keys."""

    def runs(self, n) -> list[Run]:
        """The one patch of the queries of tile n."""
        return [(0, 1, lambda m: self.patch(n, jnp.zeros((), jnp.int32), masked=True))]


@dataclasses.dataclass(frozen=True)
class Listed(Walk):
    """Tiles of a block-sparse layout, several per step: slots of partial tiles, then of full ones.

    Attributes:
      layout: the block-sparse layout.
      width: number of key tiles in a step.
      bounds: the most tiles of a query tile of any head and example, the fewest, and the most
        partial tiles; int32 `(nq,)` each.
    """

    layout: BlockLayout
    width: int
    bounds: tuple[Array, Array, Array]

    @classmethod
    def of(cls, tile, lengths, always_masked, layout: BlockLayout, width: int) -> "Listed":
        """The walk over a layout.

        The bounds are found here, before any loop: in a loop over query tiles each of them would be
        a collective, if heads or examples are on several devices.
        """
        partial = layout.partial_counts.reshape(-1, layout.grid[0])
        counts = partial + layout.full_counts.reshape(partial.shape)
        bounds = counts.max(0), counts.min(0), partial.max(0)
        return cls(tile, lengths, always_masked, layout, width, bounds)

    def runs(self, n) -> list[Run]:
        """Steps of query tile n. Steps with partial tiles or unused slots are masked."""
        layout, width = self.layout, self.width
        partial, full = layout.partial_counts[..., n], layout.full_counts[..., n]
        counts = partial + full
        listed = layout.partial_indices.shape[-1] + layout.full_indices.shape[-1]
        slots = jnp.arange(width * -(-listed // width), dtype=jnp.int32)
        slots = lead(slots, counts.ndim + 1)
        # Unused slots read the last tile again, and mask it.
        at = jnp.clip(slots, 0, jnp.maximum(counts[..., None], 1) - 1)
        tiles = jnp.where(
            at < partial[..., None],
            _take(layout.partial_indices[..., n, :], at),
            _take(layout.full_indices[..., n, :], at - partial[..., None]),
        )
        starts = tiles * self.key_tile
        new = jnp.where(slots < counts[..., None], starts, self.lengths[1])
        most, fewest, most_partial = (bound[n] for bound in self.bounds)
        steps = -(-most // width)

        def patch(m, masked):
            start, new_key = (
                lax.dynamic_slice_in_dim(a, m * width, width, a.ndim - 1) for a in (starts, new)
            )
            return self.patch(n, start, width, masked=masked)._replace(new_key=new_key)

        masked = functools.partial(patch, masked=True)
        if self.always_masked or self.queries_overlap or self.keys_overlap:
            return [(0, steps, masked)]
        whole = fewest // width
        first = jnp.minimum(-(-most_partial // width), whole)
        between = (first, whole, functools.partial(patch, masked=False))
        return [between, _around((0, steps), between, masked)]


def _of_examples(numbers):
    """Reshapes `(*B)` to `(*B, 1, 1)`, one run of keys per example; `()` stays unchanged."""
    return numbers if numbers.ndim == 0 else numbers[..., None, None]


def _around(outer: tuple[Any, Any], inner: Run, patch: Callable[[Any], Patch]) -> Run:
    """One run of the steps of `outer` before and after `inner`: one loop body to compile."""
    (low, high), (start, stop, _) = outer, inner
    return low, high - (stop - start), lambda m: patch(jnp.where(m < start, m, m + stop - start))


def _take(indices, at):
    """Entries `(*L, w)` of `indices (*L, m)` at `at`, clipped to the range; zeros if m is 0."""
    if indices.shape[-1] == 0:
        return jnp.zeros(at.shape, jnp.int32)
    return jnp.take_along_axis(indices, jnp.clip(at, 0, indices.shape[-1] - 1), axis=-1)


def _loop(low, high, step, carry):
    """`lax.fori_loop` with an int32 counter; a single step runs without a loop."""
    if isinstance(low, int) and isinstance(high, int) and high - low <= 1:
        return step(np.int32(low), carry) if high > low else carry

    def one(n, carry):
        # Under `jax.disable_jit` the counter is a Python int.
        return step(jnp.asarray(n, jnp.int32), carry)

    results = lax.fori_loop(_int32(low), _int32(high), one, carry)
    if any(isinstance(bound, jax.core.Tracer) for bound in (low, high)):
        # The number of steps is traced, so reverse mode cannot allocate residuals for the loop.
        return forward_only(results, _NO_SECOND_REVERSE)
    return results


def _int32(bound):
    return np.int32(bound) if isinstance(bound, int) else bound.astype(jnp.int32)
