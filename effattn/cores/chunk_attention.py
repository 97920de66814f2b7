"""Attention inside chunks of a sequence by one head, with a bias for each distance."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import dtypes
from effattn.cores import attention, sequence_parts
from effattn.cores.relative_segments import relative_shift, windows

FUNCTIONS = ("softmax", "laplace")


class Keys(NamedTuple):
    """Keys and values that the queries of chunks read.

    Attributes:
      key: `(B, R + T + A, Z)`, of R tokens before the T queries to A tokens after them.
      value: `(B, R + T + A, V)`.
      chunk: int `(B, R + T + A)`, numbers of chunks, which differ for neighbouring chunks, and 0
        for padding. None for chunks from the first query on, without padding.
      before: R; 0 if the first query starts a chunk and all chunks are full but the last.
    """

    key: jax.Array
    value: jax.Array
    chunk: jax.Array | None = None
    before: int = 0


def numbers(position: jax.Array, present: jax.Array, size: int) -> jax.Array:
    """Numbers of the chunks of c = `size` tokens, int32 `(B, L)`; 0 where `present` is False.

    `position (B, L)` counts tokens from the start of their document.
    """
    chunk = jnp.cumsum(position % size == 0, -1, dtype=jnp.int32) + 1
    return jnp.where(present, chunk, 0)


def attend(
    query: jax.Array, keys: Keys, bias: jax.Array, size: int, function: str, *, is_causal: bool
) -> jax.Array:
    """Attends to the keys in the chunk of the query: sum_s f(q_t . k_s / tau_t + b_(s - t)) v_s.

    f is the softmax over s, with tau = sqrt(Z), or the Laplace function of one logit, with tau_t
    the number of keys that the query reads. Queries run in tiles of up to c tokens, each with R + A
    further keys. Time is O(T (c + R + A) (Z + V)), memory O(T (c + R + A)).

    Args:
      query: `(B, T, Z)`.
      keys: the keys.
      bias: b `(2 c - 1,)`, from the distance -(c - 1) on; `(c,)` if causal.
      size: c, tokens in a chunk.
      function: "softmax" or "laplace".
      is_causal: whether a query reads only tokens up to its own.

    Returns:
      `(B, T, V)`.
    """
    time, before = query.shape[1], keys.before
    if time == 0:
        return jnp.zeros((len(query), 0, keys.value.shape[-1]), keys.value.dtype)
    tile = min(size, time)
    width, count = keys.key.shape[1] - time + tile, -(-time // tile)

    def cut(x, width):
        return jnp.moveaxis(windows(x, count, tile, width), 0, 1)

    chunk, ids = keys.chunk, None
    if chunk is None and not is_causal and time % tile:
        chunk = jnp.ones((len(query), time), jnp.int32)
    if chunk is not None:
        ids = cut(chunk[:, before : before + time], tile), cut(chunk, width)
    query, key, value = cut(query, tile), cut(keys.key, width), cut(keys.value, width)
    if function == "laplace":
        number = _number_of_keys(ids, tile, width, before, is_causal)[..., None]
        query = (query / number.astype(dtypes.wide(query.dtype))).astype(query.dtype)
    query, key, value = (x[..., None, :] for x in (query, key, value))
    given = attention.check(
        "chunk attention",
        query,
        key,
        value,
        bias=_of_pairs(bias, size, tile, width, before),
        scale=1.0 if function == "laplace" else None,
        is_causal=is_causal,
        query_offset=before,
        segment_ids=ids,
    )
    if function == "laplace":
        given = dataclasses.replace(given, activation=function)
    with sequence_parts.alone():
        out, _ = attention.attend(query, key, value, given)
    return out.reshape(len(out), count * tile, out.shape[-1])[:, :time]


def _number_of_keys(ids, tile, width, before, is_causal):
    """Keys that each query reads, int32 `(#B, #n, t)`, at least 1."""
    last = before if is_causal else width
    seen = jnp.asarray(np.tri(tile, width, last, dtype=bool))[None, None]
    if ids is not None:
        seen = seen & (ids[0][..., None] == ids[1][..., None, :])
    return jnp.maximum(seen.sum(-1, dtype=jnp.int32), 1)


def _of_pairs(bias, size, tile, width, before):
    """Biases `(t, w)` of the pairs of a tile; those of distances without a bias are 0."""
    # One number for each distance, from the last query and the first key on.
    first = size - 1 - (before + tile - 1)
    each = jnp.pad(bias[max(first, 0) :], (max(-first, 0), 0))[: width + tile - 1]
    each = jnp.pad(each, (0, width + tile - 1 - len(each)))
    return relative_shift(jnp.broadcast_to(each, (tile, len(each))))[:, :width]
