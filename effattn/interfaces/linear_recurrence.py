"""Static configuration and inputs of a linear recurrence, as every implementation receives them.

The recurrence itself is written out in `effattn.cores.linear_recurrence`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from effattn import dispatch

# Tokens of one masked product. Where features decay of their own it is a product for each halving
# of the chunk, and shorter chunks have fewer.
CHUNK, CHUNK_BY_FEATURE = 64, 32


class Terms(NamedTuple):
    """What a recurrence sums, of tokens `(*B, L)`; None where absent.

    Query head n reads key head n // (N // K), and value head v writes at key head v // (V // K);
    one of N and V is K.

    Attributes:
      query: `(*B, L, N, F)`.
      key: `(*B, L, K, F)`.
      value: `(*B, L, V, D)`.
      log_decay: `(V,)`, `(*B, L, V)`, or where V is K also `(*B, L, K, F)`; 0 or less.
      bonus: `(K, F)`: a query reads the state before its token, and of the token this much.
      removed: `(*B, L, K, F)`, the a of the delta form; None, with `recalled`, is the key.
      recalled: `(*B, L, K, F)`, the b of the delta form; None is the plain one.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array | None = None
    bonus: jax.Array | None = None
    removed: jax.Array | None = None
    recalled: jax.Array | None = None


class Config(NamedTuple):
    """What is fixed when the program is traced.

    Attributes:
      terms: `(parameters, queries, keys) -> Terms`, for a block of tokens: what a mechanism makes
        of its arguments. It treats tokens alike and may not close over arrays. It is run again in
        the backward pass, so nothing that it makes is kept.
      dtype: of the output.
      normalized: divide by the sum of the weights.
      precision: of the matrix products.
      chunk: tokens of one masked product, at most; kernels have chunks of their own.
      implementations: as `effattn.dispatch.choose` gives them.
    """

    terms: Callable[[Any, Any, Any], Terms]
    dtype: Any
    normalized: bool = False
    precision: Any = None
    chunk: int = CHUNK
    implementations: dispatch.Chosen = dispatch.XLA


class Tokens(NamedTuple):
    """What is known of each token; None where absent.

    Attributes:
      query_mask: bool `(*B, T)`, False for queries that read zeros.
      key_mask: bool `(*B, T)`, False for tokens that leave the state as it is, whatever is there.
      starts: bool `(*B, T)`, True where the state before the token is dropped.
    """

    query_mask: jax.Array | None = None
    key_mask: jax.Array | None = None
    starts: jax.Array | None = None


class Inputs(NamedTuple):
    """The arrays. Those marked * have gradients.

    Attributes:
      parameters: a pytree that all tokens share, for `Config.terms` *.
      state: before the first token, `(*B, V, F, D)`, or `(*B, V, F, D + 1)` if normalised. Its
        dtype is that of all sums *.
      queries: a pytree of arrays `(*B, T, ...)` for `Config.terms`, cleared by the query mask *.
      keys: a pytree of arrays `(*B, T, ...)` for `Config.terms`, cleared by the key mask *.
      tokens: padding and packed documents.
    """

    parameters: Any
    state: jax.Array
    queries: Any
    keys: Any
    tokens: Tokens | None


def own_chunk(terms: Terms) -> int:
    """Tokens of one masked product, where nobody says how many."""
    decay = terms.log_decay
    by_feature = decay is not None and decay.ndim == terms.key.ndim
    return CHUNK_BY_FEATURE if by_feature else CHUNK


@jax.custom_jvp
def normalize(output: jax.Array) -> jax.Array:
    """Divides `(..., D + 1)` by its last entry, to `(..., D)`; zeros where that is zero.

    A subnormal number counts as zero: it has too few bits to divide by. Derivatives divide by the
    normaliser once, never by its square.
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


def append_one(value: jax.Array) -> jax.Array:
    """Gives each value `(..., D)` a last entry of 1, which sums the weights."""
    return jnp.concatenate([value, jnp.ones_like(value, shape=(*value.shape[:-1], 1))], axis=-1)


def clear(tree, mask):
    """Arrays `(*B, L, ...)` with zeros where `mask (*B, L)` is False; None hides nothing."""
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
    """What is summed, in the dtype of the sums; of masked tokens, nothing.

    `alike` leaves a decay of each head at that: all tokens decay.
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
    return terms._replace(
        key=clear(terms.key, tokens.key_mask), removed=clear(terms.removed, tokens.key_mask)
    )
