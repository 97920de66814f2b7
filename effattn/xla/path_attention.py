"""Softmax attention along paths of Householder-like transformations, in XLA.

The logit of query i and key j is q_i^T H_i H_(i-1) ... H_(j+1) k_j, H_t = I - beta_t w_t w_t^T.
Tokens are cut into tiles of C. Within a tile, products of transformations come from one unit
triangular system (the UT transform). The keys of a tile are transformed to the end of their tile,
and the queries to the start of theirs. A query then reads the earlier tiles one by one, from the
nearest to the first, and each tile multiplies it by the product of its transformations (Yang et al.
2025, "PaTH Attention").

Time is O(T^2 (H + Hv + H^2 / C)), memory O(T (C + H^2 / C)), forward and backward: the backward
pass computes the tiles again, by `jax.checkpoint`.

Shapes of one key head: T tokens in M tiles of C, G query heads, head dimensions H and Hv.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes, mesh_axes
from effattn.arrays.axes import fold, over_batch
from effattn.xla.recurrent_chunks import unit_inverse

SMALLEST, LARGEST = 32, 128  # default sizes of tiles


class Tokens(NamedTuple):
    """Tokens of one key head, zero in the padding.

    Attributes:
      query: `(T, G, H)`, times the scale.
      key: `(T, H)`.
      value: `(T, Hv)`.
      reflection: `(T, H)`, w.
      beta: `(T,)`.
      query_ids: int `(T,)`, documents of the queries; -1 in the padding.
      key_ids: int `(T,)`, documents of the keys; 0 in the padding.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    reflection: jax.Array
    beta: jax.Array
    query_ids: jax.Array
    key_ids: jax.Array


class Factors(NamedTuple):
    """Factors of the transformations of M tiles, whose products are P = I - W^T U.

    Attributes:
      reflection: `(M, C, H)`, W.
      strength: `(M, C, H)`, U.
      inverse: `(M, C, C)`, of the unit triangular system, times beta.
    """

    reflection: jax.Array
    strength: jax.Array
    inverse: jax.Array


class _Keys(NamedTuple):
    """Keys `(C, H)`, values and documents of a tile, and its product P `(H, H)`."""

    key: jax.Array
    value: jax.Array
    ids: jax.Array
    product: jax.Array


class _Rows(NamedTuple):
    """Queries `(G, C, H)` of a tile, and the largest logits, sums and outputs so far."""

    query: jax.Array
    largest: jax.Array
    total: jax.Array
    out: jax.Array


