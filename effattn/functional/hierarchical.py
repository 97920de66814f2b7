"""Hierarchical attention: near tokens exactly, far tokens in summaries of growing size."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn import registry
from effattn.arrays import checks, mesh_axes
from effattn.arrays.axes import lead
from effattn.arrays.combine import combine
from effattn.arrays.segments import within
from effattn.cores import attention, folding, sequence_parts
from effattn.cores.pooling import Runs, pool, tokens
from effattn.cores.score_mod import Score
from effattn.naive import dot, masked_softmax, over_pairs, projected, with_naive
from effattn.options import Direction, Sink, Softmax, Tile, declared


class Options(Direction, Sink, Tile, Softmax, total=False):
    """The shared options of `hierarchical_attention`."""


def naive(
    query,
    key,
    value,
    pairs,
    *,
    scale,
    segment_size,
    num_levels,
    num_summaries,
    summary_query=None,
):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`, summary_query c `(H,)`.

    Returns output and log-sum-exp.
    """
    pieces, meant = _pieces(len(key), segment_size, num_levels, num_summaries)
    present = pieces & pairs.present
    n, last = present.sum(1), jnp.where(present, pairs.j, 0).max(1, initial=0)
    c = jnp.zeros_like(key, shape=key.shape[1:]) if summary_query is None else summary_query
    w = masked_softmax(scale * projected(key, c), present)  # (P, T)
    keys, values = (w @ key).astype(key.dtype), (w @ value).astype(value.dtype)
    reached = meant & (pairs.allowed @ pieces.T)
    log_n = jnp.log(jnp.maximum(n, 1).astype(w.dtype))
    weights, lse = pairs.with_keys(reached, last).softmax(scale * dot(query, keys.T), log_n)
    return dot(weights, values), lse


def _pieces(length, segment_size, num_levels, num_summaries):
    """Bool `(P, T)`, the tokens of each piece, and `(T, P)`, the pieces meant for each query.

    The first T pieces are the single tokens.
    """

    def same(a, b, unit):
        return a[:, None] // unit == b // unit

    t = np.arange(length)
    pieces, meant = [np.eye(length, dtype=bool)], [same(t, t, segment_size)]
    for level in range(1, num_levels + 1):
        unit = segment_size * 2 ** (level - 1)
        size = unit // num_summaries
        first = np.arange(0, length, size)
        pieces.append(same(first, t, size))
        in_pair = level == num_levels or same(t, first, 2 * unit)
        meant.append(in_pair & ~same(t, first, unit))
    return np.concatenate(pieces), np.concatenate(meant, 1)


