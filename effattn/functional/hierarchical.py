"""Hierarchical attention: near tokens exactly, far tokens in summaries of growing size."""

import dataclasses
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn import registry
from effattn.arrays import checks, mesh_axes
from effattn.arrays.axes import fold, lead, unfold
from effattn.arrays.combine import combine
from effattn.arrays.segments import within
from effattn.cores import attention, document_blocks, folding, packed_hierarchy, sequence_parts
from effattn.cores import hierarchy as hierarchies
from effattn.cores.hierarchy import Hierarchy, Summaries
from effattn.cores.pooling import Runs, pool, tokens
from effattn.naive import dot, masked_softmax, over_pairs, projected, with_naive
from effattn.options import Direction, Packing, Sink, Softmax, Tile, declared


class Options(Direction, Packing, Sink, Tile, Softmax, total=False):
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

    Returns output and log-sum-exp. In packed rows, units count from the start of the document.
    """
    is_same = pairs.key_ids[:, None] == pairs.key_ids
    pieces, meant, level = _pieces(pairs.places, is_same, segment_size, num_levels, num_summaries)
    present = pieces & pairs.present
    n, last = present.sum(1), jnp.where(present, pairs.places, 0).max(1, initial=0)
    c = jnp.zeros_like(key, shape=key.shape[1:]) if summary_query is None else summary_query
    w = masked_softmax(scale * projected(key, c), present)  # (P, T)
    keys, values = (w @ key).astype(key.dtype), (w @ value).astype(value.dtype)
    reached = meant & (pairs.allowed @ pieces.T)
    log_n = jnp.log(jnp.maximum(n, 1).astype(w.dtype))
    at = jnp.append(pairs.j, ~(32 * last + level)[len(key) :])  # for dropout
    weights, lse = pairs.with_keys(reached, at).softmax(scale * dot(query, keys.T), log_n)
    return dot(weights, values), lse


def _pieces(places, is_same, segment_size, num_levels, num_summaries):
    """Bool `(P, T)`, the tokens of each piece, and `(T, P)`, the pieces meant for each query.

    The first T pieces are the single tokens. For each level, T more pieces follow: piece t is that
    which token t begins, and empty if token t begins none. Returns the levels `(P,)` as well.
    """
    length = len(places)

    def same(unit):
        return is_same & (places[:, None] // unit == places // unit)

    pieces, meant, levels = [jnp.eye(length, dtype=bool)], [same(segment_size)], 0
    while levels < num_levels and segment_size * 2**levels < length:
        levels += 1
        unit = segment_size * 2 ** (levels - 1)
        size = unit // num_summaries
        pieces.append((places % size == 0)[:, None] & same(size))
        in_pair = is_same if levels == num_levels else same(2 * unit)
        meant.append(in_pair & ~same(unit))
    return jnp.concatenate(pieces), jnp.concatenate(meant, 1), jnp.arange(levels + 1).repeat(length)


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
    finished units. In packed rows, segments and units count from the start of each document, and
    belong to one document. A unit is summarised in r pieces of equal size. A piece P of n tokens
    has

        k_P = sum_{j in P} w_j k_j,   v_P = sum_{j in P} w_j v_j,   logit = scale q . k_P + log n,

    with w = 1/n, or learned w = softmax_{j in P}(scale c . k_j). The term log n makes a summary
    count as n tokens. The result equals `effattn.dot_product_attention` if keys and values are
    constant in each piece, or if one segment holds the sequence. The paper uses means as summaries
    and also averages queries for far keys; here each token keeps its query. Yang et al. 2016,
    "Hierarchical Attention Networks", use the same name for sentences that are summaries of words
    by learned weights.

    Time O(T (m + r T / m) (H + Hv)) with one level, that is O(T sqrt(T)) for m near sqrt(T), and
    O(T (m + r log2(T / m)) (H + Hv)) with log2(T / m) levels or more; memory O(T), forward and
    backward. Packed rows are moved into at most 2 T / m + 1 segments; all levels then have as many
    units, and the last one a flag in memory for each pair of segments.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, K, H)`.
      value: `(*B, T, K, Hv)`.
      segment_size: m, tokens, a multiple of r.
      num_levels: L, 1 or more. Levels with units longer than the sequence have no effect.
      num_summaries: r, pieces of a unit, 1 or more.
      summary_query: c, `(K, H)`, for learned summaries; zeros or None give means.
      **options: direction, padding, packing, scale, soft cap, sink, dropout, log-sum-exp, tiles
        and execution: see `effattn.options`. `segment_ids` are one array `(*B, T)`. Padded keys are
        in no summary. The soft cap applies before log n is added. For dropout, a summary of level l
        whose last token is token j of its document counts as key -1 - (32 j + l). With
        `num_levels=1`, kernels for GPUs and TPUs ("pallas") take the call as well.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError, NotImplementedError, TypeError: see `effattn.options`.
    """
    hierarchy = Hierarchy.of(segment_size, num_levels, num_summaries)
    document_blocks.one_array(options.get("segment_ids"), query.shape[:-2])
    given = attention.check("hierarchical_attention", query, key, value, **options)
    checks.self_attention("hierarchical_attention", query, key)
    checks.known_length("hierarchical_attention", query)
    if summary_query is not None:
        summary_query = checks.shaped("summary_query", summary_query, key.shape[-2:])
    is_packed = given.segments is not None and query.shape[-3] > hierarchy.segment
    attend = packed_hierarchy.attend if is_packed else _attend
    with jax.named_scope("hierarchical_attention"), mesh_axes.of_type(query):
        out, lse = attend(hierarchy, query, key, value, summary_query, given)
    return attention.results(out, lse, given)


