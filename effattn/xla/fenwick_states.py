"""Linear attention with a state for each level of a Fenwick tree, for one head, in chunks.

A query reads a key of its document with the weight of their level: 0 for the same token, and else
the number of the highest bit in which their positions differ, counted from 1. The keys before a
chunk are summed into one state for each level, as seen from the start of the chunk. A query of the
chunk has one level for all keys of a state, so these states suffice. From chunk to chunk they move
to higher levels, and are added up where their levels become one.

Chunks of 2^c tokens that begin at multiples of 2^c need less. All their tokens read a state at the
same level, there are no states of the levels up to c, and the chunk itself becomes one state.

Shapes: M chunks of C tokens, G query heads, head dimensions H and Hv, L levels.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn.xla.recurrent_chunks import sums_of_log_decays


def attend(
    aligned: int,
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
    """Output `(M, C, G, Hv)`, and the states after the last token.

    Args:
      aligned: how many of the chunks, from the first one on, are known to be in one document and
        to begin at multiples of C = 2^c tokens. If it is not 0, `states` are zeros and `first` is
        0. Padding counts as tokens there, so states after padding are at higher levels than without
        it.
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
    arrays, outs = (query, key, value, log_decay, levels), []
    if aligned:
        out, states = _attend_aligned(dot, tuple(x[:aligned] for x in arrays), states)
        outs.append(out)
    if len(query) > aligned or not aligned:
        rest, marks = jax.tree.map(lambda x: x[aligned:], (arrays, marks))
        place = first + aligned * query.shape[1]
        out, states = _attend_anywhere(dot, rest, marks, states, first, place)
        outs.append(out)
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs), states


def _attend_aligned(dot, arrays, empty):
    """`attend` to chunks that begin at multiples of C; `empty` are states of zeros."""
    query, key, *_, levels = arrays
    size, count = key.shape[1], levels.shape[-1]
    near = min(size.bit_length(), count)  # levels of pairs in a chunk
    buckets = max(count - near, 1)  # states that can have tokens before a chunk
    token = jnp.arange(size, dtype=jnp.int32)
    pairs = _level(token[:, None], token[None], count)
    of_pairs = jax.nn.one_hot(pairs, near, dtype=key.dtype)  # (C, C, near)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(states, chunk):
        number, query, key, value, log_decay, levels = chunk
        since, since_start = sums_of_log_decays(log_decay)
        between = jnp.tril(jnp.exp(since))
        weights = dot("cgl,csl->gcs", levels[..., :near], of_pairs)
        weights = weights * dot("cgh,sh->gcs", query, key) * between[None]
        out = dot("gcs,sv->cgv", weights, value)

        decay = jnp.exp(since_start)
        read = levels[..., count - buckets :] * decay[:, None, None]
        out += dot("cgbh,bhv->cgv", read[..., None] * query[:, :, None], states)

        # The chunk and the lowest states become one state, as in a binary counter: as many states
        # as the chunk's number has bits of 1 at its end.
        merged = lax.population_count(number ^ (number + 1)) - 1
        merged = jnp.minimum(merged, buckets - 1)
        bucket = jnp.arange(buckets)[:, None, None]
        states = decay[-1] * states
        written = dot("sh,sv->hv", jnp.exp(since[-1])[:, None] * key, value)
        written += jnp.where(bucket <= merged, states, 0).sum(0)
        states = jnp.where(bucket < merged, 0, states)
        return jnp.where(bucket == merged, written[None], states), out

    below = count - 1 - buckets
    number = jnp.arange(len(query), dtype=jnp.int32)
    states, out = lax.scan(step, empty[below:], (number, *arrays))
    return out, jnp.concatenate([empty[:below], states])


def _attend_anywhere(dot, arrays, marks, states, first, place):
    """`attend` to chunks at any positions of any documents, the first of them at `place`."""
    key, levels = arrays[1], arrays[-1]
    count = levels.shape[-1]

    def one_hot(x, size):
        return jax.nn.one_hot(x, size, dtype=key.dtype)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(carry, chunk):
        states, place, carried = carry
        query, key, value, log_decay, levels, (present, document, position) = chunk
        position = position + jnp.where(document == 0, first, 0)
        own = (document[:, None] == document[None]) & present[None]
        since, since_start = sums_of_log_decays(log_decay)
        between = jnp.where(jnp.tril(own), jnp.exp(since), 0)
        pairs = _level(position[:, None], position[None], count)
        weights = dot("cgl,csl->gcs", levels, one_hot(pairs, count))
        weights = weights * dot("cgh,sh->gcs", query, key) * between[None]
        out = dot("gcs,sv->cgv", weights, value)

        starts, full = _buckets(place, count - 1)
        of_state = _level(position[:, None], starts[None], count).at[:, -1].set(count - 1)
        of_state = jnp.where(full[None, :, None], one_hot(of_state, count), 0)
        read = dot("cgl,cbl->cgb", levels, of_state)
        decay = jnp.where(document == carried, jnp.exp(since_start), 0)
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

    carry = states, place, jnp.zeros_like(first)
    (states, _, _), out = lax.scan(step, carry, (*arrays, marks))
    return out, states


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
