"""Sets of (query, key) pairs as unions of zones, and the tiles that zones meet and fill.

A zone is the set of pairs (i, j) of some heads with r0 <= i <= r1, c0 <= j <= c1 and
d0 <= j - i <= d1: a rectangle, a band, or the intersection of both. The intersection of two zones
is a zone. For the queries of one tile, the keys of a zone are one interval, and at least one query
of the tile reaches each key of the interval. A zone therefore meets one run of key tiles and fills
another run, and no step visits tiles that no zone meets.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

# Most pairs of zones in the intersection of two unions.
MOST_PAIRS = 2**22

# Most pairs (i, j) evaluated by element, for tiles that interval arithmetic cannot decide.
MOST_CHECKED = 2**30

# Most runs of tiles, and most pairs (i, j), in memory at a time.
_RANGES_AT_ONCE = 2**19
_PAIRS_AT_ONCE = 2**22

# Larger than any position or difference of positions.
FAR = 2**40

_most, _least = np.maximum, np.minimum

# (low, high), both included; ints or arrays.
Interval = tuple[Any, Any]
ANY: Interval = (-FAR, FAR)


@dataclasses.dataclass(frozen=True)
class Frame:
    """Range of a pattern: queries at positions first to last, keys 0 to keys - 1."""

    first: int
    queries: int
    keys: int
    tile: tuple[int, int]
    heads: int = 1

    @property
    def last(self) -> int:
        """The position of the last query."""
        return self.first + self.queries - 1

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers of query positions and keys."""
        return self.last + 1, self.keys

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of query tiles and key tiles."""
        return -(-self.queries // self.tile[0]), -(-self.keys // self.tile[1])

    def row_tile(self, n: Any) -> Interval:
        """The positions of the first and the last query of tile n."""
        start = self.first + n * self.tile[0]
        return start, np.minimum(start + self.tile[0] - 1, self.last)


@dataclasses.dataclass(frozen=True)
class Zones:
    """A union of n zones.

    Attributes:
      low, high: int64 `(n, 4)`, tight bounds of i, j, j - i and the head.
      certain: bool `(n,)`; False if the zone may also contain forbidden pairs.
    """

    low: np.ndarray
    high: np.ndarray
    certain: np.ndarray

    def __getitem__(self, index: Any) -> "Zones":
        return Zones(self.low[index], self.high[index], self.certain[index])

    def __len__(self) -> int:
        return len(self.low)


def of(
    frame: Frame,
    rows: Interval = ANY,
    keys: Interval = ANY,
    diagonals: Interval = ANY,
    heads: Interval = ANY,
    certain: bool = True,
) -> Zones:
    """Returns the zones with the given bounds, which broadcast, clipped to the frame."""
    bounds = np.broadcast_arrays(
        *(side for pair in (rows, keys, diagonals, heads) for side in pair)
    )
    low, high = (np.stack([b.reshape(-1) for b in bounds[n::2]], -1) for n in (0, 1))
    inside = np.array([[frame.first, 0, -FAR, 0], [frame.last, frame.keys - 1, FAR, frame.heads]])
    inside[1, 3] -= 1
    low, high = _most(low.astype(np.int64), inside[0]), _least(high.astype(np.int64), inside[1])
    return _closed(low, high, np.full(len(low), certain))


def none() -> Zones:
    """The empty union."""
    return Zones(np.zeros((0, 4), np.int64), np.zeros((0, 4), np.int64), np.zeros(0, bool))


def union(*parts: Zones) -> Zones:
    """Returns the union of the zones."""
    arrays = zip(*((part.low, part.high, part.certain) for part in parts), strict=True)
    return Zones(*(np.concatenate(sides) for sides in arrays))


def intersection(a: Zones, b: Zones) -> Zones:
    """Returns the intersection, or an uncertain superset if there are too many pairs of zones.

    Only pairs of zones that overlap along one axis are intersected; the axis with the fewest such
    pairs is used.
    """
    along = [_overlapping(*(x[:, n] for x in (a.low, a.high, b.low, b.high))) for n in range(3)]
    number, pairs = min(along, key=lambda axis: axis[0])
    if number > MOST_PAIRS:
        smaller = a if areas(a.low, a.high).sum() <= areas(b.low, b.high).sum() else b
        return dataclasses.replace(smaller, certain=np.zeros(len(smaller), bool))
    m, n = pairs()
    return _crossed(a[m], b[n])


def areas(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Counts the pairs (i, j) within bounds `(n, 3 or more)`, which need not be tight."""
    (a, u, d0), (b, v, d1) = low.T[:3], high.T[:3]
    width = np.maximum(v - u + 1, 0)

    def up_to(x):
        """Returns the sum over y <= x of y clipped to [0, width]."""
        held = np.clip(x, 0, width)
        return held * (held + 1) // 2 + np.maximum(x - width, 0) * width

    def below(d):
        """Counts the pairs with j - i <= d."""
        return up_to(b + d - u + 1) - up_to(a + d - u)

    return np.where((b >= a) & (d1 >= d0), below(d1) - below(d0 - 1), 0)


