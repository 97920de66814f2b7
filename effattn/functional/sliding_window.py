"""Sliding-window attention, with or without dilation."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from effattn import registry
from effattn.arrays import checks, mesh_axes
from effattn.arrays.axes import fold, lead, over_batch
from effattn.cores import attention
from effattn.functional import softmax
from effattn.interfaces.block_attention import Origin
from effattn.naive import over_pairs, with_naive
from effattn.options import Direction, Offset, Packing, Score, Sink, Softmax, Tile, declared


class Options(Direction, Offset, Packing, Score, Sink, Tile, Softmax, total=False):
    """The shared options of `sliding_window_attention`."""


def in_window(pairs, local_window_size, dilation):
    """Bool `(T, S)`: the keys at most `left` steps before and `right` steps after each query."""
    is_pair = isinstance(local_window_size, tuple | list)
    left, right = local_window_size if is_pair else (local_window_size, local_window_size)
    steps, rest = jnp.divmod(pairs.j - pairs.i[:, None], dilation)
    return (rest == 0) & (-left <= steps) & (steps <= right)


def naive(query, key, value, pairs, *, scale, local_window_size, dilation):
    """One head: query `(T, H)`, key `(S, H)`, value `(S, Hv)`. Returns output and log-sum-exp."""
    near = in_window(pairs, local_window_size, dilation)
    return softmax.naive(query, key, value, pairs.where(near), scale=scale)


@with_naive(over_pairs(naive, per_head={"dilation": 0}))
@declared
def sliding_window_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    local_window_size: int | tuple[int, int],
    dilation: int | Sequence[int] = 1,
    **options: Unpack[Options],
) -> Any:
    r"""Softmax attention in a window around each token (Beltagy et al. 2020, "Longformer").

    The query at position i attends to the keys at positions i + d s, for the steps s from -left to
    right and dilation d. Tokens in different residue classes modulo d do not attend to each other,
    so a dilated window is d windows without dilation, and costs the same as one such window.

    Time O(T (left + right + 1) (H + Hv)), memory O(T + S), forward and backward. A window at least
    as wide as the sequence gives `effattn.dot_product_attention`.

    Args:
      query: `(*B, T, N, H)`, any number of batch dimensions, also none.
      key: `(*B, S, K, H)`, N a multiple of K.
      value: `(*B, S, K, Hv)`.
      local_window_size: w or (left, right), steps on each side, without the token itself. A causal
        window of 256 keys is (255, 0).
      dilation: d, tokens in a step, 1 or more; an int, or one int for each query head. Query heads
        of one key head must have the same dilation.
      **options: direction, offset, padding, packing, scale, soft cap, `score_mod`, sink, dropout,
        log-sum-exp, tiles and execution: see `effattn.options`. Causal calls see nothing at
        later positions, whatever the right side of the window.

    Returns:
      `(*B, T, N, Hv)` in the dtype of `value`; with `return_residual` also `(*B, T, N)`, at least
      float32, -inf for a row that attends to nothing.

    Raises:
      ValueError: wrong shapes, dtypes or values.
      NotImplementedError: a named implementation does not take these arguments.
    """
    given = attention.check(
        "sliding_window_attention",
        query,
        key,
        value,
        local_window_size=checks.window(local_window_size),
        **options,
    )
    dilation = checks.dilation(dilation, query.shape[-2], key.shape[-2])
    with jax.named_scope("sliding_window_attention"):
        out, lse = attend(dilation, query, key, value, given)
    return attention.results(out, lse, given)


def attend(dilation: int | tuple[int, ...], query, key, value, given: attention.Arguments):
    """Returns output and log-sum-exp; a mask may only depend on keys, `(*B, 1, 1, S)`."""
    if isinstance(dilation, tuple):
        checks.known_length(f"{given.mechanism} with a dilation", query, key)
        return _attend_by_head(dilation, query, key, value, given)
    if dilation != 1:
        checks.known_length(f"{given.mechanism} with a dilation", query, key)
    if checks.is_integer(given.query_offset) and dilation != 1:
        # A larger dilation reaches no other key, and would only add padding.
        offset = int(given.query_offset)
        after, before = offset + query.shape[-3], key.shape[-3] - offset
        apart: int = max(after, before, 1)
        dilation = min(dilation, apart)
    if dilation == 1:
        return attention.attend(query, key, value, given)
    return _attend_dilated(dilation, query, key, value, given)


def _attend_by_head(dilations: tuple[int, ...], query, key, value, given: attention.Arguments):
    """Attends separately for the heads of each dilation, and restores the order of heads."""
    of_heads = np.array(dilations)
    of_key_heads = of_heads[:: query.shape[-2] // key.shape[-2]]
    outs, lses = [], []
    order: list[int] = []
    for dilation in sorted(set(dilations)):
        heads = np.flatnonzero(of_heads == dilation)
        key_heads = np.flatnonzero(of_key_heads == dilation)
        part = dataclasses.replace(
            given,
            sink=None if given.sink is None else given.sink[heads],
            origin=_origin_of_heads(tuple(heads.tolist())),
        )
        arrays = query[..., heads, :], key[..., key_heads, :], value[..., key_heads, :]
        out, lse = attend(dilation, *arrays, part)
        outs.append(out)
        lses.append(lse)
        order.extend(heads)
    back = np.argsort(order)
    return jnp.concatenate(outs, -2)[..., back, :], jnp.concatenate(lses, -1)[..., back]


@functools.cache
def _origin_of_heads(heads: tuple[int, ...]):
    def origin(b, h, i, j):
        return b, jnp.array(heads, jnp.int32)[h], i, j

    return origin


def _attend_dilated(dilation: int, query, key, value, given: attention.Arguments):
    """Attends within residue classes of positions; the classes become a batch axis."""
    batch, (queries, keys) = query.shape[:-3], (query.shape[-3], key.shape[-3])
    # Residue class of the first query; shifting queries by it aligns their classes with the keys.
    shift = given.query_offset % dilation
    fold_keys = functools.partial(_fold, dilation, axis=len(batch))

    def fold_queries(array):
        return fold_keys(_shift(array, shift, dilation - 1, axis=len(batch)))

    def unfold_queries(array):
        array = jnp.moveaxis(array, len(batch), len(batch) + 1)
        array = jax.lax.collapse(array, len(batch), len(batch) + 2)
        return _slice_each(array, shift, queries, axis=len(batch))

    key_mask = None if given.mask is None else fold_keys(given.mask[..., 0, 0, :])
    key_lengths = keys if given.key_lengths is None else jnp.minimum(given.key_lengths, keys)
    query_lengths = given.query_lengths
    folded = dataclasses.replace(
        given,
        query_offset=_per_class(given.query_offset // dilation, batch, dilation),
        query_lengths=None
        if query_lengths is None
        else _class_lengths(query_lengths + shift, batch, dilation),
        key_lengths=_class_lengths(key_lengths, batch, dilation),
        mask=None if key_mask is None else key_mask[..., None, None, :],
        segments=given.segments and (fold_queries(given.segments[0]), fold_keys(given.segments[1])),
        origin=_origin_of_classes(dilation, given.origin),
    )
    out, lse = attention.attend(fold_queries(query), fold_keys(key), fold_keys(value), folded)
    return unfold_queries(out), unfold_queries(lse)


@functools.cache
def _origin_of_classes(dilation: int, before: Origin | None):
    def origin(b, h, i, j):
        b, residue = b // dilation, b % dilation
        here = b, h, i * dilation + residue, j * dilation + residue
        return here if before is None else before(*here)

    return origin


def _fold(dilation: int, array, axis: int):
    """Reshapes `(*B, L, ...)` to `(*B, d, ceil(L / d), ...)`, zero padded."""
    return jnp.moveaxis(fold(array, dilation, axis), axis + 1, axis)


def _shift(array, shift, most: int, axis: int):
    """Puts `shift` zeros (an int, or one for each example) before the tokens; pads after them."""
    padding = [(0, 0)] * array.ndim
    if checks.is_integer(shift):
        padding[axis] = (int(shift), 0)
        return jnp.pad(array, padding)
    padding[axis] = (most, most)
    size = array.shape[axis] + most
    return _slice_each(jnp.pad(array, padding), most - shift, size, axis)


def _slice_each(array, start, size: int, axis: int):
    """Slices `size` tokens from `start`, a number or an array `(*B)`."""
    if isinstance(start, int):
        return jax.lax.slice_in_dim(array, start, start + size, axis=axis)
    each = jnp.ndim(start) > 0
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=0 if each else axis)
    of_rows = over_batch(cut, axis if each else 0)
    return mesh_axes.placed_like(array, of_rows, array, start)


def _per_class(value, batch, dilation: int):
    """Broadcasts `(*B)` to `(*B, d)`; scalars do not change."""
    if jnp.ndim(value) == 0:
        return value
    return jnp.broadcast_to(value[..., None], (*batch, dilation))


def _class_lengths(lengths, batch, dilation: int):
    """Returns the number of positions below each length in each residue class: `(*B, d)`."""
    lengths = jnp.broadcast_to(jnp.asarray(lengths), batch)[..., None]
    return (lengths - lead(jnp.arange(dilation), lengths.ndim) + dilation - 1) // dilation


registry.register(
    registry.Mechanism(
        name="sliding_window",
        family="sparse",
        paper="Beltagy et al. 2020, Longformer: The Long-Document Transformer",
        function=sliding_window_attention,
        capabilities=frozenset({"cross"}),
        options={"local_window_size": 127, "dilation": 1},
        decoder="effattn.decode.ring:RingDecoder",
        complexity="O(N w)",
        time_exponent=1.0,
    )
)
