"""Longformer attention: a sliding window and global tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from effattn import registry
from effattn.arrays import checks
from effattn.arrays.combine import combine
from effattn.arrays.gathers import rows_at
from effattn.arrays.segments import within
from effattn.cores import attention
from effattn.functional import sliding_window, softmax
from effattn.naive import over_pairs, with_naive
from effattn.options import Direction, Packing, Score, Softmax, Tile, declared


class Options(Direction, Packing, Score, Tile, Softmax, total=False):
    """The shared options of `longformer_attention`."""


def naive(
    query,
    key,
    value,
    pairs,
    *,
    scale,
    local_window_size,
    dilation,
    global_mask=None,
    max_global=None,
    global_query=None,
    global_key=None,
    global_value=None,
):
    """One head: query `(T, H)`, key `(T, H)`, value `(T, Hv)`. Returns output and log-sum-exp."""
    near = sliding_window.in_window(pairs, local_window_size, dilation)
    if global_mask is None:
        return softmax.naive(query, key, value, pairs.where(near), scale=scale)
    is_global = global_mask & (jnp.cumsum(global_mask) <= max_global)
    out, lse = softmax.naive(query, key, value, pairs.where(near | is_global), scale=scale)
    query = query if global_query is None else global_query
    key = key if global_key is None else global_key
    value = value if global_value is None else global_value
    of_global, global_lse = softmax.naive(query, key, value, pairs, scale=scale)
    out = jnp.where(is_global[:, None], of_global, out)
    return out, jnp.where(is_global, global_lse, lse)


def _masks_of_examples(query, global_mask, **_):
    """`global_mask` for each example, `(*B, T)`."""
    if global_mask is None:
        return {}
    return {"global_mask": jnp.broadcast_to(global_mask, query.shape[:-2])}


@with_naive(
    over_pairs(
        naive,
        per_query=("global_query",),
        per_token=("global_key", "global_value"),
        per_head={"dilation": 0},
        per_example=("global_mask",),
        derived=_masks_of_examples,
    )
)
@declared
def longformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    local_window_size: int | tuple[int, int],
    dilation: int | Sequence[int] = 1,
    global_mask: jax.Array | None = None,
    max_global: int | None = None,
    global_query: jax.Array | None = None,
    global_key: jax.Array | None = None,
    global_value: jax.Array | None = None,
    **options: Unpack[Options],
) -> Any:
    r"""Longformer's attention (Beltagy et al. 2020, "Longformer: The Long-Document Transformer").

    Each token attends to a window around it, dilated or not, and to the global tokens of its
    example; a global token attends to all tokens. Global tokens may have separate projections: a
    global token then attends with `global_query` to `global_key` and `global_value`, while other
    tokens attend to global tokens by `key` and `value`.

    Attention of a token to its window (without global tokens) and to the gathered global tokens is
    computed separately and combined by the log-sum-exps.

    Time O(T (w + g) (H + Hv)) for a window of w and g = max_global, memory O(T), forward and
    backward. Without global tokens this is `effattn.sliding_window_attention`.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, T, K, H)`, N a multiple of K.
      value: `(*B, T, K, Hv)`.
      local_window_size: w or (left, right), steps on each side, without the token itself.
      dilation: tokens in a step, 1 or more; an int, or one int for each query head. Query heads of
        one key head must have the same dilation.
      global_mask: bool `(*B, T)`, True for global tokens; batch axes may have size 1.
      max_global: maximum number of global tokens in an example, required with `global_mask`. Only
        the first `max_global` global tokens of an example count.
      global_query: queries of global tokens, in the shape of `query`; default `query`.
      global_key: keys for queries of global tokens, in the shape of `key`; default `key`.
      global_value: values for queries of global tokens, in the shape of `value`; default `value`.
      **options: direction, padding, packing, scale, soft cap, `score_mod`, dropout, log-sum-exp,
        tiles and execution: see `effattn.options`. Causal calls see nothing at later
        positions, for global tokens too. Global tokens reach no further than their segment. `tile`
        applies to the window. Calls without global tokens also take the implementations of
        `effattn.support("sliding_window")`.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values.
      NotImplementedError: a named implementation does not take these arguments.
    """
    given = attention.check(
        "longformer_attention",
        query,
        key,
        value,
        local_window_size=checks.window(local_window_size),
        **options,
    )
    dilation = checks.dilation(dilation, query.shape[-2], key.shape[-2])
    checks.self_attention("longformer_attention", query, key)
    given_global = (("query", global_query), ("key", global_key), ("value", global_value))
    global_arrays = tuple(
        array if other is None else _like(f"global_{name}", other, array)
        for (name, other), array in zip(given_global, (query, key, value), strict=True)
    )
    is_global = _check_global(global_mask, max_global, query.shape[:-2])
    arrays = query, key, value
    with jax.named_scope("longformer_attention"):
        if is_global is None:
            out, lse = sliding_window.attend(dilation, *arrays, given)
        else:
            out, lse = _attend(dilation, arrays, global_arrays, is_global, max_global, given)
    return attention.results(out, lse, given)


def _like(name, other, array):
    """Checks an array of global tokens, of the shape and dtype of that of all tokens."""
    if checks.shaped(name, other, array.shape).dtype != array.dtype:
        raise ValueError(
            f"{name} must have the dtype of {name.removeprefix('global_')}, {array.dtype}, got "
            f"{other.dtype}"
        )
    return other


def _check_global(global_mask, max_global, shape):
    if global_mask is None:
        if max_global is not None:
            raise ValueError(
                f"max_global={max_global} needs global_mask, the bool mask of the global tokens, "
                "got None; give both or neither"
            )
        return None
    *batch, length = shape
    global_mask = jnp.asarray(global_mask)
    checks.known_length("longformer_attention with global tokens", global_mask, axis=-1)
    if global_mask.dtype != jnp.bool_:
        raise ValueError(f"global_mask must be bool, got dtype {global_mask.dtype}")
    if not checks.is_integer(max_global) or not 1 <= max_global <= length:
        raise ValueError(
            f"max_global must be an int from 1 to the length {length}, the largest number of "
            f"global tokens in an example, got {max_global!r}"
        )
    global_mask = checks.broadcastable("global_mask", global_mask, (*batch, length))
    return jnp.broadcast_to(global_mask, (*batch, length))


def _attend(dilation, arrays, global_arrays, is_global, max_global, given):
    query, key, value = arrays
    batch, length = query.shape[:-3], query.shape[-3]
    is_global, slot, where = locate(is_global, max_global)
    there = within(is_global.sum(-1), max_global)
    everywhere = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (*batch, length))

    local = dataclasses.replace(given, mask=~is_global[..., None, None, :])
    local_part = sliding_window.attend(dilation, query, key, value, local)

    unbounded = dataclasses.replace(given, window=None, tile=None)
    lengths = (given.query_lengths, given.key_lengths)
    seen = _present(lengths[1], where) & there
    to_global = dataclasses.replace(
        unbounded,
        mask=seen[..., None, None, :],
        key_lengths=None,
        segments=given.segments and (given.segments[0], rows_at(given.segments[1], where)),
        positions=(everywhere, where),
    )
    global_part = attention.attend(query, rows_at(key, where), rows_at(value, where), to_global)
    out, lse = combine(*zip(local_part, global_part, strict=True))

    by_global = dataclasses.replace(
        unbounded,
        query_lengths=None,
        segments=given.segments and (rows_at(given.segments[0], where), given.segments[1]),
        positions=(where, everywhere),
    )
    global_query, global_key, global_value = global_arrays
    # Queries of unused slots are zero, so that padding does not reach the gradients of keys.
    asks = (_present(lengths[0], where) & there)[..., None, None]
    asking = jnp.where(asks, rows_at(global_query, where), 0)
    of_global = attention.attend(asking, global_key, global_value, by_global)
    is_global &= _present(lengths[0], everywhere)
    out = jnp.where(is_global[..., None, None], rows_at(of_global[0], slot), out)
    return out, jnp.where(is_global[..., None], rows_at(of_global[1], slot), lse)


def _present(lengths, positions):
    """Returns whether positions `(*B, L)` lie before the lengths `(*B)`."""
    return jnp.full(positions.shape, True) if lengths is None else positions < lengths[..., None]


def locate(is_global: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Assigns the first `most` global tokens to slots.

    Unused slots hold other tokens.

    Args:
      is_global: bool `(*B, L)`.
      most: g, at most L.

    Returns:
      bool `(*B, L)`, True at these tokens; int32 `(*B, L)`, the slot of each token; and int32
      `(*B, g)`, the token of each slot.
    """
    slot = jnp.cumsum(is_global, axis=-1, dtype=jnp.int32) - 1
    is_global = is_global & (slot < most)
    where = jnp.argsort(~is_global, axis=-1, stable=True)[..., :most].astype(jnp.int32)
    return is_global, jnp.clip(slot, 0, most - 1), where


registry.register(
    registry.Mechanism(
        name="longformer",
        family="sparse",
        paper="Beltagy et al. 2020, Longformer: The Long-Document Transformer",
        function=longformer_attention,
        options={"local_window_size": 127, "dilation": 1},
        builder="effattn.nn.longformer:LongformerSelfAttention",
        decoder="effattn.decode.longformer:decoder",
        complexity="O(N (w + g))",
        time_exponent=1.0,
    )
)