@with_naive(over_pairs(naive, per_head={"summary_query": 1}))
@declared
def hierarchical_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    segment_size: int,
    num_levels: int = 1,
    num_summaries: int = 1,
    summary_query: jax.Array | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Hierarchical attention (Zhu and Soricut 2021, "H-Transformer-1D").

    A segment has m tokens. A unit of level l = 1..L has m 2^(l-1) tokens: a unit of level 1 is a
    segment, and a unit of level l + 1 is two units of level l. A query attends to

        level 0          the tokens of its own segment,
        level l < L      the summaries of the other half of its unit of level l + 1,
        level L          the summaries of all units except its own,

    which covers every token once. Causal queries attend to earlier tokens of their segment and to
    finished units. A unit is summarised in r pieces of equal size. A piece P of n tokens has

        k_P = sum_{j in P} w_j k_j,   v_P = sum_{j in P} w_j v_j,   logit = scale q . k_P + log n,

    with w = 1/n, or learned w = softmax_{j in P}(scale c . k_j). The term log n makes a summary
    count as n tokens. The result equals `effattn.dot_product_attention` if keys and values are
    constant in each piece, or if one segment holds the sequence. The paper uses means as summaries
    and also averages queries for far keys; here each token keeps its query. Yang et al. 2016,
    "Hierarchical Attention Networks", use the same name for sentences that are summaries of words
    by learned weights.

    Time O(T (m + r T / m) (H + Hv)) with one level, that is O(T sqrt(T)) for m near sqrt(T), and
    O(T (m + r log2(T / m)) (H + Hv)) with log2(T / m) levels or more; memory O(T), forward and
    backward.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, K, H)`.
      value: `(*B, T, K, Hv)`.
      segment_size: m, tokens, a multiple of r.
      num_levels: L, 1 or more. Levels with units longer than the sequence have no effect.
      num_summaries: r, pieces of a unit, 1 or more.
      summary_query: c, `(K, H)`, for learned summaries; zeros or None give means.
      **options: direction, padding, scale, soft cap, sink, dropout, log-sum-exp, tiles and
        execution: see `effattn.options`. Padded keys are in no summary. The soft cap applies before
        log n is added. Dropout drops the weight of a summary where exact attention would drop the
        weight of the summary's last token. With `num_levels=1`, kernels for GPUs and TPUs
        ("pallas") take the call as well.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError, NotImplementedError, TypeError: see `effattn.options`.
    """
    hierarchy = Hierarchy.of(segment_size, num_levels, num_summaries)
    given = attention.check("hierarchical_attention", query, key, value, **options)
    checks.self_attention("hierarchical_attention", query, key)
    checks.known_length("hierarchical_attention", query)
    if summary_query is not None:
        summary_query = checks.shaped("summary_query", summary_query, key.shape[-2:])
    with jax.named_scope("hierarchical_attention"), mesh_axes.of_type(query):
        out, lse = _attend(hierarchy, query, key, value, summary_query, given)
    return attention.results(out, lse, given)


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


class _Keys(NamedTuple):
    """Keys and values of the pieces of units.

    Attributes:
      key: `(*B, P, K, H)`.
      value: `(*B, P, K, Hv)`.
      seen: bool `(*B, P)`, False for pieces without valid tokens.
      last: int32 `(*B, P)`, position of the last valid token of the piece.
    """

    key: jax.Array
    value: jax.Array
    seen: jax.Array
    last: jax.Array


def _attend(hierarchy: Hierarchy, query, key, value, summary_query, given: attention.Arguments):
    """Attends to the own segment, the siblings and units of the last level in one softmax."""
    batch, length = query.shape[:-3], query.shape[-3]
    held = sequence_parts.taken("hierarchical_attention", "share_keys")
    sequence_parts.check_blocks("segments", hierarchy.segment, length)
    whole, first = sequence_parts.all_tokens(length), 0 if held is None else held.index * length
    if whole <= hierarchy.segment:
        with sequence_parts.alone():
            return attention.attend(query, key, value, given)
    siblings = hierarchy.siblings(whole)
    has_others = hierarchy.segments(whole) > 2**siblings
    lengths = jnp.full(batch, length) if given.key_lengths is None else given.key_lengths
    present = within(lengths, length)
    runs = tokens(key, value, present, summary_query, given.scale)
    levels = []
    for level in range(1, siblings + has_others + 1):
        runs = pool(runs, hierarchy.piece(1) if level == 1 else 2)
        if level == 1 and held is not None:
            runs = Runs(*(held.gather(x, len(batch)) for x in runs))
        start = jnp.arange(runs.present.shape[-1], dtype=jnp.int32) * hierarchy.piece(level)
        last = lead(start, runs.present.ndim) + jnp.maximum(runs.present, 1) - 1
        keys, values = runs.key.astype(key.dtype), runs.value.astype(value.dtype)
        levels.append(_Keys(keys, values, runs.present > 0, last))

    with sequence_parts.alone():
        parts = [folding.attend_inside(hierarchy.segment, query, key, value, given)]
        far = dataclasses.replace(given, sink=None, is_causal=False, key_lengths=None)
        positions = jnp.arange(length) + first
        if siblings:
            seen = _siblings(hierarchy, levels[:siblings], whole, given.is_causal)
            if held is not None:
                own = hierarchy.segments(length)
                seen = _Keys(*(held.own(x, own, len(batch)) for x in seen))
            parts.append(_attend_siblings(hierarchy, positions, query, seen, far))
        if has_others:
            level = siblings + 1
            others = _OtherUnits(hierarchy.unit(level), given.is_causal)
            weight = _LogTokens(hierarchy, level)
            far = dataclasses.replace(far, pattern=others, score_mod=weight)
            parts.append(_attend_summaries(positions, query, levels[siblings], far))
    return combine(*zip(*parts, strict=True))


def _siblings(hierarchy: Hierarchy, levels: list[_Keys], length: int, is_causal: bool) -> _Keys:
    """Returns the sibling pieces of each segment, `(*B, segments, levels * r, ...)`."""
    axis, segments = levels[0].seen.ndim - 1, hierarchy.segments(length)

    def other_half(level, array):
        pairs = folding.fold(array, 2 * hierarchy.pieces, axis)
        before, (count, _, *rest) = pairs.shape[:axis], pairs.shape[axis:]
        halves = jnp.flip(pairs.reshape(*before, count, 2, 1, hierarchy.pieces, *rest), axis + 1)
        each = 2 ** (level - 1)
        shape = (*before, count, 2, each, hierarchy.pieces, *rest)
        of_segments = jnp.broadcast_to(halves, shape)
        of_segments = of_segments.reshape(*before, count * 2 * each, hierarchy.pieces, *rest)
        return lax.slice_in_dim(of_segments, 0, segments, axis=axis)

    each_level = []
    for level, keys in enumerate(levels, 1):
        keys = _Keys(*(other_half(level, array) for array in keys))
        if is_causal:
            is_second = (np.arange(segments) >> (level - 1)) % 2 == 1
            keys = keys._replace(seen=keys.seen & lead(is_second[:, None], axis + 2))
        each_level.append(keys)
    return _Keys(*(jnp.concatenate(arrays, axis + 1) for arrays in zip(*each_level, strict=True)))


def _attend_siblings(
    hierarchy: Hierarchy, positions, query, keys: _Keys, given: attention.Arguments
):
    """Attends from each segment to the pieces of its siblings."""
    length, axis, size = query.shape[-3], query.ndim - 3, hierarchy.segment
    blocks = hierarchy.segments(length)
    folded = dataclasses.replace(
        given,
        query_lengths=folding.fold_lengths(given.query_lengths, blocks, size),
        score_mod=_LogTokens(hierarchy, None),
        origin=_example_of_blocks(blocks),
    )
    positions = (jnp.arange(blocks * size) + positions[0]).reshape(blocks, size)
    out, lse = _attend_summaries(positions, folding.fold(query, size, axis), keys, folded)
    return folding.unfold(out, length, axis), folding.unfold(lse, length, axis)


def _attend_summaries(positions, query, keys: _Keys, given: attention.Arguments):
    """Attends from queries at `positions` to pieces, at the positions of their last tokens."""
    positions = jnp.broadcast_to(positions.astype(jnp.int32), query.shape[:-2])
    seen = keys.seen[..., None, None, :]
    given = dataclasses.replace(given, mask=seen, positions=(positions, keys.last))
    return attention.attend(query, keys.key, keys.value, given)


@functools.cache
def _example_of_blocks(blocks: int):
    return lambda b, h, i, j: (b // blocks, h, i, j)


@dataclasses.dataclass(frozen=True)
class _LogTokens(Score):
    """Score function that adds log n to the logit of a piece with n tokens.

    The position of the last token of the piece gives n. The piece belongs to a unit of `level`, or,
    if `level` is None, to a sibling of any level.
    """

    hierarchy: Hierarchy
    level: int | None

    def __call__(self, logit, b, h, i, j):
        below: Any = self.level - 1 if self.level is not None else self._sibling(i, j)
        size = self.hierarchy.piece(1) << below
        return logit + jnp.log((j % size + 1).astype(logit.dtype))

    def _sibling(self, i, j):
        """Returns the level of a sibling, minus 1: the highest bit in which the segments differ."""
        apart = (i // self.hierarchy.segment) ^ (j // self.hierarchy.segment)
        return 31 - lax.clz(apart | 1)


@dataclasses.dataclass(frozen=True)
class _OtherUnits:
    """Pattern of pairs in different units of `size` tokens; if causal, keys in earlier units."""

    size: int
    is_causal: bool

    def allows(self, i, j, h):
        of_query, of_key = i // self.size, j // self.size
        return of_key < of_query if self.is_causal else of_key != of_query


registry.register(
    registry.Mechanism(
        name="hierarchical",
        family="sparse",
        paper="Zhu and Soricut 2021, H-Transformer-1D",
        function=hierarchical_attention,
        options={"segment_size": 64, "num_levels": 16, "num_summaries": 8},
        decoder="effattn.decode.hierarchical:HierarchicalDecoder",
        # One level costs more; with many levels, segments need not grow with the length.
        options_at=lambda length: {
            "segment_size": 8 * math.ceil(math.isqrt(length) / 8),
            "num_levels": 1,
        },
        complexity="O(N sqrt N) to O(N log N)",
        time_exponent=1.5,
    )
)
