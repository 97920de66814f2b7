"""Softmax attention from each query to the blocks of keys that this query has chosen.

All of this is for one key head, and for query heads that choose alike. Pairs of a query and a
chosen block are sorted by block and cut in tiles of pairs with one block, so every product is a
matrix product.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes, mesh_axes
from effattn.arrays.products import widened
from effattn.cores.folding import fold

# Maximum pairs in a tile.
_PAIRS = 256


class Tiles(NamedTuple):
    """Tiles of pairs (query, block) in order of blocks.

    Attributes:
      rows: int32 `(tiles, m)`, the query of each pair, all different in a tile; T or more for none.
      block: int32 `(tiles,)`, the block of each tile.
    """

    rows: jax.Array
    block: jax.Array


class _Static(NamedTuple):
    """Static configuration of a call."""

    pairs: int
    precision: Any


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    blocks: jax.Array,
    last: jax.Array,
    *,
    block_size: int,
    scale: float | jax.Array,
    precision: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends from each query to the keys of its blocks, up to the last key that it may see.

    Time O(T G k b (H + Hv)) for k blocks of b keys a query, memory O(T (k + G H + G Hv) + S),
    forward and backward.

    Args:
      query: `(T, G, H)`, G query heads.
      key: `(S, H)`.
      value: `(S, Hv)`.
      blocks: int32 `(T, k)`, different blocks for each query; -1 for none. No gradient.
      last: int32 `(T,)`, the last key that each query may see, -1 for none.
      block_size: b, keys in a block.
      scale: multiplies the products.
      precision: as in `jax.lax.dot`.

    Returns:
      Output `(T, G, Hv)` in the dtype of `value`, and log-sum-exp `(T, G)`, at least float32 and
      `dtypes.lowest` for a query without keys.
    """
    key, value = (fold(x, block_size, 0) for x in (key, value))
    wide = dtypes.wide(query, key, value)
    static = _Static(_pairs_of(blocks.size, len(key)), precision)
    arrays = query, key, value, jnp.asarray(scale, wide), blocks, last
    return _attend(static, *mesh_axes.vary_alike(arrays))


def largest(scores: jax.Array, count: int) -> jax.Array:
    """Indices of the `count` largest scores `(..., n)`, int32; -1 for a score of `dtypes.lowest`.

    Equal scores go to the smaller index.
    """
    index = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    # XLA sorts the rows of each device alone, but gathers those of all devices for `lax.top_k`.
    found, index = lax.sort((-scores, index), num_keys=1, is_stable=True)
    found, index = (x[..., :count] for x in (found, index))
    return jnp.where(found < -dtypes.lowest(found.dtype), index, -1)


def in_tiles_of_queries(function: Any, arrays: Any, tokens: int) -> Any:
    """Maps a function over tiles of `tokens` queries, one tile in memory at a time.

    Args:
      function: from a pytree of `(tokens, ...)` to a pytree of `(tokens, ...)`, row by row.
      arrays: pytree of `(T, ...)`.
      tokens: queries in a tile.
    """
    length = len(jax.tree.leaves(arrays)[0])
    tokens = min(tokens, max(length, 1))
    results = lax.map(function, jax.tree.map(lambda x: fold(x, tokens, 0), arrays))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:length], results)


