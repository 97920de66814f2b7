"""Sparse softmax attention: over the pairs of a pattern or the tiles of a layout."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn import dispatch
from effattn.arrays import checks
from effattn.cores import attention
from effattn.functional import softmax
from effattn.naive import over_pairs, with_naive
from effattn.options import Direction, Offset, Packing, Score, Sink, Softmax, Tile, declared
from effattn.patterns import Causal, Pattern
from effattn.patterns.layouts import BlockLayout
from effattn.xla import tiling


class Options(Direction, Offset, Packing, Score, Sink, Tile, Softmax, total=False):
    """The shared options of `sparse_attention`."""


def naive(query, key, value, pairs, *, scale):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`, pairs of the pattern or layout.

    Returns output and log-sum-exp.
    """
    return softmax.naive(query, key, value, pairs, scale=scale)


def _dense_mask(query, key, *, pattern, layout, query_offset, **_):
    """The pairs of the pattern or of the layout, broadcastable to `(*B, N, T, S)`."""
    queries, heads, keys = query.shape[-3], query.shape[-2], key.shape[-3]
    if 0 in (queries, keys):
        return {}
    if pattern is not None:
        return {"mask": pattern.mask(queries, keys, offset=query_offset)}
    row, column = np.arange(queries) // layout.tile[0], np.arange(keys) // layout.tile[1]
    mask = jnp.asarray(layout.block_mask())[..., row[:, None], column]  # (*L, T, S)
    return {"mask": mask if mask.ndim == 2 else jnp.repeat(mask, heads // mask.shape[-3], -3)}


@with_naive(over_pairs(naive, derived=_dense_mask))
@declared
def sparse_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    pattern: Pattern | None = None,
    layout: BlockLayout | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Softmax attention over the pairs of a pattern, computed only in tiles with such pairs.

    A pattern (`effattn.patterns`) is compiled once, outside of the program, to a block-sparse
    layout; full tiles skip the element mask. A layout (`BlockLayout`) is a choice of tiles made
    beforehand or from data under `jit`, such as the key blocks with the highest scores; all pairs
    of these tiles may attend. A layout may differ by key head and by example.

    Time O(P (H + Hv)) for the P pairs of the tiles visited, memory O(T + S), forward and backward.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, S, K, H)`, N a multiple of K.
      value: `(*B, S, K, Hv)`.
      pattern: the pairs that may attend, by position; a pattern may differ by query head.
      layout: the tiles to visit, with `lengths` (T, S). Give either `pattern` or `layout`.
      **options: direction, offset, padding, packing, scale, soft cap, `score_mod`, sink, dropout,
        log-sum-exp, tiles and execution: see `effattn.options`. Causal calls see nothing at
        later positions, whatever the pattern says. `query_offset` may be an array only with a
        layout; `tile` applies to a pattern.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values.
      NotImplementedError: a named implementation does not take these arguments.
    """
    given = attention.check("sparse_attention", query, key, value, **options)
    checks.known_length("sparse_attention", query, key)
    if (pattern is None) == (layout is None):
        raise ValueError(
            "sparse_attention needs one of pattern and layout, got "
            + ("neither" if pattern is None else "both")
        )
    if pattern is not None:
        given = with_pattern(query, key, given, pattern)
    else:
        given = _with_layout(query, key, given, layout)
    with jax.named_scope("sparse_attention"):
        out, lse = attention.attend(query, key, value, given)
    return attention.results(out, lse, given)


def _with_layout(query, key, given: attention.Arguments, layout) -> attention.Arguments:
    queries, keys = query.shape[-3], key.shape[-3]
    if not isinstance(layout, BlockLayout):
        raise ValueError(
            f"layout must be an effattn.BlockLayout, got {type(layout).__name__}; "
            "BlockLayout.from_block_mask and .from_indices make one of arrays"
        )
    if layout.lengths != (queries, keys):
        raise ValueError(
            f"layout must have the lengths of query and key, {(queries, keys)}, got "
            f"{layout.lengths}; make it with lengths={(queries, keys)}"
        )
    leading, shape = layout.partial_counts.shape[:-1], (*query.shape[:-3], key.shape[-2])
    if len(leading) > len(shape) or any(
        a not in (1, b) for a, b in zip(reversed(leading), reversed(shape), strict=False)
    ):
        raise ValueError(
            "layout must have no axes before its tiles, or axes that broadcast to (*B, K) = "
            f"{shape}, one for each key head, got {leading}"
        )
    if given.tile is not None and given.tile != layout.tile:
        raise ValueError(
            f"tile must be None or the tile of layout, {layout.tile}, got {given.tile}"
        )
    return dataclasses.replace(given, layout=layout)


def with_pattern(query, key, given: attention.Arguments, pattern: Pattern) -> attention.Arguments:
    """Returns the arguments restricted to a pattern, combined with causality."""
    queries, heads = query.shape[-3:-1]
    keys, key_heads = key.shape[-3:-1]
    if not isinstance(pattern, Pattern):
        raise ValueError(
            f"pattern must be an effattn.patterns.Pattern, got {type(pattern).__name__}; "
            "a function mask(i, j) becomes one with effattn.patterns.Custom(mask)"
        )
    if not isinstance(given.query_offset, int):
        raise ValueError(
            "query_offset must be an int in a call with pattern, which is evaluated at trace "
            f"time, got {given.query_offset}; with a layout it may be an array"
        )
    if pattern.heads not in (None, heads):
        raise ValueError(
            f"pattern must be the same for all heads or have the {heads} heads of query, got a "
            f"pattern of {pattern.heads} heads"
        )
    if 0 in (queries, keys):
        return given  # no pairs, so no tiles either
    for_kernels = dispatch.asks_for_kernels(
        given.implementation, dispatch.suited(query.dtype, queries)
    )
    tile = given.tile or tiling.choose_sparse_tile((queries, keys), for_kernels=for_kernels)

    def in_tiles(pattern):
        sized = pattern.sized(queries, keys, offset=given.query_offset)
        layout = sized.layout(
            queries, keys, tile=tile, offset=given.query_offset, key_heads=key_heads
        )
        # If all tiles are full, no element mask is needed.
        return layout, sized if np.any(layout.partial_counts) else None

    layout, of_elements = in_tiles(pattern & Causal() if given.is_causal else pattern)
    if of_elements is not None and given.is_causal and in_tiles(pattern)[1] is None:
        of_elements = Causal()  # blocks of whole tiles: a test of positions, no read of a table
    return dataclasses.replace(given, is_causal=False, pattern=of_elements, layout=layout)
