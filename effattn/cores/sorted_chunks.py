"""Attention of one head among tokens of equal buckets, in chunks of the sorted tokens."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes
from effattn.arrays.combine import combine
from effattn.arrays.gathers import take
from effattn.arrays.products import widened
from effattn.cores.sorted_runs import groups_of, runs_of, sorted_in_chunks


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    buckets: jax.Array,
    documents: jax.Array | None,
    *,
    chunk_length: int,
    is_causal: bool,
    is_packed: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attends within the buckets of each round, and combines the rounds.

    Args:
      query: `(T, H)`.
      key: `(T, H)`.
      value: `(T, Hv)`.
      buckets: int `(T, n)`, the bucket of each token in each round.
      documents: int `(T,)`, the start of each token's document, T in the padding; None for one
        document without padding.
      chunk_length: m, tokens in a chunk.
      is_causal: a query sees the last m earlier tokens of its bucket; if not, it sees its own chunk
        and the chunk before it.
      is_packed: whether there may be several documents.

    Returns:
      Output `(T, Hv)`, at least float32, and log-sum-exp `(T,)`, `dtypes.lowest` for a token that
      attends to nothing.
    """
    sorted_, spans = sorted_in_chunks(buckets.T, documents, chunk_length, is_causal)
    runs = runs_of(spans, len(query), chunk_length, is_causal=is_causal, is_packed=is_packed)

    @jax.checkpoint
    def attend_round(query, key, value, each):
        return _attend_round(query, key, value, sorted_, runs, each, is_causal)

    def step(_, each):
        return None, attend_round(query, key, value, each)

    own = sorted_.order, sorted_.place, sorted_.sees, sorted_.is_at
    _, (outs, lses) = lax.scan(step, None, own)
    return combine(outs, lses)


def _attend_round(query, key, value, sorted_, runs, each, is_causal):
    """Returns output `(T, Hv)`, at least float32, and log-sum-exp `(T,)` of one round."""
    order, place, own_sees, own_is_at = each
    tiles, size = runs.places.shape[0], runs.places.shape[-1]
    length, rounds = order.shape[0], sorted_.order.shape[0]
    at_queries = order[jnp.minimum(jnp.arange(tiles * size), length - 1)].reshape(tiles, size)
    there = runs.places.reshape(tiles, -1)
    at = order[jnp.maximum(there, 0)]

    def of_queries(array):
        """`(..., T)` to `(tiles, ..., m)`."""
        return jnp.moveaxis(array[..., at_queries], -2, 0)

    def of_keys(array):
        """`(..., T)` to `(tiles, ..., r m)`, -1 at places that are not read."""
        return jnp.moveaxis(jnp.where(there < 0, -1, array[..., at]), -2, 0)

    readers = runs.readers[place]
    tokens = (
        take(query, at_queries, place[:, None]),
        take(key, at, readers),
        take(value, at, readers),
    )
    index = jnp.arange(length, dtype=jnp.int32)
    seen = {"tokens": (of_queries(index), of_keys(index))}
    seen["own"] = tuple(map(of_queries, own_sees)), of_keys(own_is_at)
    if rounds > 1:
        seen["all"] = tuple(map(of_queries, sorted_.sees)), of_keys(sorted_.is_at)

    def tile(x):
        queries, keys, values, seen = x
        which = _meets(seen["own"], is_causal)
        if not is_causal:
            of_query, of_key = seen["tokens"]
            which = which & (of_query[:, None] != of_key[None])
        times = _meets(seen["all"], is_causal).sum(0) if rounds > 1 else None
        return softmax_over(queries, keys, values, which, times)

    some = tiles // groups_of(length, size)
    results = lax.map(jax.checkpoint(tile), (*tokens, seen), batch_size=some)
    back = jnp.pad(order, (0, tiles * size - length), constant_values=-1)[:, None]
    out, lse = (take(x.reshape(tiles * size, *x.shape[2:]), place, back) for x in results)
    return out, lse


def softmax_over(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    which: jax.Array,
    times: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax over the pairs `which (m, s)`: output `(m, Hv)`, at least float32, and lse `(m,)`.

    The weight of each pair is divided by its `times`.
    """
    wide = dtypes.wide(query, value)
    logits = widened(functools.partial(jnp.einsum, "mh,sh->ms"), query, key, wide)
    lowest = dtypes.lowest(wide)
    logits = jnp.where(which, logits, lowest)
    largest = lax.stop_gradient(logits.max(-1))
    largest = jnp.where(largest == lowest, 0, largest)
    weights = jnp.exp(logits - largest[:, None])
    if times is not None:
        weights = weights / jnp.maximum(times, 1).astype(wide)
    total = weights.sum(-1)
    total_or_one = jnp.where(total == 0, 1, total)
    product = functools.partial(jnp.einsum, "ms,sv->mv")
    mixed = widened(product, weights.astype(value.dtype), value, wide)
    lse = jnp.where(total == 0, lowest, largest + jnp.log(total_or_one))
    return mixed / total_or_one[:, None], lse


def _meets(seen, is_causal):
    """True where queries `sees (..., m)` attend to keys `is_at (..., s)`: `(..., m, s)`."""
    sees, is_at = seen
    (first, second), is_at = (x[..., None] for x in sees), is_at[..., None, :]
    if is_causal:
        return (is_at >= first) & (is_at < second)
    return (is_at == first) | (is_at == second)
