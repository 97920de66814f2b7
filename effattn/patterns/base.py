"""Basic patterns: full, causal, windows, global positions, documents, stripes, images."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays.checks import at_least
from effattn.arrays.segments import positions_from
from effattn.patterns import zones
from effattn.patterns.algebra import Pattern, sides
from effattn.patterns.zones import Frame, Zones

# Most tokens for a `Custom` rule without bounds, which is evaluated at every pair.
LONGEST_WITHOUT_BOUNDS = 32768

# Most parallel stripes that become exact zones.
_MOST_STRIPES = 4096


# Patterns of one rectangle or band


@dataclasses.dataclass(frozen=True)
class Full(Pattern):
    """Every query attends to every key."""

    def _allows(self, i, j, h):
        return (i == i) & (j == j)

    def _distances(self, capacity):
        return np.arange(capacity)

    def _zones(self, frame, inside):
        return zones.of(frame) if inside else zones.none()


@dataclasses.dataclass(frozen=True)
class Causal(Pattern):
    """j <= i."""

    def _allows(self, i, j, h):
        return j <= i

    def _distances(self, capacity):
        return np.arange(capacity)

    def _zones(self, frame, inside):
        return zones.of(frame, diagonals=(-zones.FAR, 0) if inside else (1, zones.FAR))


@dataclasses.dataclass(frozen=True)
class SlidingWindow(Pattern):
    """-left <= j - i <= right, in tokens or, with `block_size`, in blocks of tokens.

    The token itself (or its block) is not counted: `SlidingWindow(255, 0)` is a causal window of
    256 keys.
    """

    left: int
    right: int
    block_size: int = 1

    def __post_init__(self):
        at_least("left", self.left, 0)
        at_least("right", self.right, 0)
        at_least("block_size", self.block_size, 1)

    def _allows(self, i, j, h):
        if self.block_size > 1:
            i, j = i // self.block_size, j // self.block_size
        return (j >= i - self.left) & (j <= i + self.right)

    def _distances(self, capacity):
        return np.arange(min(self.left + 1, capacity)) if self.block_size == 1 else None

    def _listed(self, i, capacity):
        before = np.arange(min(self.left + 1, -(-capacity // self.block_size)))
        return tokens_of_blocks(i // self.block_size - before, self.block_size, capacity)

    def _zones(self, frame, inside):
        if self.block_size == 1:
            band = -self.left, self.right
            return zones.of(frame, diagonals=band if inside else zones.outside(band))
        low, high = rows = zones.blocks(zones.rows_of(frame, self.block_size), self.block_size)
        keys = low - self.left * self.block_size, high + self.right * self.block_size
        return zones.of(frame, rows=rows, keys=keys if inside else zones.outside(keys))


@dataclasses.dataclass(frozen=True)
class Prefix(Pattern):
    """j < n: every query sees the first n keys. `Causal() | Prefix(n)` is a prefix LM's mask."""

    n: int

    def __post_init__(self):
        at_least("n", self.n, 0)

    def _allows(self, i, j, h):
        return (j < self.n) & (i == i)

    def _zones(self, frame, inside):
        keys = 0, self.n - 1
        return zones.of(frame, keys=keys if inside else zones.outside(keys))


# Patterns of several rectangles


