"""Base class of patterns, and the operators `&`, `|` and `~`.

`effattn.patterns` has the concrete patterns.
"""

import dataclasses
import functools
import operator
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks
from effattn.patterns import graphs, zones
from effattn.patterns.layouts import BlockLayout, packed
from effattn.patterns.zones import Frame, Zones

# `density` counts up to `_MOST_RUNS` runs of keys, else up to `_MOST_COUNTED` pairs; else it
# samples `_SAMPLED_ROWS` rows.
_MOST_RUNS = 2**25
_MOST_COUNTED = 2**28
_SAMPLED_ROWS = 256

_LARGEST_GRAPH = 4096
_LARGEST_SPECTRUM = 2048


class GraphDistance(NamedTuple):
    """Number of layers after which a token's output depends on another token.

    Attributes:
      mean, largest: mean and maximum over ordered pairs of different, connected tokens.
      unreachable: share of pairs that no number of layers connects; at least half if causal.
    """

    mean: float
    largest: int
    unreachable: float


class Pattern:
    """Set of pairs (i, j): query i may attend to key j. Combine patterns with `&`, `|` and `~`."""

    @property
    def heads(self) -> int | None:
        """Number of query heads if the pattern differs by head; None if all heads are alike."""
        return self._heads()

    def allows(self, i: Any, j: Any, h: Any = 0) -> Any:
        """Returns whether the query at position i may attend to the key at position j, in head h.

        Takes integers, NumPy or traced, that broadcast against each other. The rule costs a few
        operations for each element and holds no T x S constant, so it can run inside a kernel.
        `RandomBlocks`, `GlobalBlocks` and patterns composed of these need `sized` first.

        Args:
          i: query positions.
          j: key positions.
          h: query heads; ignored if `heads` is None.

        Returns:
          bool of the broadcast shape.
        """
        return self._allows(i, j, h)

    def sized(self, T: int, S: int | None = None, *, offset: int = 0) -> "Pattern":
        """Returns the pattern for T queries from position `offset` on, and S keys (default T).

        Only `RandomBlocks` and `GlobalBlocks` change: they depend on the number of blocks. Raises
        `ValueError` for sizes that the pattern does not support.
        """
        return self._sized(_frame(self, T, S, offset).lengths)

    def reach(self, i: Any, capacity: int) -> jax.Array:
        """Returns the positions of the keys that the query at position i reaches, each key once.

        For decoding: later keys do not exist yet. The number n of entries is static and follows the
        number of keys that one query may attend to, for windows, stripes, lists of blocks, and
        unions and intersections of these; for other patterns, n is `capacity`.

        Args:
          i: the query's position, an int or a traced scalar.
          capacity: number of keys that the cache has room for.

        Returns:
          int32 `(n,)`, or `(heads, n)` if heads differ. Entries below 0 or above i are no keys.
        """
        checks.at_least("capacity", capacity, 1, "tokens")
        sized = self._sized((capacity, capacity))
        return sized._reach(jnp.asarray(i, jnp.int32), capacity).astype(jnp.int32)

    # Methods that each pattern defines.

    def _allows(self, i: Any, j: Any, h: Any) -> Any:
        raise NotImplementedError

    def _zones(self, frame: Frame, inside: bool) -> Zones:
        """Returns the pattern, or the complement if not `inside`, as zones in a frame."""
        raise NotImplementedError

    def _check(self, frame: Frame) -> None:
        """Raises `ValueError` if the pattern does not support the sizes of the frame."""

    def _sized(self, lengths: tuple[int, int]) -> "Pattern":
        return self

    def _heads(self) -> int | None:
        return None

    def _distances(self, capacity: int) -> np.ndarray | None:
        """Returns all i - j >= 0 of a pattern that depends on i - j alone; otherwise None."""
        return None

    def _reach(self, i: jax.Array, capacity: int) -> jax.Array:
        distances = self._distances(capacity)
        return self._listed(i, capacity) if distances is None else i - distances

    def _listed(self, i: jax.Array, capacity: int) -> jax.Array:
        """Returns `reach` of a pattern without distances."""
        return self._kept(i, jnp.arange(capacity))

    def _kept(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Replaces the keys that the query may not attend to by -1."""
        heads: Any = 0
        if self.heads:
            heads, j = np.arange(self.heads)[:, None], jnp.atleast_2d(j)
        return jnp.where(self._allows(i, j, heads), j, -1)

    # Results.

    def mask(self, T: int, S: int | None = None, *, offset: int = 0) -> np.ndarray:
        """Returns the dense mask: bool `(T, S)`, or `(N, T, S)` if heads differ. O(N T S).

        Query t has position t + offset; S defaults to T.
        """
        frame = _frame(self, T, S, offset)
        sized, (i, j, h) = self._sized(frame.lengths), _positions(frame)
        out = np.empty((frame.heads, frame.queries, frame.keys), bool)
        rows = max(1, 2**22 // (frame.heads * frame.keys))
        for start in range(0, frame.queries, rows):
            part = slice(start, start + rows)
            out[:, part] = sized._allows(i[part], j, h)
        return out if self.heads else out[0]

    def layout(
        self,
        T: int,
        S: int | None = None,
        *,
        tile: tuple[int, int] = (128, 128),
        offset: int = 0,
        key_heads: int | None = None,
    ) -> BlockLayout:
        """Returns the block-sparse layout: full and partial tiles that hold an allowed pair.

        No allowed pair is left out. For windows, global positions, documents, prefixes, blocks and
        their combinations by `&` and `|`, the layout keeps exactly the tiles with an allowed pair.
        Patterns that interval arithmetic cannot decide (a `Custom` rule, thousands of stripes) are
        evaluated by element, for up to as many pairs as 32768 x 32768 tokens have; beyond that, all
        tiles that may hold an allowed pair are kept as partial. Time and memory follow the number
        of kept tiles. Results are cached.

        Args:
          T: number of queries.
          S: number of keys, by default T.
          tile: (t, s), queries and keys in a tile.
          offset: query t has position t + offset.
          key_heads: K, for patterns that differ by head. The layout of a key head keeps a tile if
            any of its heads // K query heads keeps it; the tile is full if it is full for all.

        Returns:
          A layout of NumPy arrays, without leading axes if all heads are alike, else with a leading
          axis `(K,)` or `(heads,)`.

        Raises:
          ValueError: sizes that the pattern does not support, or a `Custom` rule without bounds
            above 32768 tokens.
        """
        if checks.tile(tile) is None:
            raise ValueError("tile must be a pair (queries, keys) of positive ints, got None")
        frame = _frame(self, T, S, offset, tile)
        if key_heads is not None:
            checks.at_least("key_heads", key_heads, 1)
            if self.heads and self.heads % key_heads:
                raise ValueError(
                    f"key_heads must divide the {self.heads} heads of the pattern, got {key_heads}"
                )
        return _compiled(self, frame, key_heads)

    def tile(
        self, queries: range, keys: range, lengths: tuple[int, int] | None = None, h: int = 0
    ) -> Literal["empty", "full", "partial"]:
        """Returns whether a tile of queries and keys is empty, full or partial, in head h.

        `lengths` are the numbers of query positions and keys; by default, the ends of the ranges.
        `h` is ignored if all heads are alike.
        """
        for name, positions in (("queries", queries), ("keys", keys)):
            if not isinstance(positions, range) or not positions or positions.step != 1:
                raise ValueError(
                    f"{name} must be a range of consecutive positions, got {positions!r}"
                )
        if self.heads is None:
            h = 0
        elif not checks.is_integer(h) or not 0 <= h < self.heads:
            raise ValueError(f"h must be an int from 0 to {self.heads - 1}, got {h!r}")
        lengths = lengths or (queries.stop, keys.stop)
        _frame(self, *lengths, 0)
        frame = Frame(queries.start, len(queries), lengths[1], (len(queries), 1), self.heads or 1)
        box = zones.of(frame, keys=(keys.start, keys.stop - 1), heads=(h, h))
        parts = zones.intersection(self._zones(frame, True), box)
        if not len(parts):
            return "empty"
        filled = zones.areas(parts.low, parts.high) == len(queries) * len(keys)
        if (filled & parts.certain).any():
            return "full"
        i, j = np.array(queries)[:, None], np.array(keys)
        allowed = np.broadcast_to(self._sized(lengths)._allows(i, j, h), (len(i), len(j)))
        return "full" if allowed.all() else "partial" if allowed.any() else "empty"

    def density(self, T: int, S: int | None = None) -> float:
        """Returns the share of the T x S pairs, over all heads, that may attend.

        Exact by interval arithmetic, without `Custom` rules or thousands of stripes, for up to 2^25
        runs of keys over all rows (always, for a single window or rectangle). Else counted pair by
        pair for up to 2^28 pairs, and beyond that estimated from 256 evenly spaced rows.
        """
        frame = _frame(self, T, S, 0)
        pairs = zones.total(self._zones(frame, True), frame, _MOST_RUNS)
        every = frame.heads * frame.queries * frame.keys
        if pairs is not None:
            return pairs / every
        sized, (i, j, h) = self._sized(frame.lengths), _positions(frame)
        if every > _MOST_COUNTED:
            i = i[np.linspace(0, frame.queries - 1, _SAMPLED_ROWS).astype(int)]
        return float(np.mean([np.mean(sized._allows(row, j, h)) for row in i]))

    def graph_distance(self, T: int) -> GraphDistance:
        """Returns shortest path lengths in the graph of pairs (Zaheer et al. 2020, "Big Bird").

        An edge is a pair that may attend in any head; the length of a path is a number of layers. T
        is at most 4096. Time O(edges T / 64) for each layer up to the largest distance.
        """
        return GraphDistance(*graphs.distance(self._graph(T, _LARGEST_GRAPH, "graph_distance")))

    def spectral_gap(self, T: int) -> float:
        """Returns 1 - the second eigenvalue of the normalised adjacency (Zaheer et al. 2020).

        The matrix is D^-1/2 A D^-1/2 with A = M | M^T | I, the mask M joined over heads, and the
        degrees D; the gap is the second eigenvalue of the normalised Laplacian. The gap is 0 for a
        disconnected graph and 1 for the full graph; information mixes faster with a larger gap. T
        is at most 2048. Time O(T^3).
        """
        return graphs.spectral_gap(self._graph(T, _LARGEST_SPECTRUM, "spectral_gap"))

    def _graph(self, T: int, largest: int, what: str) -> np.ndarray:
        if checks.at_least("T", T, 1) > largest:
            raise ValueError(
                f"T must be at most {largest} for {what}, which works on the dense T x T graph, "
                f"got {T}; measure the pattern at a smaller length"
            )
        mask = self.mask(T)
        return mask.any(0) if self.heads else mask

    def __and__(self, other: "Pattern") -> "Pattern":
        if not isinstance(other, Pattern):
            return NotImplemented
        return And((*_parts(And, self), *_parts(And, other)))

    def __or__(self, other: "Pattern") -> "Pattern":
        if not isinstance(other, Pattern):
            return NotImplemented
        return Or((*_parts(Or, self), *_parts(Or, other)))

    def __invert__(self) -> "Pattern":
        return Not(self)


# Compositions


@dataclasses.dataclass(frozen=True, repr=False)
class _Composed(Pattern):
    """Base class of `And` and `Or`: patterns with united or intersected zones."""

    parts: tuple[Pattern, ...]
    _join_distances: ClassVar[Any]

    def __post_init__(self):
        known = {part.heads for part in self.parts if part.heads}
        if len(known) > 1:
            raise ValueError(f"patterns must have the same heads to compose, got {sorted(known)}")

    def _heads(self):
        return next((part.heads for part in self.parts if part.heads), None)

    def _check(self, frame):
        for part in self.parts:
            part._check(frame)

    def _sized(self, lengths):
        return type(self)(tuple(part._sized(lengths) for part in self.parts))

    def _distances(self, capacity):
        found = [part._distances(capacity) for part in self.parts]
        if any(each is None for each in found):
            return None
        return functools.reduce(self._join_distances, found)

    def _each_allows(self, *arguments):
        return (part._allows(*arguments) for part in self.parts)

    def _joined(self, join, frame, inside):
        found = [part._zones(frame, inside) for part in self.parts]
        # Small unions first: an intersection is at most as large as its first operand.
        return functools.reduce(join, sorted(found, key=len))


class And(_Composed):
    """The pairs that all of `parts` allow."""

    _join_distances = staticmethod(np.intersect1d)

    def _listed(self, i, capacity):
        found = [part._reach(i, capacity) for part in self.parts]
        least = min(range(len(found)), key=lambda n: found[n].shape[-1])
        others = (part for n, part in enumerate(self.parts) if n != least)
        return functools.reduce(lambda j, part: part._kept(i, j), others, found[least])

    def _allows(self, i, j, h):
        return functools.reduce(operator.and_, self._each_allows(i, j, h))

    def _zones(self, frame, inside):
        return self._joined(zones.intersection if inside else zones.union, frame, inside)

    def __repr__(self):
        return "(" + " & ".join(map(repr, self.parts)) + ")"


class Or(_Composed):
    """The pairs that any of `parts` allows."""

    _join_distances = staticmethod(np.union1d)

    def _listed(self, i, capacity):
        found = []
        for n, part in enumerate(self.parts):
            # A key counts for the first part that allows it.
            j = part._reach(i, capacity)
            found.append(functools.reduce(lambda j, other: (~other)._kept(i, j), self.parts[:n], j))
        lead = np.broadcast_shapes(*(j.shape[:-1] for j in found))
        return jnp.concatenate([jnp.broadcast_to(j, (*lead, j.shape[-1])) for j in found], -1)

    def _allows(self, i, j, h):
        return functools.reduce(operator.or_, self._each_allows(i, j, h))

    def _zones(self, frame, inside):
        return self._joined(zones.union if inside else zones.intersection, frame, inside)

    def __repr__(self):
        return "(" + " | ".join(map(repr, self.parts)) + ")"


@dataclasses.dataclass(frozen=True, repr=False)
class Not(Pattern):
    """The pairs that `part` does not allow."""

    part: Pattern

    def _heads(self):
        return self.part.heads

    def _allows(self, i, j, h):
        # Python's ~True is -2.
        return self.part._allows(i, j, h) ^ True

    def _zones(self, frame, inside):
        return self.part._zones(frame, not inside)

    def _check(self, frame):
        self.part._check(frame)

    def _sized(self, lengths):
        return Not(self.part._sized(lengths))

    def __invert__(self):
        return self.part

    def __repr__(self):
        return f"~{self.part!r}"


def _parts(kind: type[_Composed], pattern: Pattern) -> tuple[Pattern, ...]:
    return pattern.parts if isinstance(pattern, kind) else (pattern,)


@functools.lru_cache(maxsize=32)
def _compiled(pattern: Pattern, frame: Frame, key_heads: int | None) -> BlockLayout:
    check = zones.check_by_element(pattern._sized(frame.lengths).allows, frame)
    tiles = zones.compiled(pattern._zones(frame, True), frame, check)
    row, key, full = tiles
    lead: tuple[int, ...] = ()
    if pattern.heads:
        lead = (key_heads or frame.heads,)
        head, query = np.divmod(row, frame.grid[0])
        group = frame.heads // lead[0]
        ids = ((head // group) * frame.grid[0] + query) * frame.grid[1] + key
        ids, place = np.unique(ids, return_inverse=True)
        full = np.bincount(place, full, minlength=len(ids)) == group
        row, key = np.divmod(ids, frame.grid[1])
    rows = (*lead, frame.grid[0])
    arrays = (*packed(row[~full], key[~full], rows), *packed(row[full], key[full], rows))
    for array in arrays:
        array.flags.writeable = False
    return BlockLayout(*arrays, frame.tile, (frame.queries, frame.keys))


def _frame(pattern: Pattern, T: Any, S: Any, offset: Any, tile: Any = (256, 256)) -> Frame:
    frame = Frame(
        checks.at_least("offset", offset, 0),
        checks.at_least("T", T, 1),
        checks.at_least("S", T if S is None else S, 1),
        (int(tile[0]), int(tile[1])),
        pattern.heads or 1,
    )
    pattern._check(frame)
    return frame


def _positions(frame: Frame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query positions (T, 1), key positions (S), heads (N, 1, 1)."""
    i = np.arange(frame.first, frame.last + 1, dtype=np.int32)[:, None]
    h = np.arange(frame.heads, dtype=np.int32)[:, None, None]
    return i, np.arange(frame.keys, dtype=np.int32), h


def sides(name: str, value: Any) -> tuple[int, int]:
    """Returns (left, right) of a window given as an int or a pair."""
    pair = (value, value) if checks.is_integer(value) else value
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"{name} must be an int or a pair of ints, got {value!r}")
    return checks.at_least(name, pair[0], 0), checks.at_least(name, pair[1], 0)
