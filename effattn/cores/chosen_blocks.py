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

from effattn import dispatch
from effattn.arrays import dtypes, mesh_axes
from effattn.arrays.axes import fold
from effattn.arrays.combine import exponentials
from effattn.arrays.linear_map import with_derivatives
from effattn.arrays.products import widened
from effattn.cores import packed_pairs
from effattn.dispatch.partition import may_be_divided

# Maximum pairs in a tile.
_PAIRS = 256
# Maximum queries that gather their keys, as in decoding.
_FEW = 8


class Tiles(NamedTuple):
    """Tiles of pairs (query, block) in order of blocks.

    Attributes:
      rows: int32 `(tiles, m)`, the query of each pair, all different in a tile; T or more for none.
      block: int32 `(tiles,)`, the block of each tile.
    """

    rows: jax.Array
    block: jax.Array


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
    first: jax.Array | None = None,
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
      first: int32 `(T,)`, the first key that each query may see; default the first one of all.

    Returns:
      Output `(T, G, Hv)` in the dtype of `value`, and log-sum-exp `(T, G)`, at least float32 and
      `dtypes.lowest` for a query without keys.
    """
    # With fewer keys than a block has, there is one block.
    block_size = min(block_size, len(key))
    key, value = (fold(x, block_size, 0) for x in (key, value))
    wide = dtypes.wide(query, key, value)
    reach = jnp.stack([jnp.zeros_like(last) if first is None else first, last], -1)
    if len(query) <= _FEW:
        return _attend_few(query, key, value, jnp.asarray(scale, wide), blocks, reach, precision)
    tiles = _tiles(blocks, len(key), _pairs_of(blocks.size, len(key)))
    arrays = query, key, value, jnp.asarray(scale, wide), tiles, reach
    return _attend(precision, *mesh_axes.vary_alike(arrays))


def attend_causal(
    mechanism: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    blocks: jax.Array,
    limit: jax.Array,
    positions: jax.Array | None = None,
    reach: tuple[jax.Array, jax.Array] | None = None,
    *,
    block_size: int,
    scale: float | jax.Array,
    precision: Any = None,
    implementation: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attends from each token to its own block, up to itself, and to earlier blocks.

    Time and memory are those of `attend`.

    Args:
      mechanism: name of the mechanism, for messages.
      query: `(T, G, H)`, G query heads.
      key: `(T, H)`.
      value: `(T, Hv)`.
      blocks: int32 `(T, k)`, different blocks before the own one for each query; -1 for none.
      limit: int32 `()`, valid keys.
      positions: int32 `(T,)`, position of each query among the keys; None if queries and keys are
        the same tokens.
      reach: int32 `(T,)` each, the first and the last key of each query's document, if positions
        are given; None for one document.
      block_size: b, keys in a block.
      scale: multiplies the products.
      precision: as in `jax.lax.dot`.
      implementation: as in `effattn.options`; `packed_pairs.KERNELS` and "xla" exist.

    Returns:
      Output and log-sum-exp, as `attend` returns them.
    """
    call = packed_pairs.call(mechanism, query, key, value, is_whole=positions is None)
    chosen = dispatch.choose(implementation, call)
    if positions is None:
        positions = jnp.arange(len(query), dtype=jnp.int32)
    # With fewer keys than a block has, there is one block.
    size = min(block_size, len(key))

    def by_tiles(query, key, value, blocks, limit, positions, reach, scale):
        blocks = jnp.concatenate([positions[:, None] // size, blocks], 1)
        last, first = jnp.minimum(positions, limit - 1), None
        if reach is not None:
            first, last = reach[0], jnp.minimum(last, reach[1])
        options = {"block_size": size, "scale": scale, "precision": precision, "first": first}
        return attend(query, key, value, blocks, last, **options)

    def by_kernel(name, query, key, value, blocks, limit, positions, reach, scale):
        query, options = (query * scale).astype(query.dtype), (size, precision, name)
        return packed_pairs.attend(mechanism, query, key, value, blocks, limit, *options)

    scale = jnp.asarray(scale, dtypes.wide(query, key, value))
    operands = query, key, value, blocks, limit, positions, reach, scale
    kernels = {name: functools.partial(by_kernel, name) for name in packed_pairs.KERNELS}
    forms = {name: (kernels | {"xla": by_tiles})[name] for name in chosen.names}
    return dispatch.on_platform(chosen, mechanism, forms, *operands)


def ranked(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Indices of the `count` largest scores `(..., n)`, int32, and whether they are scores.

    Equal scores go to the smaller index. A score of `dtypes.lowest` is none.
    """
    count = min(count, scores.shape[-1])
    if count == 0:
        return jnp.zeros((*scores.shape[:-1], 0), jnp.int32), jnp.zeros(
            (*scores.shape[:-1], 0), bool
        )
    by_sorting = functools.partial(_first_sorted, count=count)
    # For `lax.top_k`, XLA gathers the rows of all devices; it sorts the rows of each device alone.
    if may_be_divided():
        return by_sorting(scores)
    # On CPUs, XLA chooses few scores in a tenth or less of the time in which it sorts all.
    chosen = functools.partial(_first_chosen, count=count)
    return lax.platform_dependent(scores, cpu=chosen, default=by_sorting)


def _first_sorted(scores, count):
    index = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    found, index = lax.sort((-scores, index), num_keys=1, is_stable=True)
    return index[..., :count], found[..., :count] < -dtypes.lowest(found.dtype)


def _first_chosen(scores, count):
    lowest = dtypes.lowest(scores.dtype)
    found, index = lax.top_k(jnp.where(scores > lowest, scores, lowest), count)  # not NaN
    return index, found > lowest


def largest(scores: jax.Array, count: int) -> jax.Array:
    """The indices of `ranked`, -1 for none."""
    index, is_score = ranked(scores, count)
    return jnp.where(is_score, index, -1)


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
    _, order = lax.sort((flat, jnp.arange(pairs, dtype=jnp.int32)), num_keys=1)
    number = jnp.zeros(count, jnp.int32).at[flat].add(1, mode="drop")  # pairs of each block
    tiles_of = -(-number // size)
    before, end = jnp.cumsum(number) - number, jnp.cumsum(tiles_of)
    # The number of blocks whose tiles end before a tile is the block of the tile.
    block = jnp.cumsum(jnp.zeros(tiles, jnp.int32).at[end].add(1, mode="drop"))
    is_tile, block = block < count, jnp.minimum(block, count - 1)
    inside = jnp.arange(size, dtype=jnp.int32)
    tile = jnp.arange(tiles, dtype=jnp.int32) - (end - tiles_of)[block]
    place = (tile * size)[:, None] + inside[None]
    is_pair = is_tile[:, None] & (place < number[block][:, None])
    place = before[block][:, None] + place
    # Rows past the end differ within a tile, so that each index of a scatter is unique.
    row = jnp.where(is_pair, order[jnp.minimum(place, pairs - 1)] // each, rows + inside[None])
    return Tiles(row, block)


def _attend_few(query, key, value, scale, blocks, reach, precision):
    """Each query gathers its blocks of keys `(n, b, H)`; memory O(T k b (H + Hv))."""
    wide = scale.dtype
    at = blocks[..., None] * key.shape[1] + jnp.arange(key.shape[1], dtype=jnp.int32)[None, None]
    allowed = ((blocks >= 0)[..., None] & _is_within(at, reach[:, None, None]))[:, None]
    keys, values = (x.at[blocks].get(mode="clip").astype(wide) for x in (key, value))
    product = functools.partial(jnp.einsum, precision=precision)
    logits = scale * product("tgh,tkbh->tgkb", query.astype(wide), keys)
    weights, total, lse = exponentials(logits, allowed, (-2, -1))
    out = product("tgkb,tkbv->tgv", weights, values) / total.squeeze(-1)
    return out.astype(value.dtype), lse


def _read(x, rows):
    """Rows of x, and zeros for rows past the end."""
    return x.at[rows].get(mode="fill", fill_value=0)


def _write(x, rows, new):
    return x.at[rows].set(new, mode="drop", unique_indices=True)


def _is_within(at, reach):
    """True for keys between the first and the last key of `reach (..., 2)`."""
    return (at >= reach[..., 0]) & (at <= reach[..., 1])


def _products(precision, query, key, dtype, reach, block):
    """Products `(m, G, b)` of a tile, and which of its pairs of tokens may attend, `(m, 1, b)`."""
    product = functools.partial(jnp.einsum, "mgh,sh->mgs", precision=precision)
    at = block * len(key) + jnp.arange(len(key), dtype=jnp.int32)
    allowed = _is_within(at[None, None], reach[:, None, None])
    return widened(product, query, key, dtype), allowed


def _forward(precision, query, key, value, scale, tiles, reach):
    """Output, log-sum-exp, and the largest logit and the inverse sum of each query."""
    wide = scale.dtype
    lowest = dtypes.lowest(wide)
    mix = functools.partial(jnp.einsum, "mgs,sv->mgv", precision=precision)

    def step(sums, tile):
        """Adds a tile to the sums `(T, G, 2 + Hv)`: largest logit, weights, weighted values."""
        at, block = tile
        tokens = _read(query, at), key[block]
        products, allowed = _products(precision, *tokens, wide, _read(reach, at), block)
        logits = jnp.where(allowed, scale * products, lowest)
        so_far = _read(sums, at)
        before = so_far[..., :1]
        after = jnp.maximum(before, logits.max(-1, keepdims=True))
        finite = jnp.where(after == lowest, 0, after)
        weights = jnp.exp(jnp.where(allowed, logits - finite, lowest))
        kept = jnp.exp(jnp.where(before == lowest, lowest, before - finite))
        mixed = widened(mix, weights.astype(value.dtype), value[block], wide)
        new = jnp.concatenate([weights.sum(-1, keepdims=True), mixed], -1)
        new = jnp.concatenate([after, kept * so_far[..., 1:] + new], -1)
        return _write(sums, at, new), None

    sums = jnp.zeros((*query.shape[:2], 2 + value.shape[-1]), wide).at[..., 0].set(lowest)
    sums, _ = lax.scan(step, mesh_axes.vary_like(query, sums), tiles)
    largest, total, mixed = sums[..., 0], sums[..., 1], sums[..., 2:]
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    largest = jnp.where(is_empty, 0, largest)
    lse = jnp.where(is_empty, lowest, largest + jnp.log(total))
    return mixed / total[..., None], lse, (largest, 1 / total)


def _attend_fwd(precision, query, key, value, scale, tiles, reach):
    out, lse, sums = _forward(precision, query, key, value, scale, tiles, reach)
    saved = query, key, value, scale, tiles, reach, out, sums
    return (out.astype(value.dtype), lse), saved


def _attend_bwd(precision, saved, cotangents):
    query, key, value, scale, tiles, reach, out, (largest, inverse) = saved
    d_out, d_lse = cotangents
    wide = scale.dtype
    delta = (d_out.astype(wide) * out).sum(-1) - d_lse
    of_rows = jnp.stack([largest, inverse, delta], -1)

    def product(formula, left, right):
        einsum = functools.partial(jnp.einsum, formula, precision=precision)
        return widened(einsum, left.astype(right.dtype), right, wide)

    def step(carry, tile):
        d_query, d_key, d_value, d_scale = carry
        at, block = tile
        own, keys, values, of_out = _read(query, at), key[block], value[block], _read(d_out, at)
        largest, inverse, delta = jnp.split(_read(of_rows, at), 3, -1)
        products, allowed = _products(precision, own, keys, wide, _read(reach, at), block)
        shifted = jnp.where(allowed, scale * products - largest, dtypes.lowest(wide))
        weights = jnp.exp(shifted) * inverse
        d_logits = weights * (product("mgv,sv->mgs", of_out, values) - delta)
        return (
            _write(d_query, at, _read(d_query, at) + product("mgs,sh->mgh", d_logits, keys)),
            d_key.at[block].add(scale * product("mgs,mgh->sh", d_logits, own)),
            d_value.at[block].add(product("mgs,mgv->sv", weights, of_out)),
            d_scale + (d_logits * products).sum(),
        ), None

    given = query, key, value, scale
    empty = (mesh_axes.vary_like(query, jnp.zeros(x.shape, wide)) for x in given)
    (d_query, *others), _ = lax.scan(step, tuple(empty), tiles)
    gradients = zip((scale * d_query, *others), given, strict=True)
    return *(d.astype(x.dtype) for d, x in gradients), None, None


def _attend_plain(precision, query, key, value, scale, tiles, reach):
    out, lse, _ = _forward(precision, query, key, value, scale, tiles, reach)
    return out.astype(value.dtype), lse


# Queries `(T, G, H)` attend to their blocks of keys `(n, b, H)` and values `(n, b, Hv)`.
_attend = with_derivatives(_attend_plain, _attend_fwd, _attend_bwd)