@dataclasses.dataclass(frozen=True)
class Global(Pattern):
    """Global positions attend to all keys, and all queries attend to them (Beltagy et al. 2020).

    `positions` is the number of leading global positions, or a sequence of global positions.
    """

    positions: int | Sequence[int]

    def __post_init__(self):
        given: Any = self.positions
        if np.ndim(given) == 0:
            object.__setattr__(self, "positions", at_least("positions", given, 0))
            return
        held = sorted({at_least("positions", position, 0) for position in given})
        first = held == list(range(len(held)))
        object.__setattr__(self, "positions", len(held) if first else tuple(held))

    @functools.cached_property
    def _runs(self):
        given = self.positions
        return zones.runs_of(np.arange(given) if isinstance(given, int) else given)

    def _check(self, frame):
        last, length = int(self._runs[1].max(initial=-1)), max(frame.last + 1, frame.keys)
        if last >= length:
            raise ValueError(
                f"global positions must be at most {length - 1}, the last position of the "
                f"sequence, got {last}"
            )

    def _holds(self, position):
        first, last = self._runs
        if len(first) > 4:
            table = np.zeros(last[-1] + 2, bool)
            table[np.array(self.positions)] = True
            return lookup(table, position)
        runs = zip(first.tolist(), last.tolist(), strict=True)
        near = ((position >= a) & (position <= b) for a, b in runs)
        return functools.reduce(lambda a, b: a | b, near, position < 0)

    def _allows(self, i, j, h):
        return self._holds(i) | self._holds(j)

    def _zones(self, frame, inside):
        runs = self._runs if inside else zones.gaps_between(self._runs)
        join = zones.union if inside else zones.intersection
        return join(zones.of(frame, rows=runs), zones.of(frame, keys=runs))


@dataclasses.dataclass(frozen=True)
class Documents(Pattern):
    """Packed documents of the given lengths: tokens attend within their document.

    Positions after the last document are padding: padding attends to nothing, and nothing attends
    to padding.
    """

    lengths: tuple[int, ...]

    def __post_init__(self):
        held = tuple(at_least("lengths", length, 0) for length in self.lengths)
        object.__setattr__(self, "lengths", held)

    def _allows(self, i, j, h):
        document = lookup(self._documents, i)
        return (document == lookup(self._documents, j)) & (document >= 0)

    @functools.cached_property
    def _documents(self):
        lengths = np.array(self.lengths, np.int64)
        return np.append(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), np.int32(-1))

    def _zones(self, frame, inside):
        ends = np.cumsum(self.lengths, dtype=np.int64)
        own = ends - np.array(self.lengths, np.int64), ends - 1
        if inside:
            return zones.of(frame, rows=own, keys=own)
        padding = zones.of(frame, rows=(sum(self.lengths), zones.FAR))
        return zones.union(zones.of(frame, rows=own, keys=zones.outside(own)), padding)


# Patterns of stripes


@dataclasses.dataclass(frozen=True)
class Dilated(Pattern):
    """j - i = dilation x step for a step from -left to right (Beltagy et al. 2020, "Longformer").

    `window` is an int or (left, right), in steps, as in `effattn.sliding_window_attention`.
    """

    window: int | tuple[int, int]
    dilation: int

    def __post_init__(self):
        object.__setattr__(self, "window", sides("window", self.window))
        at_least("dilation", self.dilation, 1)

    def _allows(self, i, j, h):
        left, right = (side * self.dilation for side in sides("window", self.window))
        return ((j - i) % self.dilation == 0) & (j >= i - left) & (j <= i + right)

    def _distances(self, capacity):
        left, _ = sides("window", self.window)
        return np.arange(0, min(left * self.dilation + 1, capacity), self.dilation)

    def _zones(self, frame, inside):
        left, right = sides("window", self.window)
        return _stripes(frame, self.dilation, -left, right, inside)


@dataclasses.dataclass(frozen=True)
class Strided(Pattern):
    """(i - j) mod stride = 0, the second factor of strided attention (Child et al. 2019).

    `sparse_transformer` adds the first factor, the previous `stride` positions, and the causal
    mask.
    """

    stride: int

    def __post_init__(self):
        at_least("stride", self.stride, 1)

    def _allows(self, i, j, h):
        return (i - j) % self.stride == 0

    def _distances(self, capacity):
        return np.arange(0, capacity, self.stride)

    def _zones(self, frame, inside):
        return _stripes(frame, self.stride, -zones.FAR, zones.FAR, inside)


