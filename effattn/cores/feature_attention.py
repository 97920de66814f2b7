"""Shared arguments and call path of feature-map attention, causal or bidirectional."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays import checks, dtypes
from effattn.arrays.segments import valid
from effattn.cores import recurrence
from effattn.cores.documents import packed
from effattn.interfaces.linear_recurrence import Terms, Tokens


def check(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    segment_ids: Any = None,
    initial_state: Any = None,
    return_state: bool = False,
    precision: Any = None,
    chunk_size: Any = None,
    implementation: Any = None,
) -> recurrence.Arguments:
    """Checks the shared arguments (see `effattn.options.FeatureMapped`).

    Raises:
      ValueError: an argument is invalid, or two arguments exclude each other.
    """
    batch = checks.query_key_value(query, key, value)
    queries, keys = query.shape[-3], key.shape[-3]
    ids = checks.segment_ids(segment_ids, batch, queries, keys)
    query_lengths = checks.lengths("query_seq_lengths", query_seq_lengths, batch)
    key_lengths = checks.lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    _check_options(batch, queries, keys, is_causal, segment_ids, initial_state, return_state)
    query_ids, key_ids = (None, None) if ids is None else ids
    tokens = Tokens(valid(query_lengths, query_ids, queries), valid(key_lengths, key_ids, keys))
    if ids is not None and is_causal:
        tokens = packed(ids[1], tokens)
    return recurrence.Arguments(
        batch=batch,
        query=query,
        key=key,
        value=value,
        tokens=tokens,
        precision=precision,
        chunk=recurrence.check_chunk_size(chunk_size),
        dtype=recurrence.sum_dtype(query, key, value),
        documents=None if is_causal else ids,
        initial_state=initial_state,
        is_causal=is_causal,
        return_state=return_state,
        implementation=implementation,
    )


def attend(
    name: str,
    terms: Callable[[Any, Any, Any], Terms],
    given: recurrence.Arguments,
    parameters: Any = None,
    *more: jax.Array,
) -> Any:
    """The result of a mechanism whose weights are normalised.

    `terms` gets the query, and the tuple (key, value, *more).
    """
    keys = given.key, given.value, *more
    out, state = recurrence.run(name, terms, given, given.query, keys, parameters, normalized=True)
    return recurrence.results(out, state, given)


def _check_options(batch, queries, keys, is_causal, segment_ids, initial_state, return_state):
    """`ValueError` for options that exclude each other."""
    if is_causal and queries != keys:
        raise ValueError(
            f"is_causal=True needs as many queries as keys, got {queries} and {keys}; to continue "
            "a sequence pass only its new tokens, and as initial_state the state that "
            "return_state=True gave"
        )
    if is_causal and checks.is_pair(segment_ids, (*batch, keys)):
        raise ValueError(
            "segment_ids must be one array (*B, T) where is_causal=True, got a pair: query t and "
            "key t are the same token"
        )
    with_state = initial_state is not None or return_state
    if with_state and segment_ids is not None and not is_causal:
        raise ValueError(
            "initial_state and return_state with segment_ids need is_causal=True: a packed "
            "bidirectional row has a sum for each document; pass one document a row, padded by "
            "key_value_seq_lengths"
        )


def positive_scale(value: Any, query: jax.Array) -> jax.Array:
    """Checks a scale `()` above 0; its square root multiplies both queries and keys."""
    array = recurrence.check_scale(value, query)
    known = None if value is None else checks.known(value)
    if known is not None and not known > 0:
        raise ValueError(f"scale must be above 0, got {value!r}: its root multiplies both sides")
    return array


def check_projection(name: str, projection: Any, key: jax.Array) -> jax.Array:
    """Checks projection vectors `(1, m, H)`, or `(K, m, H)` for each key head."""
    projection = jnp.asarray(projection)
    heads, size = key.shape[-2:]
    if (
        projection.ndim != 3
        or projection.shape[0] not in (1, heads)
        or projection.shape[1] == 0
        or projection.shape[2] != size
        or not jnp.issubdtype(projection.dtype, jnp.floating)
    ):
        raise ValueError(
            f"{name} must be floating point of shape (1, m, {size}), or ({heads}, m, {size}) "
            "with vectors of each key head, which its query heads share; got "
            f"{projection.dtype} of shape {projection.shape}"
        )
    return projection


def products(x: jax.Array, projection: jax.Array, precision: Any = None) -> jax.Array:
    """Products w . x `(*B, L, N, m)` of `x (*B, L, N, H)` and `projection (1 or K, m, H)`."""
    heads, features, _ = projection.shape
    grouped = x.reshape(*x.shape[:-2], heads, x.shape[-2] // heads, x.shape[-1])
    grouped, projection = dtypes.alike(grouped, projection)
    projected = jnp.einsum("...kgh,kmh->...kgm", grouped, projection, precision=precision)
    return projected.reshape(*x.shape[:-1], features)