def _attend(hierarchy: Hierarchy, query, key, value, summary_query, given: attention.Arguments):
    """Attends to the own segment, the siblings and units of the last level in one softmax."""
    batch, length = query.shape[:-3], query.shape[-3]
    held = sequence_parts.parts_for("hierarchical_attention", "share_keys")
    sequence_parts.check_blocks("segments", hierarchy.segment, length)
    whole, first = sequence_parts.all_tokens(length), 0 if held is None else held.index * length
    if whole <= hierarchy.segment:
        with sequence_parts.alone():
            return attention.attend(query, key, value, given)
    siblings = hierarchy.siblings(whole)
    has_others = hierarchy.segments(whole) > 2**siblings
    lengths = jnp.full(batch, length) if given.key_lengths is None else given.key_lengths
    runs = tokens(key, value, within(lengths, length), summary_query, given.scale)
    levels = []
    for level in range(1, siblings + has_others + 1):
        runs = pool(runs, hierarchy.piece(1) if level == 1 else 2)
        if level == 1 and held is not None:
            runs = Runs(*(held.gather(x, len(batch)) for x in runs))
        of_pieces = jnp.asarray(hierarchy.starts(level, runs.present.shape[-1]))
        starts = lead(of_pieces, runs.present.ndim)
        levels.append(Summaries.of(runs, starts, level, (key, value)))

    with sequence_parts.alone():
        parts = [folding.attend_inside(hierarchy.segment, query, key, value, given)]
        positions = jnp.arange(length, dtype=jnp.int32) + first
        if siblings:
            seen = _siblings(hierarchy, levels[:siblings], whole, given.is_causal)
            if held is not None:
                own = hierarchy.segments(length)
                seen = Summaries(*(held.own(x, own, len(batch)) for x in seen))
            parts.append(_attend_siblings(hierarchy, positions, query, seen, given))
        if has_others:
            others = _OtherUnits(hierarchy.unit(siblings + 1), given.is_causal)
            far = dataclasses.replace(given, pattern=others)
            parts.append(
                hierarchies.attend(hierarchy, positions, query, levels[-1], far, siblings + 1)
            )
    return combine(*zip(*parts, strict=True))


def _siblings(
    hierarchy: Hierarchy, levels: list[Summaries], length: int, is_causal: bool
) -> Summaries:
    """Returns the sibling pieces of each segment, `(*B, segments, levels * r, ...)`."""
    axis, segments = levels[0].seen.ndim - 1, hierarchy.segments(length)

    def other_half(level, array):
        pairs = fold(array, 2 * hierarchy.pieces, axis)
        before, (count, _, *rest) = pairs.shape[:axis], pairs.shape[axis:]
        halves = jnp.flip(pairs.reshape(*before, count, 2, 1, hierarchy.pieces, *rest), axis + 1)
        each = 2 ** (level - 1)
        shape = (*before, count, 2, each, hierarchy.pieces, *rest)
        of_segments = jnp.broadcast_to(halves, shape)
        of_segments = of_segments.reshape(*before, count * 2 * each, hierarchy.pieces, *rest)
        return lax.slice_in_dim(of_segments, 0, segments, axis=axis)

    each_level = []
    for level, summaries in enumerate(levels, 1):
        summaries = Summaries(*(other_half(level, array) for array in summaries))
        if is_causal:
            is_second = (np.arange(segments) >> (level - 1)) % 2 == 1
            seen = summaries.seen & lead(is_second[:, None], axis + 2)
            summaries = summaries._replace(seen=seen)
        each_level.append(summaries)
    return Summaries(*(jnp.concatenate(xs, axis + 1) for xs in zip(*each_level, strict=True)))


def _attend_siblings(
    hierarchy: Hierarchy, positions, query, summaries: Summaries, given: attention.Arguments
):
    """Attends from each segment to the pieces of its siblings."""
    length, axis, size = query.shape[-3], query.ndim - 3, hierarchy.segment
    blocks = hierarchy.segments(length)
    folded = dataclasses.replace(
        given,
        query_lengths=folding.fold_lengths(given.query_lengths, blocks, size),
        origin=folding.example_of_blocks(blocks),
    )
    positions = (jnp.arange(blocks * size, dtype=jnp.int32) + positions[0]).reshape(blocks, size)
    query = fold(query, size, axis)
    out, lse = hierarchies.attend(hierarchy, positions, query, summaries, folded)
    return unfold(out, length, axis), unfold(lse, length, axis)


@dataclasses.dataclass(frozen=True)
class _OtherUnits:
    """Pattern of pairs in different units of `size` tokens; if causal, keys in earlier units."""

    size: int
    is_causal: bool

    def allows(self, i, j, h):
        of_query, of_key = i // self.size, hierarchies.last_of(j) // self.size
        return of_key < of_query if self.is_causal else of_key != of_query


registry.register(
    registry.Mechanism(
        name="hierarchical",
        family="sparse",
        paper="Zhu and Soricut 2021, H-Transformer-1D: Fast One-Dimensional Hierarchical "
        "Attention for Sequences",
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