@dataclasses.dataclass(frozen=True)
class Fixed(Pattern):
    """j mod stride >= stride - summary, the second factor of fixed attention (Child et al. 2019).

    All queries attend to the last `summary` positions of each block of `stride`.
    `sparse_transformer` adds the first factor, the query's own block, and the causal mask.
    """

    stride: int
    summary: int = 1

    def __post_init__(self):
        at_least("stride", self.stride, 1)
        if at_least("summary", self.summary, 1) > self.stride:
            raise ValueError(
                f"summary must be at most the stride, {self.stride}, got {self.summary}"
            )

    def _allows(self, i, j, h):
        return (j % self.stride >= self.stride - self.summary) & (i == i)

    def _listed(self, i, capacity):
        j = np.arange(capacity)
        return jnp.asarray(j[self._allows(j, j, 0)])

    def _zones(self, frame, inside):
        start = np.arange(0, frame.keys, self.stride)
        if len(start) > _MOST_STRIPES:
            return zones.of(frame, certain=False)
        border = start + self.stride - self.summary
        keys = (border, start + self.stride - 1) if inside else (start, border - 1)
        return zones.of(frame, keys=keys)


# Images, row by row


@dataclasses.dataclass(frozen=True)
class Grid(Pattern):
    """Tokens of a height x width image attend to tokens at most `window` rows and columns away.

    `window` is an int or (rows, columns). Positions after the image do not attend and are not
    attended to.
    """

    height: int
    width: int
    window: int | tuple[int, int]

    def __post_init__(self):
        at_least("height", self.height, 1)
        at_least("width", self.width, 1)
        object.__setattr__(self, "window", sides("window", self.window))

    def _allows(self, i, j, h):
        size, rows = self.height * self.width, j // self.width - i // self.width
        columns = j % self.width - i % self.width
        up, across = sides("window", self.window)
        return (abs(rows) <= up) & (abs(columns) <= across) & (i < size) & (j < size)

    def _zones(self, frame, inside):
        width, (up, across) = self.width, sides("window", self.window)
        up = min(up, self.height - 1)
        y, step = np.meshgrid(np.arange(self.height), np.arange(-up, up + 1), indexing="ij")
        held = (y + step >= 0) & (y + step < self.height)
        y, step = y[held], step[held]
        band = step * width - across, step * width + across
        near = zones.of(
            frame,
            rows=zones.blocks(y, width),
            keys=zones.blocks(y + step, width),
            diagonals=band if inside else zones.outside(band),
        )
        if inside:
            return near
        row = np.arange(self.height)
        first, last = np.maximum(row - up, 0), np.minimum(row + up, self.height - 1)
        reach = zones.blocks(first, width)[0], zones.blocks(last, width)[1]
        return zones.union(
            near,
            zones.of(frame, rows=zones.blocks(row, width), keys=zones.outside(reach)),
            zones.of(frame, rows=(self.height * width, zones.FAR)),
        )


