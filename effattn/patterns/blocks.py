"""Patterns of blocks of tokens: global blocks, block masks and random blocks."""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays.checks import at_least, is_integer
from effattn.patterns import random_blocks, zones
from effattn.patterns.algebra import Pattern, sides
from effattn.patterns.base import lookup, tokens_of_blocks


@dataclasses.dataclass(frozen=True)
class GlobalBlocks(Pattern):
    """Global blocks at the start and end attend to all keys, and all queries attend to them.

    The last blocks are counted from the end of the queries and of the keys (Zaheer et al. 2020).
    """

    block_size: int
    first: int
    last: int = 0
    # Numbers of query positions and keys of the sequence, set by `sized`.
    lengths: tuple[int, int] | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self):
        at_least("block_size", self.block_size, 1)
        at_least("first", self.first, 0)
        at_least("last", self.last, 0)

    def _check(self, frame):
        blocks = -(-max(frame.last + 1, frame.keys) // self.block_size)
        if self.first + self.last > blocks:
            raise ValueError(
                f"global blocks must be at most {blocks}, the number of blocks of "
                f"{self.block_size} tokens, got {self.first} first and {self.last} last"
            )

    def _sized(self, lengths):
        return dataclasses.replace(self, lengths=lengths)

    def _runs(self, length):
        """Returns the first and last position that are not global."""
        blocks = -(-length // self.block_size)
        return self.first * self.block_size, (blocks - self.last) * self.block_size - 1

    def _allows(self, i, j, h):
        (low_i, high_i), (low_j, high_j) = map(self._runs, _known(self))
        return (i < low_i) | (i > high_i) | (j < low_j) | (j > high_j)

    def _listed(self, i, capacity):
        if self.last:
            raise ValueError(
                "last must be 0 in decoding, because the last blocks are not known before the "
                f"last token, got {self.last}; for BigBird pass num_global_blocks={self.first}"
            )
        # Queries of the first blocks reach no key after these blocks.
        return jnp.arange(min(self.first * self.block_size, capacity))

    def _zones(self, frame, inside):
        rows, keys = map(self._runs, frame.lengths)
        if not inside:
            return zones.of(frame, rows=rows, keys=keys)
        of_rows = zones.of(frame, rows=zones.outside(rows))
        return zones.union(of_rows, zones.of(frame, keys=zones.outside(keys)))


class FrozenArray:
    """Read-only NumPy array, compared and hashed by its contents."""

    def __init__(self, array: np.ndarray):
        self.array = np.array(array)
        self.array.flags.writeable = False
        self._contents = array.shape, array.dtype.str, hashlib.sha256(self.array.tobytes()).digest()

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype=dtype) if copy else np.asarray(self.array, dtype=dtype)

    def __eq__(self, other):
        return isinstance(other, FrozenArray) and self._contents == other._contents

    def __hash__(self):
        return hash(self._contents)

    def __repr__(self):
        return f"<{' x '.join(map(str, self.array.shape))} array>"


@dataclasses.dataclass(frozen=True)
class BlockMask(Pattern):
    """Pattern given by a bool mask over blocks of `block_size` x `block_size` tokens.

    `array` is bool `(ceil(T / block_size), ceil(S / block_size))`, or one mask for each query head,
    `(N, ..., ...)`; i attends to j where array[h, i // block_size, j // block_size]. The array must
    be concrete; `BlockLayout.from_block_mask` takes masks that a model computes.
    """

    array: Any
    block_size: int

    def __post_init__(self):
        at_least("block_size", self.block_size, 1)
        if isinstance(self.array, jax.core.Tracer):
            raise ValueError(
                "array must be known when the pattern is made, got a traced one; for a traced "
                "array use BlockLayout.from_block_mask"
            )
        array = np.asarray(self.array)
        if array.dtype != bool or array.ndim not in (2, 3) or 0 in array.shape:
            raise ValueError(
                "array must be bool of shape (query blocks, key blocks) or (heads, query blocks, "
                f"key blocks), got {array.dtype} of shape {array.shape}"
            )
        if array.ndim == 3 and len(array) == 1:
            array = array[0]
        object.__setattr__(self, "array", FrozenArray(array))

    def _heads(self):
        shape = self.array.array.shape
        return shape[0] if len(shape) == 3 else None

    def _check(self, frame):
        shape = self.array.array.shape[-2:]
        need = -(-(frame.last + 1) // self.block_size), -(-frame.keys // self.block_size)
        # Queries with an offset may read some rows of a mask for more queries.
        rows = max(shape[0], need[0]) if frame.first else need[0]
        if shape != (rows, need[1]):
            raise ValueError(
                f"array must have {need[0]} x {need[1]} blocks of {self.block_size} for "
                f"{frame.last + 1} x {frame.keys} tokens, got {shape[0]} x {shape[1]}"
            )

    def _allows(self, i, j, h):
        at = (i // self.block_size, j // self.block_size)
        return lookup(self.array.array, *((h, *at) if self.heads else at))

    def _listed(self, i, capacity):
        mask = np.tril(self.array.array)
        blocks = np.where(mask, np.arange(mask.shape[-1]), -1)
        longest = mask.sum(-1).max(initial=1)
        return BlockLists(np.sort(blocks)[..., -longest:], self.block_size)._listed(i, capacity)

    def _zones(self, frame, inside):
        array = self.array.array if inside else ~self.array.array
        runs = np.diff(np.pad(array, [(0, 0)] * (array.ndim - 1) + [(1, 1)]).astype(np.int8))
        *place, first = np.nonzero(runs == 1)
        stop = np.nonzero(runs == -1)[-1]
        if not len(first):
            return zones.none()
        head = place[0] if self.heads else np.zeros_like(first)
        row = place[-1]
        # The same run in consecutive rows is one zone.
        order = np.lexsort((row, stop, first, head))
        head, row, first, stop = (x[order] for x in (head, row, first, stop))
        same = [x[1:] == x[:-1] for x in (head, first, stop, row - np.arange(len(row)))]
        starts = np.flatnonzero(np.append(True, ~np.logical_and.reduce(same)))
        ends = np.append(starts[1:], len(row)) - 1
        size = self.block_size
        return zones.of(
            frame,
            rows=(row[starts] * size, row[ends] * size + size - 1),
            keys=(first[starts] * size, stop[starts] * size - 1),
            heads=(head[starts], head[starts]) if self.heads else zones.ANY,
        )


class _Lists(Pattern):
    """Base class of patterns that list the key blocks of each query block."""

    block_size: int

    def blocks(self, lengths: tuple[int, int]) -> Any:
        """Returns int `(rows, k)` or `(heads, rows, k)`, ascending in each row, -1 for no block."""
        raise NotImplementedError

    def _all_blocks(self) -> Any:
        return self.blocks((0, 0))

    def _allows(self, i, j, h):
        table = self._all_blocks()
        i, j = i // self.block_size, j // self.block_size
        row = (h, i) if self.heads else (i,)
        hits = (lookup(table[..., n], *row) == j for n in range(table.shape[-1]))
        return functools.reduce(lambda a, b: a | b, hits, (i < 0) & (j < 0))

    def _listed(self, i, capacity):
        table = jnp.asarray(self.blocks((capacity, capacity)))
        listed = table[..., i // self.block_size, :]
        again = jnp.diff(listed, axis=-1, prepend=-1) == 0
        return tokens_of_blocks(jnp.where(again, -1, listed), self.block_size, capacity)

    def _zones(self, frame, inside):
        row = zones.rows_of(frame, self.block_size)
        first = stop = self.blocks(frame.lengths)[..., row, :].astype(np.int64)
        if not inside:
            edge = np.zeros_like(first, shape=(*first.shape[:-1], 1))
            first = np.concatenate([edge, first + 1], -1)
            stop = np.concatenate([stop - 1, edge + frame.keys], -1)
        head = np.arange(self.heads)[:, None, None] if self.heads else None
        return zones.of(
            frame,
            rows=zones.blocks(row[:, None], self.block_size),
            keys=(zones.blocks(first, self.block_size)[0], zones.blocks(stop, self.block_size)[1]),
            heads=zones.ANY if head is None else (head, head),
        )


@dataclasses.dataclass(frozen=True)
class BlockLists(_Lists):
    """Each block of queries attends to the key blocks that a table lists for it.

    `table` is int `(rows, k)`, or `(heads, rows, k)` with one table for each head; -1 means no
    block, and a block that is listed twice counts once. A traced table only serves `allows` and
    `reach`, which need no concrete values.
    """

    table: Any
    block_size: int

    def __post_init__(self):
        at_least("block_size", self.block_size, 1)
        if isinstance(self.table, jax.core.Tracer):
            object.__setattr__(self, "table", jnp.sort(self.table, axis=-1))
        else:
            object.__setattr__(self, "table", FrozenArray(np.sort(self.table, axis=-1)))

    def _heads(self):
        shape = self._all_blocks().shape
        return shape[0] if len(shape) == 3 and shape[0] > 1 else None

    def blocks(self, lengths: tuple[int, int]) -> Any:
        """Returns the table; it does not depend on `lengths`."""
        table = self.table.array if isinstance(self.table, FrozenArray) else self.table
        return table[0] if table.ndim == 3 and len(table) == 1 else table


@dataclasses.dataclass(frozen=True)
class RandomBlocks(_Lists):
    """Each block of queries attends to `per_row` distinct key blocks, drawn uniformly.

    The blocks of row r depend only on (seed, r) and the number of key blocks (reservoir sampling;
    Li 1994, "Algorithm L"). The draw does not depend on T, and a longer S only replaces some of the
    blocks of a row by new blocks. With `causal`, row r draws from the r blocks before it, or takes
    all of these blocks if there are at most `per_row`. For rows up to the number of key blocks, the
    causal draw does not depend on S.

    The draw can leave out blocks that another part of the pattern covers (Zaheer et al. 2020, "Big
    Bird"): the `window` blocks around the query block (an odd number, or 0 for none), and the first
    and last blocks, `ends` (with `causal`, only the first blocks). If fewer than `per_row` blocks
    are left, a row takes all of them.

    With `num_heads`, heads differ: head h draws with the seed `seed + h`.
    """

    block_size: int
    per_row: int
    seed: int = 0
    causal: bool = False
    window: int = 0
    ends: tuple[int, int] = (0, 0)
    # Numbers of query positions and keys of the sequence, set by `sized`.
    lengths: tuple[int, int] | None = dataclasses.field(default=None, repr=False)
    num_heads: int | None = None

    def __post_init__(self):
        at_least("block_size", self.block_size, 1)
        at_least("per_row", self.per_row, 0)
        if not is_integer(self.seed):
            raise ValueError(f"seed must be an int, got {self.seed!r}")
        if at_least("window", self.window, 0) and self.window % 2 == 0:
            raise ValueError(f"window must be odd, or 0 for none, got {self.window}")
        object.__setattr__(self, "ends", sides("ends", self.ends))
        if self.num_heads is not None:
            at_least("num_heads", self.num_heads, 1)

    def _sized(self, lengths):
        return dataclasses.replace(self, lengths=lengths)

    def _all_blocks(self):
        return self.blocks(_known(self))

    def _heads(self):
        return self.num_heads

    def _check(self, frame):
        blocks = -(-frame.keys // self.block_size)
        if self.per_row > blocks:
            raise ValueError(
                f"per_row must be at most {blocks}, the number of key blocks of {self.block_size} "
                f"in {frame.keys} tokens, got {self.per_row}; pass fewer, or a smaller block_size"
            )

    def blocks(self, lengths: tuple[int, int]) -> np.ndarray:
        """Returns the key blocks of each query block: int32 `(rows, per_row)`, -1 for no block.

        Block numbers ascend in each row. `lengths` are the numbers of query positions and keys.
        With `num_heads`, the shape is `(num_heads, rows, per_row)`.
        """
        if self.num_heads is None:
            return _drawn(self, lengths)
        seeds = range(self.seed, self.seed + self.num_heads)
        each = (dataclasses.replace(self, seed=seed, num_heads=None) for seed in seeds)
        return np.stack([_drawn(one, lengths) for one in each])


@functools.lru_cache(maxsize=32)
def _drawn(pattern: RandomBlocks, lengths: tuple[int, int]) -> np.ndarray:
    rows, keys = (-(-length // pattern.block_size) for length in lengths)
    row, (first, last) = np.arange(rows), pattern.ends
    # The candidates of a row are [first, low) and [high, stop), on both sides of its window.
    low, high = row - pattern.window // 2, row + pattern.window // 2 + (pattern.window > 0)
    stop = 0 if pattern.causal else keys - last
    low = np.clip(low, first, max(first, keys if pattern.causal else stop))
    high = np.clip(high, first, None)
    after = np.clip(stop - high, 0, None)
    chosen = random_blocks.drawn(pattern.seed % 2**64, low - first + after, pattern.per_row).astype(
        np.int64
    )
    block = chosen + first
    block = np.where(block < low[:, None], block, chosen - (low - first)[:, None] + high[:, None])
    block = np.where(chosen < 0, -1, block).astype(np.int32)
    block.flags.writeable = False
    return block


def _known(pattern: Any) -> tuple[int, int]:
    """Returns the lengths of a sized pattern; raises `ValueError` if it is not sized."""
    if pattern.lengths is None:
        raise ValueError(
            f"{type(pattern).__name__} needs lengths, because it depends on the number of blocks, "
            "got None; call allows of pattern.sized(T, S)"
        )
    return pattern.lengths