def _pairs_of(pairs: int, blocks: int) -> int:
    """Pairs in a tile: a power of two, small enough that a block fills several tiles."""
    each = max(pairs // max(4 * blocks, 1), 1)
    return min(_PAIRS, 2 ** int(math.log2(each)))


def _tiles(blocks: jax.Array, count: int, size: int) -> Tiles:
    """Tiles of `size` pairs, from the chosen blocks `(T, k)` among `count` blocks."""
    rows, each = blocks.shape
    pairs = rows * each
    tiles = min(pairs, pairs // size + count)
    flat = jnp.where(blocks < 0, count, blocks).reshape(-1)
    of_pairs, order = lax.sort((flat, jnp.arange(pairs, dtype=jnp.int32)), num_keys=1)
    every = jnp.arange(count + 1, dtype=jnp.int32)
    start = jnp.searchsorted(of_pairs, every).astype(jnp.int32)
    ends = jnp.cumsum(-((start[:-1] - start[1:]) // size), dtype=jnp.int32)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    block = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
    is_tile, block = block < count, jnp.minimum(block, count - 1)
    before = jnp.where(block > 0, ends[block - 1], 0)
    inside = jnp.arange(size, dtype=jnp.int32)
    place = (start[block] + (tile - before) * size)[:, None] + inside[None]
    is_pair = is_tile[:, None] & (place < start[block + 1][:, None])
    # Rows past the end differ within a tile, so that each index of a scatter is unique.
    row = jnp.where(is_pair, order[jnp.minimum(place, pairs - 1)] // each, rows + inside[None])
    return Tiles(row, block)


def _read(x, rows, otherwise=0):
    """Rows of x, and `otherwise` for rows past the end."""
    return x.at[rows].get(mode="fill", fill_value=otherwise)


def _write(x, rows, new):
    return x.at[rows].set(new, mode="drop", unique_indices=True)


def _products(static: _Static, query, key, dtype, last, block):
    """Products `(m, G, b)` of a tile, and which of its pairs of tokens may attend, `(m, 1, b)`."""
    product = functools.partial(jnp.einsum, "mgh,sh->mgs", precision=static.precision)
    at = block * len(key) + jnp.arange(len(key), dtype=jnp.int32)
    return widened(product, query, key, dtype), at[None, None] <= last[:, None, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, query, key, value, scale, blocks, last):
    """Queries `(T, G, H)` attend to their blocks of keys `(n, b, H)` and values `(n, b, Hv)`."""
    out, lse, _ = _forward(static, query, key, value, scale, blocks, last)
    return out.astype(value.dtype), lse


def _forward(static: _Static, query, key, value, scale, blocks, last):
    """Output, log-sum-exp, and the largest logit and the sum of each query."""
    wide, rows = scale.dtype, query.shape[:2]
    lowest = dtypes.lowest(wide)
    mix = functools.partial(jnp.einsum, "mgs,sv->mgv", precision=static.precision)

    def step(carry, tile):
        largest, total, mixed = carry
        at, block = tile
        tokens = _read(query, at), key[block]
        products, allowed = _products(static, *tokens, wide, _read(last, at), block)
        logits = scale * products
        before = _read(largest, at)
        after = jnp.maximum(before, jnp.where(allowed, logits, lowest).max(-1))
        finite = jnp.where(after == lowest, 0, after)
        weights = jnp.exp(jnp.where(allowed, logits - finite[..., None], lowest))
        kept = jnp.exp(jnp.where(before == lowest, lowest, before - finite))
        new = widened(mix, weights.astype(value.dtype), value[block], wide)
        return (
            _write(largest, at, after),
            _write(total, at, kept * _read(total, at) + weights.sum(-1)),
            _write(mixed, at, kept[..., None] * _read(mixed, at) + new),
        ), None

    empty = jnp.full(rows, lowest), jnp.zeros(rows, wide), jnp.zeros((*rows, value.shape[-1]), wide)
    empty = jax.tree.map(lambda x: mesh_axes.vary_like(query, x), empty)
    tiles = _tiles(blocks, len(key), static.pairs)
    (largest, total, mixed), _ = lax.scan(step, empty, tiles)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    largest = jnp.where(is_empty, 0, largest)
    lse = jnp.where(is_empty, lowest, largest + jnp.log(total))
    return mixed / total[..., None], lse, (largest, total)


def _attend_fwd(static: _Static, query, key, value, scale, blocks, last):
    out, lse, sums = _forward(static, query, key, value, scale, blocks, last)
    saved = query, key, value, scale, blocks, last, out, sums
    return (out.astype(value.dtype), lse), saved


def _attend_bwd(static: _Static, saved, cotangents):
    query, key, value, scale, blocks, last, out, (largest, total) = saved
    d_out, d_lse = cotangents
    wide = scale.dtype
    delta = (d_out.astype(wide) * out).sum(-1) - d_lse

    def product(formula, left, right):
        einsum = functools.partial(jnp.einsum, formula, precision=static.precision)
        return widened(einsum, left.astype(right.dtype), right, wide)

    def step(carry, tile):
        d_query, d_key, d_value, d_scale = carry
        at, block = tile
        own, keys, values = _read(query, at), key[block], value[block]
        products, allowed = _products(static, own, keys, wide, _read(last, at), block)
        shifted = scale * products - _read(largest, at)[..., None]
        shifted = jnp.where(allowed, shifted, dtypes.lowest(wide))
        weights = jnp.exp(shifted) / _read(total, at, 1)[..., None]
        of_out = _read(d_out, at)
        d_weights = product("mgv,sv->mgs", of_out, values)
        d_logits = weights * (d_weights - _read(delta, at)[..., None])
        return (
            _write(d_query, at, _read(d_query, at) + product("mgs,sh->mgh", d_logits, keys)),
            d_key.at[block].add(scale * product("mgs,mgh->sh", d_logits, own)),
            d_value.at[block].add(product("mgs,mgv->sv", weights, of_out)),
            d_scale + (d_logits * products).sum(),
        ), None

    given = query, key, value, scale
    empty = (mesh_axes.vary_like(query, jnp.zeros(x.shape, wide)) for x in given)
    tiles = _tiles(blocks, len(key), static.pairs)
    (d_query, *others), _ = lax.scan(step, tuple(empty), tiles)
    gradients = zip((scale * d_query, *others), given, strict=True)
    return *(d.astype(x.dtype) for d, x in gradients), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)
