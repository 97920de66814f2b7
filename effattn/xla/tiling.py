"""Which tiles block attention visits, and how large they are."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn.arrays import reverse_mode
from effattn.arrays.axes import lead
from effattn.patterns.layouts import BlockLayout

# A window whose keys, with a tile of queries, number no more than this is read as one slice.
_WIDEST_BAND = 1024

# Tiles of a pattern, of all queries and keys: 4 bytes each for a pattern with a full row.
_MOST_TILES = 2**23

_NO_SECOND_REVERSE = (
    "the gradient of attention in tiles has a derivative in forward mode only (how many tiles it "
    "visits is known as it runs): use jax.jvp of jax.grad, jax.jacfwd of jax.grad or jax.hessian; "
    "for jax.grad of jax.grad take a dense form of it, as jax.nn.dot_product_attention is of "
    "softmax attention"
)

# Smaller steps multiply too slowly, and more of them are more to compile.
_SMALLEST_STAIR, _MOST_STAIRS = 64, 4


def known_product(sizes: Iterable[Any]) -> int:
    """Of sizes of a batch; those that an exported program leaves open count as one example."""
    return math.prod(size for size in sizes if isinstance(size, int))


def is_open(*lengths: Any) -> bool:
    """Whether an exported program leaves one of the lengths open."""
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
    """Queries and keys of a tile, for `rows` = batch x heads computed together.

    The logits of a tile, `rows` x queries x keys, are what must stay near the processor: larger
    products run nearer the peak until the logits fall out of its cache. Tiles divide the lengths
    evenly, so that the last one is not mostly overlap.
    """
    on_cpu = jax.default_backend() == "cpu"
    budget, largest = (2**20, 512) if on_cpu else (2**26, 1024)
    side = largest
    while side > smallest and rows * side * side > budget:
        side //= 2
    if left is not None and right is not None:
        # Queries beyond the window's own width only add pairs that the window forbids.
        side = min(side, max(64, 2 ** math.ceil(math.log2(left + right + 1))))
    # The backward holds two arrays of logits at once.
    key_side = max(smallest, side // 2) if backward else side
    return _even_share(lengths[0], side), _even_share(lengths[1], key_side)


def choose_sparse_tile(lengths: tuple[int, int], *, for_kernels: bool = False) -> tuple[int, int]:
    """Queries and keys of a tile of a pattern: small ones hold less that the pattern forbids.

    Kernels take whole tiles of their own sizes, also where the sequence is shorter.

    A query tile that sees all keys lists all their tiles, and every other one has room for as many;
    so the tiles grow where the sequence would have too many of them.
    """
    queries, keys = (128, 128) if for_kernels else (128, 64)
    while math.ceil(lengths[0] / queries) * math.ceil(lengths[1] / keys) > _MOST_TILES:
        queries, keys = 2 * queries, 2 * keys
    if for_kernels:
        return queries, keys
    return min(queries, lengths[0]), min(keys, lengths[1])


def choose_width(layout: BlockLayout, rows: int) -> int:
    """How many of the layout's key tiles to read in a step, for `rows` = batch x heads.

    Wide steps make large products, and compute the slots that a row of tiles does not fill.
    """
    listed = layout.partial_indices.shape[-1] + layout.full_indices.shape[-1]
    widest = max(1, min(listed, 16, 2**20 // (rows * math.prod(layout.tile))))
    counts = (layout.partial_counts, layout.full_counts)
    if any(isinstance(array, jax.core.Tracer) for array in counts):
        return widest
    tiles = np.asarray(counts[0]) + np.asarray(counts[1])
    widths = np.arange(1, widest + 1)
    # A step costs about a tile more than what it computes.
    costs = [(-(-tiles // width)).sum() * (width + 1) for width in widths]
    return int(widths[np.argmin(costs)])


def _even_share(length: int, side: int) -> int:
    pieces = max(1, math.ceil(length / side))
    share = math.ceil(length / pieces)
    return min(length, 8 * math.ceil(share / 8))


class Patch(NamedTuple):
    """Pairs of the work of one step; positions may be traced, sizes are static.

    The queries are a run of those of one tile. The keys are one run, or in a layout several: W of
    equal size, which may differ by key head and by example.

    Attributes:
      first_row: the first query, counted within its tile; the patch takes those from there on.
      query_start, queries: the first query, and how many.
      key_start: the first key, or those of the runs `(*L, W)`, L axes that broadcast to `(*B, K)`.
      keys: how many in all.
      new_query, new_key: the first query, and in each run key, that no patch before covers.
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


Run = tuple[Any, Any, Callable[[Any], Patch]]


