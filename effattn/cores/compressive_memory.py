"""Compressive memory of Infini-attention: sums of earlier segments that queries read.

Tokens are read in tiles of at most a segment. A tile starts with the memory that the segment of its
first tokens reads, and with the sum of the tokens of that segment so far, which is pending. Each
segment but the first one of a document follows a whole segment, so at most one such segment starts
within a tile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import mesh_axes
from effattn.arrays.axes import fold, unfold
from effattn.cores.feature_maps import elu
from effattn.interfaces.linear_recurrence import normalize


class Memory(NamedTuple):
    """Sums over tokens of a key's features times its value and a one, `(*B, K, H, Hv + 1)`.

    Attributes:
      whole: over the segments before the present one.
      pending: over the present segment so far.
    """

    whole: jax.Array
    pending: jax.Array


class Segments(NamedTuple):
    """Segments of tokens.

    Attributes:
      number: int32 `(*B, T)`, grows by one from segment to segment.
      is_first: bool `(*B, T)`, whether the segment is the first one of its document.
      present: bool `(*B, T)`, False in the padding.
    """

    number: jax.Array
    is_first: jax.Array
    present: jax.Array


def empty(batch: tuple[int, ...], heads: int, size: int, value_size: int, dtype) -> Memory:
    """The memory before the first token."""
    shape = (*batch, heads, size, value_size + 1)
    return Memory(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def read(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments,
    memory: Memory,
    number: jax.Array,
    *,
    segment_size: int,
    delta_rule: bool,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, Memory]:
    """Reads the memory of each query's segment, and adds the keys and values to the memory.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, T, K, H)`.
      value: `(*B, T, K, Hv)`.
      segments: segments of the tokens.
      memory: the memory before the first token.
      number: int32 `(*B)`, the number of the segment of `memory.pending`.
      segment_size: tokens in a segment.
      delta_rule: whether a key adds the difference of its value and the value that it reads.
      precision: precision of the products.

    Returns:
      Values `(*B, T, N, Hv)` in the dtype of the memory, zeros for an empty memory; and the memory
      after the last token.
    """
    query, key, value, segments, memory, number = mesh_axes.vary_alike(
        (query, key, value, segments, memory, number)
    )
    *batch, time, heads, size = query.shape
    axis, key_heads, dtype = len(batch), key.shape[-2], memory.whole.dtype
    tile = max(min(segment_size, time), 1)
    product = functools.partial(jnp.einsum, precision=precision)

    def features(x):
        return elu(x.astype(dtype))

    def each(mask, x):
        """Zeros where a mask `(*B)` or `(*B, T)` is False."""
        return jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, 0)

    def step(carry, tokens):
        """Reads and adds a tile."""
        memory, number = carry
        query, key, value, (numbers, is_first, present) = tokens
        query, key = features(query), features(key)
        query = query.reshape(*query.shape[:-2], key_heads, heads // key_heads, size)
        goes_on = numbers == number[..., None]
        follows = (numbers == number[..., None] + 1) & ~is_first

        def found(form, x, whole, following):
            """The values that x reads from the memory of its segment."""
            sums = each(goes_on, product(form, x, whole)) + each(
                follows, product(form, x, following)
            )
            return normalize(sums)

        def added(mask, read):
            """The sum that the tokens of a mask add to the memory."""
            new = value.astype(dtype) - read if delta_rule else value.astype(dtype)
            one = jnp.ones_like(new, shape=(*new.shape[:-1], 1))
            new = jnp.concatenate([new, one], -1)
            return product("...tkh,...tkv->...khv", each(mask & present, key), new)

        of_keys, of_queries = "...tkh,...khv->...tkv", "...tkgh,...khv->...tkgv"
        ending = memory.pending + added(
            goes_on, normalize(product(of_keys, key, memory.whole)) if delta_rule else None
        )
        following = memory.whole + ending
        out = found(of_queries, query, memory.whole, following)
        last, last_is_first = numbers[..., -1], is_first[..., -1]
        stays, advances = last == number, (last == number + 1) & ~last_is_first
        whole = each(stays, memory.whole) + each(advances, following)
        read = found(of_keys, key, memory.whole, following) if delta_rule else None
        pending = each(stays, memory.pending) + added(numbers == last[..., None], read)
        return (Memory(whole, pending), last), out.reshape(*out.shape[:-3], heads, out.shape[-1])

    def in_tiles(x, **options):
        return jnp.moveaxis(fold(x, tile, axis, **options), axis, 0)

    of_tiles = (
        in_tiles(query),
        in_tiles(key),
        in_tiles(value),
        # Padding is in the segment of the last token.
        Segments(
            in_tiles(segments.number, mode="edge"),
            in_tiles(segments.is_first, mode="edge"),
            in_tiles(segments.present),
        ),
    )
    (memory, _), out = lax.scan(jax.checkpoint(step), (memory, number), of_tiles)
    return unfold(jnp.moveaxis(out, 0, axis), time, axis), memory
