"""Static configuration and inputs of a linear recurrence.

`effattn.cores.linear_recurrence` gives the formulas of the recurrence.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from effattn import dispatch

# Tokens in a chunk. A decay per feature or value needs one matrix product per halving of the chunk,
# so its chunks are shorter.
CHUNK, CHUNK_BY_FEATURE = 64, 32


class Terms(NamedTuple):
    """Terms of the recurrence for tokens `(*B, L)`; None if absent.

    N query heads, K key heads and V value heads, with a state for each value head; N or V equals K.
    If V = K, query head n reads state n // (N // K). If N = K, key head v // (V // K) writes state
    v, and the query head of the same number reads it.

    Attributes:
      query: `(*B, L, N, F)`.
      key: `(*B, L, K, F)`.
      value: `(*B, L, V, D)`.
      log_decay: log decay w, 0 or less: `(V,)`, `(*B, L, V)`, or if V = K also `(*B, L, K, F)`.
      bonus: `(K, F)`, the u of the bonus form: a query reads the state before its token, plus the
        key and value of its token times u.
      removed: `(*B, L, K, F)`, the a of the delta form; if None and `recalled` is given, a is the
        key.
      recalled: `(*B, L, K, F)`, the b of the delta form; None for a plain recurrence.
      least: `(*B, L, V)`, above 0: a normalised recurrence divides by the absolute value of the sum
        of the weights, or by `least` if that is more.
      value_log_decay: `(*B, L, V, D)`, log decay of each column of the state, 0 or less; for a
        plain recurrence without another decay and without a normaliser.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array | None = None
    bonus: jax.Array | None = None
    removed: jax.Array | None = None
    recalled: jax.Array | None = None
    least: jax.Array | None = None
    value_log_decay: jax.Array | None = None


class Config(NamedTuple):
    """Static configuration of a linear recurrence.

    Attributes:
      terms: `(parameters, queries, keys) -> Terms`, the mechanism's function for a block of tokens.
        It computes each token independently, and may not close over arrays. The backward pass
        calls it again, so its intermediate results are not saved.
      dtype: dtype of the output.
      normalized: divide the output by the sum of the weights (see also `Terms.least`).
      precision: precision of the matrix products.
      chunk: most tokens in a chunk; device kernels have fixed chunk sizes.
      implementations: the result of `effattn.dispatch.choose`.
    """

    terms: Callable[[Any, Any, Any], Terms]
    dtype: Any
    normalized: bool = False
    precision: Any = None
    chunk: int = CHUNK
    implementations: dispatch.Chosen = dispatch.XLA


class Tokens(NamedTuple):
    """Padding masks and document starts; None if absent.

    Attributes:
      query_mask: bool `(*B, T)`, False for queries whose output is zero.
      key_mask: bool `(*B, T)`, False for tokens that leave the state unchanged (padding).
      starts: bool `(*B, T)`, True for tokens that reset the state first (start of a document).
    """

    query_mask: jax.Array | None = None
    key_mask: jax.Array | None = None
    starts: jax.Array | None = None


class Inputs(NamedTuple):
    """Arrays of a linear recurrence. Arrays marked * have gradients.

    Attributes:
      parameters: pytree for `Config.terms` that does not depend on the token *.
      state: the state before the first token, `(*B, V, F, D)`, or `(*B, V, F, D + 1)` if
        normalised. All sums have the dtype of the state *.
      queries: pytree of arrays `(*B, T, ...)` for `Config.terms`; zero where the query mask is
        False *.
      keys: pytree of arrays `(*B, T, ...)` for `Config.terms`; zero where the key mask is False *.
      tokens: padding masks and starts of packed documents.
    """

    parameters: Any
    state: jax.Array
    queries: Any
    keys: Any
    tokens: Tokens | None


def own_chunk(terms: Terms) -> int:
    """Default number of tokens in a chunk."""
    decay = terms.log_decay
    by_feature = decay is not None and decay.ndim == terms.key.ndim
    return CHUNK_BY_FEATURE if by_feature or terms.value_log_decay is not None else CHUNK


@jax.custom_jvp
def normalize(output: jax.Array) -> jax.Array:
    """Divides `(..., D + 1)` by its last entry, the normaliser: `(..., D)`.

    The result is zero if the normaliser is zero or subnormal: a subnormal number has too few
    significant bits to divide by. The custom JVP never divides by the square of the normaliser.
    """
    return output[..., :-1] * _reciprocal(output[..., -1:])


@normalize.defjvp
def _normalize_jvp(primals, tangents):
    (output,), (tangent,) = primals, tangents
    normalized = normalize(output)
    change = tangent[..., :-1] - normalized * tangent[..., -1:]
    return normalized, change * _reciprocal(output[..., -1:])


def _reciprocal(x: jax.Array) -> jax.Array:
    usable = jnp.abs(x) >= jnp.finfo(x.dtype).tiny
    return jnp.where(usable, 1 / jnp.where(usable, x, 1), 0)


def divided(config: Config, output: jax.Array, least: jax.Array | None) -> jax.Array:
    """The outputs `(*B, L, N, D)`, normalised if the recurrence is; `least` as in `Terms`."""
    if not config.normalized:
        return output
    if least is not None:
        least = jnp.repeat(least, output.shape[-2] // least.shape[-1], -1)[..., None]
        normaliser = jnp.maximum(jnp.abs(output[..., -1:]), least)
        output = jnp.concatenate([output[..., :-1], normaliser], -1)
    return normalize(output)


def append_one(value: jax.Array) -> jax.Array:
    """Appends an entry of 1 to each value `(..., D)`; its weighted sum is the normaliser."""
    return jnp.concatenate([value, jnp.ones_like(value, shape=(*value.shape[:-1], 1))], axis=-1)


def clear(tree, mask):
    """Sets arrays `(*B, L, ...)` to zero where `mask (*B, L)` is False; None masks nothing."""
    if mask is None:
        return tree
    return jax.tree.map(
        lambda x: jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim)), x, 0), tree
    )


def masked_terms(
    config: Config,
    parameters: Any,
    queries: Any,
    keys: Any,
    tokens: Tokens,
    dtype: Any,
    alike: bool = False,
) -> Terms:
    """Terms of the recurrence in `dtype`, zero for masked tokens.

    With `alike`, a decay per head `(V,)` is not expanded to tokens; then no token may be masked.
    """
    arguments = parameters, clear(queries, tokens.query_mask), clear(keys, tokens.key_mask)
    terms = config.terms(*jax.tree.map(lambda x: x.astype(dtype), arguments))
    if config.normalized:
        terms = terms._replace(value=append_one(terms.value))
    if terms.log_decay is not None:
        log_decay = terms.log_decay
        if log_decay.ndim == 1 and not alike:
            log_decay = jnp.broadcast_to(log_decay, terms.value.shape[:-1])
        if log_decay.ndim > 1:
            log_decay = clear(log_decay, tokens.key_mask)
        terms = terms._replace(log_decay=log_decay)
    of_keys = {name: getattr(terms, name) for name in ("key", "removed", "value_log_decay")}
    return terms._replace(**clear(of_keys, tokens.key_mask))