@dataclasses.dataclass(frozen=True)
class Walk:
    """All query tiles, and for each the patches that may be non-empty.

    Where the length is no multiple of the tile, the last tile is shifted back to fit, and covers
    tokens of the one before again.

    Attributes:
      tile: queries and keys in a tile.
      lengths: T and S.
      always_masked: every tile has pairs that may not attend.
    """

    tile: tuple[int, int]
    lengths: tuple[int, int]
    always_masked: bool

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
    def key_tile(self) -> int:
        """Keys in a tile."""
        return min(self.tile[1], self.lengths[1])

    @property
    def keys_overlap(self) -> bool:
        """The last key tile is shifted back over the one before."""
        return self.lengths[1] % self.key_tile != 0

    def query_start(self, n) -> jax.Array:
        """The first query of tile n."""
        return jnp.minimum(n * self.query_tile, self.lengths[0] - self.query_tile)

    def patch(self, n, new_key, runs: int = 1, *, masked: bool) -> Patch:
        """All queries of tile n, and the key tiles that begin at `new_key`."""
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
        """The patches of query tile n: `patch(m)` for m from low to high, in each run."""
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
    """The tiles that causality and a window leave non-empty.

    Attributes:
      left, right: the window around a query's position; None is without limit.
      offset: position of the first query, known or traced, `()` or, by example, `(*B)`; None if
        it is not to be known, and no tile is empty.
    """

    left: int | None
    right: int | None
    offset: Any

    @property
    def band(self) -> int | None:
        """The width of one slice that holds all the keys a query tile may see, if it is narrow."""
        if self.left is None or self.right is None or self.offset is None:
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

    @property
    def stairs(self) -> tuple[int, int] | None:
        """The keys of a step, and how many tiles of keys the diagonal is ahead of the query tile.

        Where the diagonal follows the corners of tiles, the queries before a step need not read it.
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
        """The tiles that the edges cross are masked; those between them are not."""
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
                # What is empty for one example is not for another.
                return [(0, tiles, masked)]
            # As many tiles as a window may touch, of each example from where its own begins.
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
        """The keys of a step, for the queries that are not before them."""
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
    """One tile of all queries and keys, where an exported program leaves their numbers open."""

    @property
    def query_tile(self) -> int:
        """All queries."""
        return self.lengths[0]

    @property
    def query_tiles(self) -> int:
        """One."""
        return 1

    @property
    def queries_overlap(self) -> bool:
        """There is no other tile."""
        return False

    @property
    def key_tile(self) -> int:
        """All keys."""
        return self.lengths[1]

    @property
    def keys_overlap(self) -> bool:
        """There is no other tile."""
        return False

    def query_start(self, n) -> jax.Array:
        """The first query."""
        return jnp.zeros((), jnp.int32)

    def runs(self, n) -> list[Run]:
        """One patch."""
        zero = jnp.zeros((), jnp.int32)
        every = Patch(0, zero, self.lengths[0], zero, self.lengths[1], zero, zero, masked=True)
        return [(0, 1, lambda m: every)]


@dataclasses.dataclass(frozen=True)
class Listed(Walk):
    """The tiles that a layout names, several at a step: first partial ones, then full ones.

    Attributes:
      layout: the tiles.
      width: how many key tiles a step takes.
    """

    layout: BlockLayout
    width: int

    def runs(self, n) -> list[Run]:
        """Steps with partial tiles are masked, and a last one that tiles do not fill."""
        layout, width = self.layout, self.width
        partial, full = layout.partial_counts[..., n], layout.full_counts[..., n]
        counts = partial + full
        listed = layout.partial_indices.shape[-1] + layout.full_indices.shape[-1]
        slots = jnp.arange(width * -(-listed // width), dtype=jnp.int32)
        slots = lead(slots, counts.ndim + 1)
        # Slots beyond the last tile read it again, and mask it.
        at = jnp.clip(slots, 0, jnp.maximum(counts[..., None], 1) - 1)
        tiles = jnp.where(
            at < partial[..., None],
            _take(layout.partial_indices[..., n, :], at),
            _take(layout.full_indices[..., n, :], at - partial[..., None]),
        )
        starts = tiles * self.key_tile
        new = jnp.where(slots < counts[..., None], starts, self.lengths[1])
        steps = -(-counts.max() // width)

        def patch(m, masked):
            start, new_key = (
                lax.dynamic_slice_in_dim(a, m * width, width, a.ndim - 1) for a in (starts, new)
            )
            return self.patch(n, start, width, masked=masked)._replace(new_key=new_key)

        masked = functools.partial(patch, masked=True)
        if self.always_masked or self.queries_overlap or self.keys_overlap:
            return [(0, steps, masked)]
        whole = counts.min() // width
        first = jnp.minimum(-(-partial.max() // width), whole)
        between = (first, whole, functools.partial(patch, masked=False))
        return [between, _around((0, steps), between, masked)]


def _of_examples(numbers):
    """`(*B)` as `(*B, 1, 1)`, one run of keys for each example; `()` stays."""
    return numbers if numbers.ndim == 0 else numbers[..., None, None]


def _around(outer: tuple[Any, Any], inner: Run, patch: Callable[[Any], Patch]) -> Run:
    """The steps of `outer` before and after those of `inner`, as one run: one body to compile."""
    (low, high), (start, stop, _) = outer, inner
    return low, high - (stop - start), lambda m: patch(jnp.where(m < start, m, m + stop - start))


def _take(indices, at):
    """Of `(*L, m)` those at `(*L, w)`, clipped; zeros if there are none."""
    if indices.shape[-1] == 0:
        return jnp.zeros(at.shape, jnp.int32)
    return jnp.take_along_axis(indices, jnp.clip(at, 0, indices.shape[-1] - 1), axis=-1)


def _loop(low, high, step, carry):
    """`lax.fori_loop` over int32 counters, without a loop where there is one step."""
    if isinstance(low, int) and isinstance(high, int) and high - low <= 1:
        return step(np.int32(low), carry) if high > low else carry

    def one(n, carry):
        # Under `jax.disable_jit` it is one of Python's.
        return step(jnp.asarray(n, jnp.int32), carry)

    results = lax.fori_loop(_int32(low), _int32(high), one, carry)
    if any(isinstance(bound, jax.core.Tracer) for bound in (low, high)):
        # Such a loop cannot say how much it would have to save.
        return reverse_mode.forward_only(results, _NO_SECOND_REVERSE)
    return results


def _int32(bound):
    return np.int32(bound) if isinstance(bound, int) else bound.astype(jnp.int32)
