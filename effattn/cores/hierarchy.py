"""Units of hierarchical attention: their sizes and summaries, and the attention to summaries."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks
from effattn.cores import attention
from effattn.cores.pooling import Runs
from effattn.cores.score_mod import Score

_LEVELS = 32


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """Static configuration: segment size m, number of levels L, and pieces of a unit r."""

    segment: int
    levels: int
    pieces: int

    @classmethod
    def of(cls, segment_size: Any, num_levels: Any, num_summaries: Any) -> "Hierarchy":
        """Checks the arguments and makes a hierarchy."""
        for name, number in (("num_levels", num_levels), ("num_summaries", num_summaries)):
            if not checks.is_integer(number) or number < 1:
                raise ValueError(f"{name} must be an int, 1 or more, got {number!r}")
        if not checks.is_integer(segment_size) or segment_size < 1 or segment_size % num_summaries:
            raise ValueError(
                "segment_size must be an int of tokens, 1 or more and a multiple of "
                f"num_summaries={num_summaries}, got {segment_size!r}"
            )
        return cls(int(segment_size), int(num_levels), int(num_summaries))

    def segments(self, length: int) -> int:
        """Returns the number of segments in `length` tokens."""
        return math.ceil(length / self.segment)

    def siblings(self, length: int) -> int:
        """Returns the number of levels at which a query attends to one other unit.

        These are all levels below the last, and the last level if it has at most two units.
        """
        segments = self.segments(length)
        return self.levels - 1 if segments > 2**self.levels else max(segments - 1, 0).bit_length()

    def unit(self, level: int) -> int:
        """Returns the tokens in a unit of a level."""
        return self.segment * 2 ** (level - 1)

    def piece(self, level: int) -> int:
        """Returns the tokens in a piece of a unit of a level."""
        return self.unit(level) // self.pieces

    def starts(self, level: int, count: int) -> np.ndarray:
        """Returns the first places of `count` consecutive pieces of a level, int32."""
        return np.arange(count, dtype=np.int32) * self.piece(level)


class Summaries(NamedTuple):
    """Keys and values of pieces of units.

    Attributes:
      key: `(*B, P, K, H)`.
      value: `(*B, P, K, Hv)`.
      seen: bool `(*B, P)`, False for pieces without valid tokens.
      at: int32 `(*B, P)`, `index_of` each piece.
    """

    key: jax.Array
    value: jax.Array
    seen: jax.Array
    at: jax.Array

    @classmethod
    def of(cls, runs: Runs, start: Any, level: int, like: tuple[jax.Array, jax.Array]):
        """Summaries of a level, from its runs and the first place of each, in the dtypes of `like`.

        Places count from the start of the document, or of the row.
        """
        keys, values = (x.astype(of.dtype) for x, of in zip(runs[1:3], like, strict=True))
        last = start + jnp.maximum(runs.present, 1) - 1
        return cls(keys, values, runs.present > 0, index_of(last, level))


def index_of(last: Any, level: int) -> Any:
    """Index of a piece of a level, from the place of its last valid token; no token has it."""
    return ~(_LEVELS * last + level)


def last_of(index: Any) -> Any:
    """The place of the last valid token of the piece at an index."""
    return ~index // _LEVELS


@dataclasses.dataclass(frozen=True)
class LogTokens(Score):
    """Score function that adds log n to the logit of a piece with n tokens; its index gives n.

    The pieces are of `level`, or, if `level` is None, of any level.
    """

    hierarchy: Hierarchy
    level: int | None = None

    def __call__(self, logit, b, h, i, j) -> jax.Array:
        """The logit of query i and the piece at index j."""
        above: Any = ~j % _LEVELS - 1 if self.level is None else self.level - 1
        size = self.hierarchy.piece(1) << above
        return logit + jnp.log((last_of(j) % size + 1).astype(logit.dtype))


def attend(
    hierarchy: Hierarchy,
    positions: jax.Array,
    query: jax.Array,
    summaries: Summaries,
    given: attention.Arguments,
    level: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends from queries at `positions (*B, T)` to summaries, of one level or of several."""
    given = dataclasses.replace(
        given,
        sink=None,
        is_causal=False,
        key_lengths=None,
        mask=summaries.seen[..., None, None, :],
        positions=(jnp.broadcast_to(positions, query.shape[:-2]), summaries.at),
        score_mod=LogTokens(hierarchy, level),
    )
    return attention.attend(query, summaries.key, summaries.value, given)
