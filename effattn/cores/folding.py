"""Attention inside fixed-size blocks of tokens, with the blocks as an extra batch axis."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays.axes import fold, lead, unfold
from effattn.cores import attention


def in_tiles_of_queries(function: Any, arrays: Any, tokens: int) -> Any:
    """Maps a function over tiles of `tokens` queries, one tile in memory at a time.

    Args:
      function: from a pytree of `(m, ...)` to a pytree of `(m, ...)`, row by row, m <= `tokens`.
      arrays: pytree of `(T, ...)`.
      tokens: queries in a tile.
    """
    length = len(jax.tree.leaves(arrays)[0])
    if length <= tokens:
        return function(arrays)
    results = lax.map(function, jax.tree.map(lambda x: fold(x, tokens, 0), arrays))
    return jax.tree.map(lambda x: unfold(x, length, 0), results)


def fold_lengths(lengths: jax.Array | None, blocks: int, size: int) -> jax.Array | None:
    """Valid tokens of each block, `(*B, blocks)`, from sequence lengths `(*B)`."""
    if lengths is None:
        return None
    return jnp.clip(lengths[..., None] - size * lead(jnp.arange(blocks), lengths.ndim + 1), 0, size)


def attend_inside(size: int, query, key, value, given: attention.Arguments):
    """Attention inside each block of `size` tokens: the output and the log-sum-exp."""
    batch, length = query.shape[:-3], query.shape[-3]
    blocks = math.ceil(length / size)
    fold_tokens = functools.partial(fold, size=size, axis=len(batch))
    query_lengths, key_lengths, ids = given.query_lengths, given.key_lengths, given.segments
    # A causal block needs no key lengths: no valid query sees the padding at the end of the block.
    if key_lengths is None and not given.is_causal and length % size:
        key_lengths = jnp.full(batch, length)
    folded = dataclasses.replace(
        given,
        query_lengths=fold_lengths(query_lengths, blocks, size),
        key_lengths=fold_lengths(key_lengths, blocks, size),
        segments=ids and (fold_tokens(ids[0]), fold_tokens(ids[1])),
        origin=origin_of_blocks(blocks, size),
    )
    out, lse = attention.attend(fold_tokens(query), fold_tokens(key), fold_tokens(value), folded)
    return unfold(out, length, len(batch)), unfold(lse, length, len(batch))


@functools.cache
def origin_of_blocks(blocks: int, size: int):
    """Function that maps block indices to sequence indices, for `Arguments.origin`.

    Cached, so that equal calls reuse one compiled program.
    """

    def origin(b, h, i, j):
        start = b % blocks * size
        return b // blocks, h, start + i, start + j

    return origin


@functools.cache
def example_of_blocks(blocks: int):
    """Function that maps block indices to examples, for `Arguments.origin` with positions."""
    return lambda b, h, i, j: (b // blocks, h, i, j)
