"""Packed sequences in causal and bidirectional calls of the linear recurrence."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import mesh_axes
from effattn.arrays.gathers import inverse_of, permute
from effattn.arrays.segments import both
from effattn.interfaces.linear_recurrence import Tokens


def within_documents(
    recurrence: Callable[..., tuple[jax.Array, jax.Array]],
    documents: tuple[jax.Array, jax.Array],
    parameters: Any,
    state: jax.Array,
    query: Any,
    key_value: Any,
    tokens: Tokens,
) -> tuple[jax.Array, jax.Array]:
    """Bidirectional attention inside packed documents, by a causal recurrence.

    Keys and queries are sorted by document, with the keys of each document before its queries. One
    causal recurrence then reads the sorted tokens, and resets its state at each document. Time is
    linear in T + S, plus the sort.

    Args:
      recurrence: the causal recurrence, called with the arguments below from `parameters` on.
      documents: segment ids of queries `(*B, T)` and of keys `(*B, S)`.
      parameters: as in `linear_recurrence`.
      state: as in `linear_recurrence`.
      query: a pytree of arrays `(*B, T, N, ...)`.
      key_value: a pair of arrays `(*B, S, K, ...)`.
      tokens: the query mask and the key mask; neither may be None.

    Returns:
      `(output (*B, T, N, D), state)`, as in `linear_recurrence`.
    """
    query_ids, key_ids = documents
    query_ids, key_ids, query, key_value, tokens = mesh_axes.vary_alike(
        (query_ids, key_ids, query, key_value, tokens)
    )
    queries, keys = query_ids.shape[-1], key_ids.shape[-1]
    order = jnp.argsort(jnp.concatenate([key_ids, query_ids], -1), -1, stable=True)
    place = inverse_of(order)

    def merge(of_keys, of_queries):
        return permute(jnp.concatenate([of_keys, of_queries], -3), order, place)

    def merge_known(of_keys, of_queries):
        return jnp.take_along_axis(jnp.concatenate([of_keys, of_queries], -1), order, -1)

    def none(x, length):
        return jnp.zeros_like(x, shape=(*x.shape[:-3], length, *x.shape[-2:]))

    no_query, no_key = jnp.zeros_like(key_ids, bool), jnp.zeros_like(query_ids, bool)
    merged = Tokens(merge_known(no_query, tokens.query_mask), merge_known(tokens.key_mask, no_key))
    ids = merge_known(key_ids, query_ids)
    starts = ids != jnp.concatenate([ids[..., :1], ids[..., :-1]], -1)
    out, state = recurrence(
        parameters,
        state,
        jax.tree.map(lambda x: merge(none(x, keys), x), query),
        tuple(merge(x, none(x, queries)) for x in key_value),
        merged._replace(starts=starts),
    )
    return permute(out, place, order)[..., keys:, :, :], state


def packed(segment_ids: jax.Array, tokens: Tokens, earlier: jax.Array | None = None) -> Tokens:
    """Masks and document starts of a packed causal sequence.

    A query reads its own document only, and the final state is the state of the last document.
    Padding (id 0, or a masked key) counts as part of the document before it, or of the first
    document at the start of the row. Padding therefore does not reset the state.

    `earlier` `(*B)` is the id of the document before the first token, 0 if there is none.
    """
    length = segment_ids.shape[-1]
    token = jnp.arange(length)
    in_document = segment_ids != 0
    first = jnp.min(jnp.where(in_document, token, length), -1, keepdims=True, initial=length)
    written: Any = both(in_document, tokens.key_mask)
    last = lax.cummax(jnp.where(written, token, -1), axis=segment_ids.ndim - 1)
    source = jnp.where(last < 0, first, last)
    document = jnp.take_along_axis(segment_ids, source, -1, mode="clip")
    before = document[..., :1]
    if earlier is not None:
        earlier = earlier[..., None]
        document = jnp.where((last < 0) & (earlier != 0), earlier, document)
        before = jnp.where(earlier != 0, earlier, document[..., :1])
    before = jnp.concatenate([before, document[..., :-1]], -1)
    reads = in_document & (segment_ids == document)
    return Tokens(both(reads, tokens.query_mask), written, document != before)