def _crossed(a: Zones, b: Zones) -> Zones:
    """Intersects zones of a and b one by one; a single zone broadcasts."""
    return _closed(_most(a.low, b.low), _least(a.high, b.high), a.certain & b.certain)


def _closed(low: np.ndarray, high: np.ndarray, certain: np.ndarray) -> Zones:
    """Tightens the bounds and drops empty zones."""
    (r0, c0, d0, h0), (r1, c1, d1, h1) = low.T, high.T
    low = np.stack([_most(r0, c0 - d1), _most(c0, r0 + d0), _most(d0, c0 - r1), h0], -1)
    high = np.stack([_least(r1, c1 - d0), _least(c1, r1 + d1), _least(d1, c1 - r0), h1], -1)
    held = (low <= high).all(-1)
    return Zones(low[held], high[held], certain[held])


def _overlapping(a0, a1, b0, b1) -> tuple[int, Callable[[], tuple[np.ndarray, np.ndarray]]]:
    """Counts overlapping pairs of intervals [a0, a1] and [b0, b1]; also returns their finder."""
    # If two intervals overlap, one starts within the other.
    in_b, in_a = np.argsort(b0), np.argsort(a0)
    b_first, b_stop = np.searchsorted(b0[in_b], a0), np.searchsorted(b0[in_b], a1, "right")
    a_first, a_stop = (np.searchsorted(a0[in_a], b, "right") for b in (b0, b1))
    number = int((b_stop - b_first).sum() + (a_stop - a_first).sum())

    def pairs():
        m, place = expanded(b_first, b_stop)
        n, other = expanded(a_first, a_stop)
        return np.concatenate([m, in_a[other]]), np.concatenate([in_b[place], n])

    return number, pairs


