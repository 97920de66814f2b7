"""Attention of segments to themselves and to tokens before them, by relative positions.

A logit is the sum of two products, as in Transformer-XL: of a query with a bias u and a key, and of
the query with a bias v and the key of the distance.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes
from effattn.arrays.axes import lead


class Places(NamedTuple):
    """Where tokens stand.

    Attributes:
      position: int `(B, L)`, from the start of the document.
      document: int `(B, L)`, ids of documents; 0 if there is no token.
    """

    position: jax.Array
    document: jax.Array


class Keys(NamedTuple):
    """Keys and values of tokens.

    Attributes:
      key: `(B, L, N, H)`.
      value: `(B, L, N, H)`.
      places: places of the tokens.
    """

    key: jax.Array
    value: jax.Array
    places: Places


class Terms(NamedTuple):
    """Parameters of the logits.

    Attributes:
      of_distance: `(distances (C,)) -> (C, N, H)`, the keys of distances.
      content_bias: u, `(N, H)`.
      position_bias: v, `(N, H)`.
      scale: factor of the logits.
    """

    of_distance: Callable[[jax.Array], jax.Array]
    content_bias: jax.Array
    position_bias: jax.Array
    scale: float


def attend(
    query: jax.Array,
    own: Keys,
    memory: Keys,
    terms: Terms,
    *,
    segment: int,
    memory_size: int,
    aligned: bool,
) -> jax.Array:
    """Attends causally to the query's segment, and to the tokens before the segment.

    Queries run in tiles of a segment. A tile costs O(segment * (segment + memory)) time and memory,
    and the backward pass computes it again.

    Args:
      query: `(B, T, N, H)`.
      own: keys of R tokens before the queries and of the T tokens of the queries, as queries of
        the same segment read them.
      memory: keys of the same R + T tokens, as queries of later segments read them.
      terms: parameters of the logits.
      segment: tokens in a segment, counted from the start of the document.
      memory_size: tokens of the memory, those before the segment.
      aligned: whether the first query is at the start of a segment, and all tokens are of one
        document. Tiles are then segments.

    Returns:
      `(B, T, N, H)` in the dtype of the values.
    """
    time, reach = query.shape[1], own.key.shape[1] - query.shape[1]
    tile = max(min(segment, time), 1)
    number, columns = -(-time // tile), reach + tile
    # Columns of a tile: from its first query - R to its last query.
    of_own = slice(reach if aligned else max(reach - segment + 1, 0), columns)
    of_memory = slice(0, reach if aligned else columns)
    distance_key = terms.of_distance(jnp.arange(columns - 1, -1, -1))

    def windows(arrays, part):
        width = part.stop - part.start
        return jax.tree.map(lambda x: _windows(x[:, part.start :], number, tile, width), arrays)

    @jax.checkpoint
    def of_tile(query, places, own, memory):
        wide = dtypes.wide(query.dtype)
        product = functools.partial(jnp.einsum, preferred_element_type=wide)
        of_content, of_position = (
            query + lead(bias.astype(query.dtype), 4)
            for bias in (terms.content_bias, terms.position_bias)
        )
        by_distance = _shifted(product("btnh,cnh->bntc", of_position, distance_key))
        in_memory, in_segment = _seen(places, memory.places, own.places, segment, memory_size)

        def logits(keys, part, seen):
            by_content = product("btnh,bcnh->bntc", of_content, keys.key)
            summed = (by_content + by_distance[..., part]) * terms.scale
            return jnp.where(seen[:, None], summed, dtypes.lowest(wide))

        both = logits(memory, of_memory, in_memory), logits(own, of_own, in_segment)
        weights = jax.nn.softmax(jnp.concatenate(both, -1), -1)
        value = jnp.concatenate([memory.value, own.value], 1)
        return jnp.einsum("bntc,bcnh->btnh", weights.astype(value.dtype), value)

    of_queries = query, jax.tree.map(lambda x: x[:, reach:], own.places)
    tiles = (
        *windows(of_queries, slice(0, tile)),
        windows(own, of_own),
        windows(memory, of_memory),
    )
    _, out = lax.scan(lambda _, x: (None, of_tile(*x)), None, tiles)
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(out.shape[0], number * tile, *out.shape[3:])[:, :time]


def _seen(query: Places, memory: Places, own: Places, segment: int, memory_size: int):
    """Masks `(B, Q, C)` of the keys of the memory, and of those of the segment."""
    here = query.position[..., None]
    start = here // segment * segment

    def same(keys):
        document = keys.document[:, None]
        return (query.document[..., None] == document) & (document != 0)

    far, near = memory.position[:, None], own.position[:, None]
    in_memory = same(memory) & (far < start) & (far >= start - memory_size)
    return in_memory, same(own) & (near >= start) & (near <= here)


def _windows(x: jax.Array, number: int, step: int, width: int) -> jax.Array:
    """Windows `(number, B, width, ...)` of x `(B, L, ...)`, each `step` tokens after the last.

    Zeros follow the L tokens. Gradients are sums of slices, without a scatter.
    """
    pieces = max(-(-width // step), 1)
    length = (number + pieces - 1) * step
    x = x[:, :length]
    x = jnp.pad(x, ((0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
    folded = x.reshape(x.shape[0], number + pieces - 1, step, *x.shape[2:])
    each = [folded[:, first : first + number] for first in range(pieces)]
    return jnp.moveaxis(jnp.concatenate(each, 2)[:, :, :width], 1, 0)


def _shifted(logits: jax.Array) -> jax.Array:
    """Moves row r of `(..., Q, C)` to the left by Q - 1 - r columns; its end is then undefined.

    This is the shift of Transformer-XL: of an array with one more column, rows of C columns.
    """
    *batch, rows, columns = logits.shape
    logits = jnp.pad(logits, (*[(0, 0)] * (len(batch) + 1), (1, 0)))
    logits = logits.reshape(*batch, columns + 1, rows)[..., 1:, :]
    return logits.reshape(*batch, rows, columns)
