"""Streaming attention: a window, and the first tokens as attention sinks (StreamingLLM)."""

import dataclasses
import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks, mesh_axes
from effattn.arrays.axes import fold, lead, unfold
from effattn.arrays.combine import combine
from effattn.arrays.gathers import pick
from effattn.arrays.segments import positions_from, positions_from_segment_ids
from effattn.cores import attention
from effattn.naive import dot, over_pairs, with_naive
from effattn.options import Packing, Score, Sink, Softmax, Tile, declared


class Options(Packing, Score, Sink, Tile, Softmax, total=False):
    """The shared options of `streaming_attention`."""


def naive(query, key, value, pairs, *, scale, num_sinks, window_size, sink_query=None):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`. Returns output and log-sum-exp."""
    is_sink = pairs.places < num_sinks
    is_near = pairs.i[:, None] - pairs.j < window_size
    of_sinks = dot(query if sink_query is None else sink_query, key.T)
    products = scale * jnp.where(is_near, dot(query, key.T), of_sinks)
    weights, lse = pairs.where(is_near | is_sink).softmax(products)
    return dot(weights, value), lse


@with_naive(over_pairs(naive, per_query=("sink_query",)))
@declared
def streaming_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    num_sinks: int = 4,
    window_size: int,
    sink_query: jax.Array | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Streaming attention (Xiao et al. 2023, "Efficient Streaming Language Models", StreamingLLM).

    Causal softmax attention of each token to the last w tokens, itself included, and to the first
    s tokens of its document, the attention sinks:

        out_i = sum_j softmax_j(scale * q_ij . k_j) v_j    over j <= i with j > i - w or j < s

    q_ij is the query of token i, and for sinks outside the window, j <= i - w, its `sink_query`. So
    sinks can have other positions than window tokens (see `effattn.nn.StreamingSelfAttention`).

    Time O(T (w + s) (H + Hv)), memory O(T), forward and backward. Without sinks this is a causal
    `effattn.sliding_window_attention`.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      num_sinks: s, first tokens of a document that all its later tokens see; 0 or more.
      window_size: w, last tokens that a token sees, itself included; 1 or more.
      sink_query: query for the sinks outside the window, in the shape of `query`; default `query`.
      **options: padding, packing, scale, soft cap, `score_mod`, sink, dropout, log-sum-exp, tiles
        and execution: see `effattn.options`. `sink` is a learned logit, not a token. `tile`
        applies to the window.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: sizes out of range; and the errors of `effattn.options`.
    """
    name = "streaming_attention"
    num_sinks, window_size = checked_sizes(num_sinks, window_size)
    checks.known_length(name, query, key)
    given = attention.check(
        name, query, key, value, is_causal=True, local_window_size=(window_size - 1, 0), **options
    )
    checks.self_attention(name, query, key)
    if sink_query is not None:
        sink_query = checks.shaped("sink_query", sink_query, query.shape)
    with jax.named_scope(name):
        out, lse = attention.attend(query, key, value, given)
        if num_sinks and key.shape[-3]:
            to_sinks = query if sink_query is None else sink_query
            of_sinks = _attend_to_sinks(num_sinks, window_size, to_sinks, key, value, given)
            out, lse = combine((out, of_sinks[0]), (lse, of_sinks[1]))
    return attention.results(out, lse, given)


def checked_sizes(num_sinks: Any, window_size: Any) -> tuple[int, int]:
    """Returns the checked sizes, 0 or more and 1 or more tokens."""
    return (
        checks.at_least("num_sinks", num_sinks, 0, "tokens"),
        checks.at_least("window_size", window_size, 1, "tokens, the own token included"),
    )


def _attend_to_sinks(num_sinks, window_size, query, key, value, given):
    """Attention to the sinks outside the window, with a tile of queries as an example.

    A tile has no more tokens than a window. So the sinks in the tile are in the window, and the
    others belong to the document of the first token of the tile.
    """
    *batch, length, _, _ = query.shape
    axis, count = len(batch), min(num_sinks, length)
    query_ids, key_ids = attention.ids_of_valid(given, batch, length)
    if given.segments is None:
        size, first = length, jnp.zeros((*batch, 1), jnp.int32)
    else:
        size = min(window_size, length)
        own = positions_from_segment_ids(given.segments[1])
        own = lead(jnp.arange(length, dtype=jnp.int32), own.ndim) - own
        # Indices up to the last token, so that those of a tile are different.
        first = jnp.minimum(own[..., ::size], length - count)
    tiles = first.shape[-1]
    where = positions_from(first, count)
    places = fold(jnp.arange(length, dtype=jnp.int32), size, 0)
    places = jnp.broadcast_to(places, (*batch, tiles, size))

    def sinks(x):
        return mesh_axes.placed_like(x, pick, x, where)

    out, lse = attend_far(
        window_size,
        fold(query, size, axis),
        sinks(key),
        sinks(value),
        given=dataclasses.replace(given, origin=_origin_of_tiles(tiles)),
        positions=(places, where),
        segments=(fold(query_ids, size, axis), sinks(key_ids)),
    )
    return unfold(out, length, axis), unfold(lse, length, axis)


def attend_far(
    window_size: int,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    given: attention.Arguments,
    positions: tuple[jax.Array, jax.Array],
    segments: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Attention to keys at least `window_size` positions before the query.

    Positions and segment ids, 0 for padding, are those of queries `(*B, T)` and keys `(*B, S)`.
    """
    given = dataclasses.replace(
        given,
        is_causal=False,
        window=(None, -window_size),
        query_lengths=None,
        key_lengths=None,
        positions=positions,
        segments=segments,
        sink=None,
        tile=None,
    )
    return attention.attend(query, key, value, given)


@functools.cache
def _origin_of_tiles(tiles: int):
    def origin(b, h, i, j):
        return b // tiles, h, i, j

    return origin


registry.register(
    registry.Mechanism(
        name="streaming",
        family="sparse",
        paper="Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks",
        function=streaming_attention,
        capabilities=frozenset({"causal"}),
        options={"num_sinks": 4, "window_size": 128},
        builder="effattn.nn.streaming:StreamingSelfAttention",
        decoder="effattn.decode.streaming:StreamingDecoder",
        complexity="O(N (w + s))",
        time_exponent=1.0,
    )
)