def expanded(first: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all (m, x) with first[m] <= x < stop[m]."""
    counts = np.maximum(stop - first, 0)
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(counts.cumsum() - counts - first, counts)


class Ranges(NamedTuple):
    """Key tiles that each zone meets and fills in each query tile of each head.

    Attributes:
      zone, head, query: `(n,)`, the zone, the head and the query tile.
      first, last: key tiles that the zone meets.
      full_first, full_last: key tiles that the zone fills; none if full_first > full_last.
    """

    zone: np.ndarray
    head: np.ndarray
    query: np.ndarray
    first: np.ndarray
    last: np.ndarray
    full_first: np.ndarray
    full_last: np.ndarray


def _ranges(parts: Zones, frame: Frame) -> Ranges:
    (t, s), keys = frame.tile, frame.keys
    owner, head = expanded(parts.low[:, 3], parts.high[:, 3] + 1)
    zone, query = expanded(
        (parts.low[owner, 0] - frame.first) // t, (parts.high[owner, 0] - frame.first) // t + 1
    )
    zone, head = owner[zone], head[zone]
    (r0, c0, d0, _), (r1, c1, d1, _) = parts.low[zone].T, parts.high[zone].T
    start, end = frame.row_tile(query)
    first = _most(c0, _most(start, r0) + d0) // s
    last = _least(c1, _least(end, r1) + d1) // s
    whole_low, whole_high = _most(c0, end + d0), _least(c1, start + d1)
    full_last = np.where(whole_high >= keys - 1, -(-keys // s), (whole_high + 1) // s) - 1
    full_last = np.where((r0 <= start) & (end <= r1) & parts.certain[zone], full_last, -1)
    return Ranges(zone, head, query, first, last, -(-whole_low // s), full_last)


def _in_pieces(parts: Zones, frame: Frame) -> Iterable[Zones]:
    """Cuts the zones by query tiles, so that each piece has a bounded number of ranges."""
    t, queries = frame.tile[0], frame.grid[0]
    heads = parts.high[:, 3] - parts.low[:, 3] + 1
    first, last = ((side[:, 0] - frame.first) // t for side in (parts.low, parts.high))
    starts = np.bincount(first, heads, minlength=queries + 1)
    ends = np.bincount(last + 1, heads, minlength=queries + 1)
    total = (starts - ends)[:queries].cumsum().cumsum()
    if total[-1] <= _RANGES_AT_ONCE:
        yield parts
        return
    cuts = np.searchsorted(total, np.arange(0, total[-1], _RANGES_AT_ONCE), "right")
    cuts = np.unique(np.concatenate([cuts, [0, queries]]))
    for n, stop in zip(cuts[:-1], cuts[1:], strict=True):
        rows = frame.row_tile(n)[0], frame.row_tile(stop - 1)[1]
        touched = (first < stop) & (last >= n)
        yield _crossed(parts[touched], of(frame, rows=rows))


class Tiles(NamedTuple):
    """Tiles that zones meet, each once, in ascending order.

    Attributes:
      row: `(n,)`, head * query tiles + query tile.
      key: `(n,)`, the key tile.
      full: bool `(n,)`, whether all pairs of the tile within the lengths are allowed.
    """

    row: np.ndarray
    key: np.ndarray
    full: np.ndarray


# Takes tiles (head, query tile, key tile), `(n,)` each; returns whether any pair of each tile is
# allowed, and whether all pairs are.
Check = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def compiled(parts: Zones, frame: Frame, check: Check) -> Tiles:
    """Returns the tiles of a union of zones.

    A tile that a certain zone meets is kept, and a tile that a certain zone fills is full. `check`
    decides two groups of tiles: those that only uncertain zones meet, and those that several zones
    may fill together. A group with more than MOST_CHECKED pairs is not checked: its tiles are kept
    as partial.

    Time and memory follow the number of runs of tiles that zones meet, and the number of kept
    tiles.
    """
    queries, keys = frame.grid
    # Tile ids count through rows; one unused id after each row separates runs of different rows.
    stride = keys + 1
    collected: list[list[np.ndarray]] = [[], [], [], []]
    for piece in _in_pieces(parts, frame):
        ranges = _ranges(piece, frame)
        origin = (ranges.head * queries + ranges.query) * stride
        sure = piece.certain[ranges.zone]
        first, last = origin + ranges.first, origin + ranges.last
        kept = _merged(first[sure], last[sure])
        filled = ranges.full_first <= ranges.full_last
        full = _merged((origin + ranges.full_first)[filled], (origin + ranges.full_last)[filled])
        unsure = _without(_merged(first[~sure], last[~sure]), kept)
        several = _without(_crowded(piece, ranges, first, last, frame), full)
        several = several[_within(several, kept)]
        several = several[_might_fill(piece, ranges, first, last, several, stride, frame)]
        found = _listed(kept), _listed(full), unsure, several
        for pieces, ids in zip(collected, found, strict=True):
            pieces.append(ids)
    kept_ids, full_ids, unsure, several = map(np.concatenate, collected)

    def settle(ids):
        row, key = np.divmod(ids, stride)
        head, query = np.divmod(row, queries)
        return check(head, query, key)

    budget = MOST_CHECKED // (frame.tile[0] * frame.tile[1])
    if 0 < unsure.size <= budget:
        some, every = settle(unsure)
        full_ids, unsure = np.concatenate([full_ids, unsure[every]]), unsure[some]
    if 0 < several.size <= budget:
        full_ids = np.concatenate([full_ids, several[settle(several)[1]]])
    ids = np.sort(np.concatenate([kept_ids, unsure]))
    row, key = np.divmod(ids, stride)
    return Tiles(row, key, np.isin(ids, full_ids, assume_unique=True))


def total(parts: Zones, frame: Frame, limit: int) -> int | None:
    """Counts the pairs (head, i, j) of a union of zones.

    None if a zone is uncertain, or if there are more than `limit` runs of keys: one for each zone,
    head and query.
    """
    frame = dataclasses.replace(frame, tile=(1, 1))
    extent = parts.high - parts.low + 1
    if not parts.certain.all():
        return None
    if len(parts) == 1:
        return int(areas(parts.low, parts.high)[0] * extent[0, 3])
    if (extent[:, 0] * extent[:, 3]).sum() > limit:
        return None
    pairs = 0
    for piece in _in_pieces(parts, frame):
        ranges = _ranges(piece, frame)
        origin = (ranges.head * frame.queries + ranges.query) * (frame.keys + 1)
        first, last = _merged(origin + ranges.first, origin + ranges.last)
        pairs += int((last - first + 1).sum())
    return pairs


Runs = tuple[np.ndarray, np.ndarray]


def _merged(first: np.ndarray, last: np.ndarray) -> Runs:
    """Merges runs of integers that overlap or touch, in ascending order."""
    order = np.argsort(first)
    first, reach = first[order], np.maximum.accumulate(last[order])
    new = np.ones(len(first), bool)
    new[1:] = first[1:] > reach[:-1] + 1
    return first[new], reach[np.append(new[1:], True)] if len(first) else reach


def _listed(runs: Runs) -> np.ndarray:
    return expanded(runs[0], runs[1] + 1)[1]


def _within(ids: np.ndarray, runs: Runs) -> np.ndarray:
    place = np.searchsorted(runs[0], ids, "right") - 1
    return (place >= 0) & (ids <= np.append(runs[1], -1)[place])


def _without(found: Runs, taken: Runs) -> np.ndarray:
    ids = _listed(found)
    return ids[~_within(ids, taken)]


def _crowded(piece: Zones, ranges: Ranges, first, last, frame: Frame) -> Runs:
    """Runs of tiles that several zones meet and, by their widths, could fill together."""
    (r0, c0, d0, _), (r1, c1, d1, _) = piece.low[ranges.zone].T, piece.high[ranges.zone].T
    start, end = frame.row_tile(ranges.query)
    rows = _least(end, r1) - _most(start, r0) + 1
    share = rows / (end - start + 1) * _least(1, (_least(c1 - c0, d1 - d0) + 1) / frame.tile[1])
    # The last key tile may be narrower than the others, so any width may fill it.
    share = np.where(c1 // frame.tile[1] == frame.grid[1] - 1, 1.0, share)
    places = np.concatenate([first, last + 1])
    order = np.argsort(places)
    places = places[order]
    number = np.repeat([1, -1], len(first))[order].cumsum()
    covered = np.concatenate([share, -share])[order].cumsum()
    dense = (number >= 2) & (covered > 1 - 1e-6)
    dense[:-1] &= places[1:] > places[:-1]
    held = np.flatnonzero(dense)
    return places[held], places[held + 1] - 1


def _might_fill(piece: Zones, ranges: Ranges, first, last, ids, stride, frame: Frame) -> np.ndarray:
    """Returns whether the areas of the zones in each tile of `ids` sum to the tile, or more."""
    s, queries = frame.tile[1], frame.grid[0]
    at, place = expanded(np.searchsorted(ids, first), np.searchsorted(ids, last, "right"))
    row, key = np.divmod(ids, stride)
    start, end = frame.row_tile(row % queries)
    key_end = _least(key * s + s, frame.keys) - 1
    low, high = (side[ranges.zone[at], :3].copy() for side in (piece.low, piece.high))
    low[:, 0], high[:, 0] = _most(low[:, 0], start[place]), _least(high[:, 0], end[place])
    low[:, 1], high[:, 1] = _most(low[:, 1], key[place] * s), _least(high[:, 1], key_end[place])
    covered = np.bincount(place, areas(low, high), minlength=len(ids))
    return covered >= (end - start + 1) * (key_end - key * s + 1)


def check_by_element(allows: Callable[..., Any], frame: Frame) -> Check:
    """Returns a `Check` that evaluates `allows(i, j, h)` at all pairs of the tiles, in batches."""
    t, s = frame.tile
    i, j = np.arange(t, dtype=np.int32)[:, None], np.arange(s, dtype=np.int32)
    at_once = max(1, _PAIRS_AT_ONCE // (t * s))

    def check(head, query, key):
        some, every = np.zeros((2, len(head)), bool)
        for start in range(0, len(head), at_once):
            part = slice(start, start + at_once)
            h, q, k = (x[part, None, None].astype(np.int32) for x in (head, query, key))
            inside = (q * t + i < frame.queries) & (k * s + j < frame.keys)
            rows = _least(frame.first + q * t + i, frame.last)
            allowed = np.asarray(allows(rows, _least(k * s + j, frame.keys - 1), h))
            allowed = np.broadcast_to(allowed, inside.shape)
            some[part] = (allowed & inside).any((1, 2))
            every[part] = (allowed | ~inside).all((1, 2))
        return some, every

    return check


def runs_of(values: Sequence[int] | np.ndarray) -> Interval:
    """Returns the runs of consecutive integers in ascending, distinct integers."""
    values = np.asarray(values, np.int64)
    return _merged(values, values)


def gaps_between(runs: Interval) -> Interval:
    """Returns the intervals before, between and after `runs`, which ascend and lie apart."""
    return np.append(-FAR, runs[1] + 1), np.append(runs[0] - 1, FAR)


def outside(interval: Interval) -> Interval:
    """Returns the ranges below and above each interval, on a new first axis."""
    low, high = np.asarray(interval[0]), np.asarray(interval[1])
    return (
        np.stack([np.full_like(low, -FAR), high + 1]),
        np.stack([low - 1, np.full_like(high, FAR)]),
    )


def rows_of(frame: Frame, size: int) -> np.ndarray:
    """Returns the numbers of the blocks of `size` that contain queries of a frame."""
    return np.arange(frame.first // size, frame.last // size + 1)


def blocks(n: Any, size: int) -> Interval:
    """Returns the first and last positions of blocks n."""
    return n * size, n * size + size - 1