@dataclasses.dataclass(frozen=True)
class Axial(Pattern):
    """Tokens of a height x width image attend to their row and column (Ho et al. 2019).

    Positions after the image do not attend and are not attended to.
    """

    height: int
    width: int

    def __post_init__(self):
        at_least("height", self.height, 1)
        at_least("width", self.width, 1)

    def _allows(self, i, j, h):
        size, width = self.height * self.width, self.width
        seen = (i // width == j // width) | (i % width == j % width)
        return seen & (i < size) & (j < size)

    def _zones(self, frame, inside):
        height, width = self.height, self.width
        image, after = (0, height * width - 1), (height * width, zones.FAR)
        y, step = np.arange(height), np.arange(1 - height, height) * width
        rows = zones.blocks(y, width)
        if inside:
            return zones.union(
                zones.of(frame, rows=rows, keys=rows),
                zones.of(frame, rows=image, keys=image, diagonals=(step, step)),
            )
        # Between the stripes of the columns; next to the diagonal, in the next row or the last one.
        between = step[step != 0]
        between = between - width * (between < 0)
        return zones.union(
            zones.of(frame, rows=image, keys=image, diagonals=(between + 1, between + width - 1)),
            zones.of(frame, rows=rows, keys=zones.blocks(y + 1, width), diagonals=(1, width - 1)),
            zones.of(frame, rows=rows, keys=zones.blocks(y - 1, width), diagonals=(1 - width, -1)),
            zones.of(frame, rows=image, keys=after),
            zones.of(frame, rows=after),
        )


# User-defined patterns


@dataclasses.dataclass(frozen=True)
class Custom(Pattern):
    """The pairs for which `rule(i, j)` is true.

    `rule` takes integer arrays that broadcast, NumPy or traced, and returns bools; write it with
    operators or `jax.numpy`. A layout evaluates the rule by element. `bounds(rows)` takes a `range`
    of query positions and returns (first, last), an inclusive range that contains all keys of these
    queries, or None if the queries have no keys; only tiles within the bounds are evaluated.
    Without bounds, the pattern raises `ValueError` above 32768 tokens, because evaluating all pairs
    would take too long.

    Two custom patterns are equal if their functions are the same object.
    """

    rule: Callable[[Any, Any], Any]
    bounds: Callable[[range], tuple[int, int] | None] | None = None
    name: str | None = None

    def _allows(self, i, j, h):
        if any(isinstance(x, jax.Array) for x in (i, j)):
            allowed: Any = jnp.asarray(self.rule(i, j))
        else:
            # A layout needs concrete arrays, also when it is made under jit.
            with jax.ensure_compile_time_eval():
                allowed = np.asarray(self.rule(i, j))
        if allowed.dtype != bool:
            raise ValueError(f"the rule of {self!r} must return bools, got {allowed.dtype}")
        return allowed

    def _zones(self, frame, inside):
        if self.bounds is None:
            if max(frame.queries, frame.keys) > LONGEST_WITHOUT_BOUNDS:
                raise ValueError(
                    f"{self!r} needs bounds for more than {LONGEST_WITHOUT_BOUNDS} tokens, because "
                    f"its rule would be evaluated at all {frame.queries} x {frame.keys} pairs, got "
                    "None; give bounds(rows)"
                )
            return zones.of(frame, certain=False)
        first, last = rows = frame.row_tile(np.arange(frame.grid[0]))
        pairs = zip(first.tolist(), last.tolist(), strict=True)
        found = [self.bounds(range(a, b + 1)) or (0, -1) for a, b in pairs]
        keys = tuple(np.array(found).T)
        maybe = zones.of(frame, rows=rows, keys=keys, certain=False)
        if inside:
            return maybe
        empty = keys[0] > keys[1]
        keys = np.where(empty, frame.keys, keys[0]), np.where(empty, frame.keys, keys[1])
        return zones.union(maybe, zones.of(frame, rows=rows, keys=zones.outside(keys)))

    def __repr__(self):
        return f"Custom({self.name or getattr(self.rule, '__name__', 'rule')})"


def lookup(table: np.ndarray, *index: Any) -> Any:
    """Indexes the table by NumPy or traced indices, clipped to the range of the table."""
    if any(isinstance(x, jax.Array) for x in index):
        return jnp.asarray(table).at[index].get(mode="clip")
    return table[tuple(np.clip(x, 0, n - 1) for x, n in zip(index, table.shape, strict=True))]


def tokens_of_blocks(blocks: jax.Array, size: int, capacity: int) -> jax.Array:
    """Returns the positions `(*L, k b)` of the tokens in blocks `(*L, k)`; negative for no block.

    b is `size`, or `capacity` if that is less.
    """
    tokens = positions_from(blocks * size, min(size, capacity))
    return jax.lax.collapse(tokens, tokens.ndim - 2)


def _stripes(frame: Frame, step: int, first: int, last: int, inside: bool) -> Zones:
    """Zones of the pairs with j - i = n step for n from first to last, or of all other pairs."""
    first = max(first, -(frame.last // step))
    last = min(last, (frame.keys - 1 - frame.first) // step)
    band = first * step, last * step
    if last - first >= _MOST_STRIPES and step > 1:
        rest = zones.none() if inside else zones.of(frame, diagonals=zones.outside(band))
        return zones.union(rest, zones.of(frame, diagonals=band, certain=False))
    stripe = np.arange(first, last + 1) * step
    stripes = (stripe, stripe) if step > 1 else zones.runs_of(stripe)
    return zones.of(frame, diagonals=stripes if inside else zones.gaps_between(stripes))
