"""Linear attention with a state for each level of a Fenwick tree, for one head, in chunks.

Query t at position p reads key s of its document with the weight of their level: 0 for s = t, and
else the number of the highest bit in which the positions differ, counted from 1. All keys of a
level before a chunk are one state, and a token in the chunk reads every such state at one level, so
the states are carried from chunk to chunk, and merged where their levels become one.

Shapes: T tokens in chunks of C, G query heads, head dimensions H and Hv, L levels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def attend(
    size: int,
    precision: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    levels: jax.Array,
    marks: Any,
    states: jax.Array,
    first: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Output `(M C, G, Hv)`, and the states after the last token.

    Args:
      size: C.
      precision: precision of the matrix products.
      query: `(M, C, G, H)`.
      key: `(M, C, H)`, zero in the padding.
      value: `(M, C, Hv)`.
      log_decay: `(M, C)`, zero in the padding.
      levels: `(M, C, G, L)`, weights of the levels.
      marks: `present`, `document` and `position`, each `(M, C)` (`effattn.cores.by_head`).
      states: `(L - 1, H, Hv)`; those of the levels from 1 on.
      first: int32 `()`, position of the first token of document 0.
    """
    dot = functools.partial(jnp.einsum, precision=precision)
    count = levels.shape[-1]
    later = jnp.tril(jnp.ones((size, size), bool), -1)

    def one_hot(x, size):
        return jax.nn.one_hot(x, size, dtype=key.dtype)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(carry, chunk):
        states, place, carried = carry
        query, key, value, log_decay, levels, (present, document, position) = chunk
        position = position + jnp.where(document == 0, first, 0)
        # Sums of log decays after token s, up to t. A difference of running sums would cancel.
        since = jnp.cumsum(jnp.where(later, log_decay[:, None], 0), 0)
        own = jnp.tril((document[:, None] == document[None]) & present[None])
        between = jnp.where(own, jnp.exp(since), 0)
        pairs = _level(position[:, None], position[None], count)
        weights = dot("cgl,csl->gcs", levels, one_hot(pairs, count))
        weights = weights * dot("cgh,sh->gcs", query, key) * between[None]
        out = dot("gcs,sv->cgv", weights, value)

        starts, full = _buckets(place, count - 1)
        of_state = _level(position[:, None], starts[None], count).at[:, -1].set(count - 1)
        of_state = jnp.where(full[None, :, None], one_hot(of_state, count), 0)
        read = dot("cgl,cbl->cgb", levels, of_state)
        decay = jnp.where(document == carried, jnp.exp(jnp.cumsum(log_decay)), 0)
        read = (read * decay[:, None, None])[..., None] * query[:, :, None]
        out += dot("cgbh,bhv->cgv", read, states)

        last, end = document[-1], position[-1] + present[-1].astype(position.dtype)
        moved = (_level(end, starts, count) - 1).at[-1].set(count - 2)
        moved = jnp.where(full[:, None], one_hot(moved, count - 1), 0)
        stays = (end == place) & (last == carried)
        moved = jnp.where(stays, jnp.eye(count - 1, dtype=key.dtype), moved)
        kept = moved * jnp.where(last == carried, decay[-1], 0)
        states = dot("bhv,bn->nhv", states, kept)
        written = one_hot(_level(end, position, count) - 1, count - 1)
        written = jnp.where((document == last) & present, jnp.exp(since[-1]), 0)[:, None] * written
        states += dot("snh,sv->nhv", written[:, :, None] * key[:, None], value)
        return (states, end, last), out

    carry = states, first, jnp.zeros_like(first)
    (states, _, _), out = lax.scan(step, carry, (query, key, value, log_decay, levels, marks))
    return out.reshape(len(out) * size, *out.shape[2:]), states


def _level(one, other, count):
    """The highest bit in which positions differ, counted from 1; at most `count - 1`."""
    differ = one ^ other
    bits = jnp.arange(count - 1, dtype=differ.dtype).reshape(-1, *[1] * differ.ndim)
    return (differ[None] >> bits > 0).sum(0, dtype=differ.dtype)


def _buckets(place, count):
    """First position of each bucket of the tokens before `place`, and whether it has tokens.

    The last bucket has all tokens that are in no other bucket.
    """
    bucket = jnp.arange(count, dtype=place.dtype)
    full = ((place >> bucket & 1) == 1) | (bucket == count - 1)
    return place >> (bucket + 1) << (bucket + 1), full