@functools.partial(jax.jit, static_argnums=(0, 1))
def attend(
    tile: int | None, precision: Any, tokens: Tokens
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of all heads.

    Args:
      tile: C; None is a default.
      precision: precision of the matrix products.
      tokens: query `(*B, T, K, G, H)`; key and reflection `(*B, T, K, H)`; value `(*B, T, K, Hv)`;
        beta `(*B, T, K)`; ids `(*B, T)`. Floating-point arrays are at least float32.

    Returns:
      The output `(*B, T, K, G, Hv)`; the log-sum-exp `(*B, T, K, G)`, `dtypes.lowest` for rows
      without keys; and the queries carried to before the first token, `(*B, T, K, G, H)`.
    """
    if 0 in (*tokens.query.shape, *tokens.value.shape):
        out = jnp.zeros((*tokens.query.shape[:-1], tokens.value.shape[-1]), tokens.value.dtype)
        return out, jnp.full_like(tokens.query[..., 0], _lowest(out)), tokens.query
    tokens = mesh_axes.vary_alike(tokens)
    size = _tile(tile, tokens.key)
    axes: Any = 1, 1, 1, 1, 1, None, None  # of key heads, without `*B`
    of_heads = jax.vmap(functools.partial(_of_head, size, precision), (Tokens(*axes),), 1)
    return over_batch(of_heads, tokens.key.ndim - 3)(tokens)


def carried(
    tile: int | None,
    precision: Any,
    key: jax.Array,
    reflection: jax.Array,
    beta: jax.Array,
    first: jax.Array,
    put: Any,
) -> jax.Array:
    """Cached keys after the transformations of T new tokens, with the new keys.

    Args:
      tile: as in `attend`.
      precision: as in `attend`.
      key: new keys `(B, T, K, H)`, at least float32.
      reflection: `(B, T, K, H)`, zero in the padding.
      beta: `(B, T, K)`.
      first: int `(B,)`, the slot of each row's first new key.
      put: function of the new keys to the cache with them, `(B, S, K, H)`.
    """
    size = _tile(tile, key)

    def of_head(key, reflection, beta):
        factors = _factors(size, precision, reflection, beta)
        keys, _ = _to_end(precision, factors, fold(key, size, 0))
        return keys.reshape(-1, key.shape[-1])[: len(key)], factors

    over_heads = jax.vmap(jax.vmap(of_head, 1, (1, 0)))
    keys, factors = over_heads(key, reflection, beta)

    def step(cache, tile):
        m, reflection, strength = tile  # (B, K, C, H)
        read = jnp.einsum("bskh,bkch->bskc", cache, strength, precision=precision)
        moved = cache - jnp.einsum("bskc,bkch->bskh", read, reflection, precision=precision)
        before = jnp.arange(cache.shape[1], dtype=first.dtype)[None] < (first + m * size)[:, None]
        return jnp.where(before[..., None, None], moved, cache), None

    tiles = (jnp.moveaxis(x, 2, 0) for x in (factors.reflection, factors.strength))
    numbers = jnp.arange(factors.reflection.shape[2], dtype=first.dtype)
    return lax.scan(step, put(keys), (numbers, *tiles))[0]


def _tile(tile, key):
    """Tokens in a tile: about as many as features, so that P costs as much as logits."""
    tokens, _, features = key.shape[-3:]
    default = min(max(_power_of_two(features), SMALLEST), LARGEST)
    return min(tile or default, tokens)


def _lowest(x):
    return dtypes.lowest(x.dtype)


def _factors(size, precision, reflection, beta) -> Factors:
    reflection, beta = fold(reflection, size, 0), fold(beta, size, 0)[..., None]

    def dot(a, b):
        return jnp.matmul(a, b, precision=precision)

    system = jnp.tril(dot(beta * reflection, jnp.swapaxes(reflection, 1, 2)), -1)
    more = _power_of_two(max(size, 2)) - size
    inverse = unit_inverse(jnp.pad(system, ((0, 0), (0, more), (0, more))), dot)[:, :size, :size]
    inverse = inverse * jnp.swapaxes(beta, 1, 2)
    return Factors(reflection, dot(inverse, reflection), inverse)


def _power_of_two(size):
    return 1 << (size - 1).bit_length()


def _to_end(precision, factors, key):
    """Carries keys `(M, C, H)` to the ends of their tiles.

    Also returns `(M, C, C)`, by which the transformations after a key change its logits.
    """
    dot = functools.partial(jnp.einsum, precision=precision)
    later = jnp.tril(dot("msh,mjh->msj", factors.reflection, key), -1)
    later = dot("mst,mtj->msj", factors.inverse, later)
    return key - dot("msj,msh->mjh", later, factors.reflection), later


def _of_head(size, precision, x: Tokens):
    """`attend` for one key head: `(T, G, Hv)`, `(T, G)` and `(T, G, H)`."""
    dot = functools.partial(jnp.einsum, precision=precision)
    length = len(x.key)
    factors = _factors(size, precision, x.reflection, x.beta)
    query = jnp.moveaxis(fold(x.query, size, 0), 1, 2)
    key, value = fold(x.key, size, 0), fold(x.value, size, 0)
    query_ids = fold(x.query_ids, size, 0)
    key_ids = fold(x.key_ids, size, 0)

    read = jnp.tril(dot("mgch,msh->mgcs", query, factors.reflection))
    ends, later = _to_end(precision, factors, key)
    logits = dot("mgch,msh->mgcs", query, key) - dot("mgct,mts->mgcs", read, later)
    query = query - dot("mgcs,msh->mgch", read, factors.strength)
    product = jnp.eye(key.shape[-1], dtype=key.dtype)[None] - dot(
        "mch,mcf->mhf", factors.reflection, factors.strength
    )
    keys = _Keys(ends, value, key_ids, product)
    add = functools.partial(_added, dot)
    allowed = jnp.tril(_alike(query_ids, key_ids))
    rows = jax.vmap(add)(_none(query, value), query, logits, allowed, value)
    if len(key) > 1:
        rows = _over_earlier_tiles(dot, rows, query_ids, keys)
    empty = rows.total == 0
    total = jnp.where(empty, 1, rows.total)
    out = rows.out / total[..., None]
    lse = jnp.where(empty, _lowest(total), rows.largest + jnp.log(total))

    def joined(x):
        x = jnp.moveaxis(x, 1, 2)
        return x.reshape(-1, *x.shape[2:])[:length]

    return joined(out), joined(lse), joined(rows.query)


def _alike(query_ids, key_ids):
    """Pairs `(..., C, C)` in one document."""
    return (query_ids[..., :, None] == key_ids[..., None, :]) & (key_ids != 0)[..., None, :]


def _none(query, value) -> _Rows:
    """Rows that have read no key."""
    total = jnp.zeros_like(query[..., 0])
    out = jnp.zeros_like(query, shape=(*query.shape[:-1], value.shape[-1]))
    return _Rows(query, total + _lowest(total), total, out)


def _added(dot, rows: _Rows, query, logits, allowed, value) -> _Rows:
    """Rows that have also read a tile of keys with `logits (G, C, C)`.

    `query` replaces the queries of the rows: it is for the tile before.
    """
    lowest = _lowest(logits)
    allowed = allowed[None]
    largest = jnp.maximum(rows.largest, jnp.where(allowed, logits, lowest).max(-1))
    largest = lax.stop_gradient(largest)
    weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, logits - largest[..., None], 0)), 0)
    kept = jnp.exp(jnp.where(rows.total > 0, lax.stop_gradient(rows.largest) - largest, 0))
    total = kept * rows.total + weights.sum(-1)
    return _Rows(
        query,
        largest,
        total,
        kept[..., None] * rows.out + dot("gcs,sv->gcv", weights, value),
    )


def _over_earlier_tiles(dot, rows: _Rows, query_ids, keys: _Keys) -> _Rows:
    """Rows `(M, ...)` that have read their own tiles, after reading the earlier tiles."""
    tiles = len(query_ids)
    backwards = jax.tree.map(lambda x: x[::-1], keys)

    def read(query_ids, rows, keys: _Keys):
        logits = dot("gch,sh->gcs", rows.query, keys.key)
        query = dot("gch,hf->gcf", rows.query, keys.product)
        return _added(dot, rows, query, logits, _alike(query_ids, keys.ids), keys.value)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_tile(backwards, tile):
        n, rows, query_ids = tile

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def step(rows, step):
            number, keys = step
            operands = query_ids, rows, keys
            return lax.cond(number < n, read, lambda _, rows, keys: rows, *operands), None

        # The first n of these are the tiles before tile n, from the nearest.
        earlier = jax.tree.map(lambda x: jnp.roll(x, n, 0)[:-1], backwards)
        return lax.scan(step, rows, (jnp.arange(tiles - 1), earlier))[0]

    return lax.map(functools.partial(of_tile, backwards), (jnp.arange(tiles), rows, query_ids))
