r"""Tiled softmax attention in XLA, with memory linear in length, forward and backward.

Each tile is computed as in FlashAttention (Dao et al. 2022, Dao 2023). The forward pass is an
online softmax. The backward pass recomputes the weights P from the saved log-sum-exp L:

    P = exp(logits - L),    dV = P^T dO,    dP = dO V^T,
    d logits = P * (dP - delta),            delta = rowsum(dO * O) - dL

The gradients of query, key, bias and the arrays that `score_mod` closes over follow from d logits.

Both passes visit the same tiles (`effattn.xla.walks`): for each query tile, the key tiles that
causality, the window or a block-sparse layout leave non-empty. Only tiles at the border of the
allowed region compute a mask (`effattn.xla.block_scores`). Batch and heads stay axes of every
product, so they can be sharded.

Shapes: batch dimensions `*B`, query heads N, key heads K, G = N // K; query length T in tiles of t,
key length S in tiles of s; head dimensions H and Hv. In a tile, the G query heads of one key head
are stacked as rows, r = G t, so each key head needs plain matrix products only.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp

from effattn import dispatch
from effattn.arrays import dtypes, mesh_axes
from effattn.interfaces.block_attention import Attended, Config, Inputs, output_dtype
from effattn.xla.block_scores import ScoredTiles
from effattn.xla.block_tiles import tile_of


def tilings(config: Config, x: Inputs) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Tile sizes for `effattn.tune` to try: half, equal to and twice the default, per pass."""
    own_choice = dataclasses.replace(config, implementations=dispatch.XLA)
    found = {}
    for kernel in ("forward", "backward"):
        own = tile_of(own_choice, x, kernel)
        sides = [
            dict.fromkeys(min(max(size, 16), length) for size in (side // 2, side, 2 * side))
            for side, length in zip(own, (x.query.shape[-3], x.key.shape[-3]), strict=True)
        ]
        found[kernel] = tuple(each for each in itertools.product(*sides) if each != own)
    return found


def forward(config: Config, x: Inputs, exact: bool) -> Attended:
    """Forward pass: the output, its rounding error if `exact`, and the log-sum-exp."""
    tiles, dtype = ScoredTiles(config, x), output_dtype(x, exact)
    rows, size = tiles.row_shape, x.value.shape[-1]

    def query_tile(n, outputs):
        query = tiles.scaled_query(n)

        def key_tile(patch, carry):
            largest, total, mixed = (tiles.part(patch, array) for array in carry)
            keys, values = tiles.key_rows(patch, x.key), tiles.key_rows(patch, x.value)
            products = tiles.products(tiles.part(patch, query), keys)
            bias = tiles.pairs(patch, x.bias)
            logits = tiles.masked(patch, tiles.scores(patch, products, bias, x.scale, x.constants))
            if config.activation is not None:
                weights = tiles.dropped(patch, tiles.activated(logits)).astype(values.dtype)
                mixed = mixed + tiles.matmul(weights, values)
                return *carry[:2], tiles.with_part(patch, carry[2], mixed)
            new = jnp.maximum(largest, logits.max(-1))
            weights = jnp.exp(logits - new[..., None])
            decay = jnp.exp(largest - new)
            total = total * decay + weights.sum(-1)
            weights = tiles.dropped(patch, weights).astype(values.dtype)
            mixed = mixed * decay[..., None] + tiles.matmul(weights, values)
            put = functools.partial(tiles.with_part, patch)
            return tuple(map(put, carry, (new, total, mixed)))

        start = (
            # Finite, so that rows without keys so far never compute inf - inf.
            tiles.full(rows, jnp.finfo(tiles.dtype).min),
            tiles.full(rows, 0),
            tiles.full((*rows, size), 0),
        )
        largest, total, mixed = tiles.walk.over_keys(n, key_tile, start)
        if config.activation is not None:
            total = total + 1
        total_or_one = jnp.where(total == 0, 1, total)
        log_total = jnp.log(total_or_one)
        log_sum = largest + log_total
        new = (
            (mixed / total_or_one[..., None]).astype(dtype),
            jnp.where(total == 0, -jnp.inf, log_sum),
            log_total - (log_sum - largest),
        )
        return tuple(
            tiles.put_rows(array, n, rows) for array, rows in zip(outputs, new, strict=True)
        )

    out = tiles.full((*x.query.shape[:-1], size), 0, dtype)
    of_rows = tiles.full(x.query.shape[:-1], 0)
    return Attended.of(x, *tiles.walk.over_queries(query_tile, (out, of_rows, of_rows)))


def backward(
    config: Config, x: Inputs, lse: jax.Array, d_out: jax.Array, delta: jax.Array
) -> Inputs:
    """Backward pass: gradients of the inputs.

    Args:
      config: static configuration.
      x: the inputs of the forward pass.
      lse: log-sum-exp `(*B, T, N)`.
      d_out: gradient of the output, `(*B, T, N, Hv)`.
      delta: `(*B, T, N)`, rowsum(dO * O) - dL.
    """
    tiles = ScoredTiles(config, x, backward=True)
    *batch, keys, heads, size = x.key.shape
    floating, rejoin = _partition(x.constants)

    def query_tile(n, gradients):
        d_query, *others = gradients
        query = tiles.scaled_query(n)
        query_columns = jnp.swapaxes(query, -1, -2)
        d_out_tile = tiles.rows(d_out, n, only_new=True)
        d_out_columns = jnp.swapaxes(d_out_tile, -1, -2)
        delta_tile = tiles.rows(delta, n, only_new=True)[..., None]
        lse_tile = tiles.rows(lse, n)[..., None]
        lse_tile = jnp.where(lse_tile == -jnp.inf, 0, lse_tile)

        def key_tile(patch, carry):
            d_query_tile, d_key, d_value, d_bias, d_additive, d_constants = carry
            part = functools.partial(tiles.part, patch)
            keys, values = tiles.key_rows(patch, x.key), tiles.key_rows(patch, x.value)
            products, gradients_of = tiles.differentiated(
                part(query), part(query_columns, -1), keys, d_additive
            )
            logits, pull_back = jax.vjp(
                lambda products, bias, scale, floating: tiles.scores(
                    patch, products, bias, scale, rejoin(floating)
                ),
                products,
                tiles.pairs(patch, x.bias),
                x.scale,
                floating,
            )
            weights, gradients_of_weights = tiles.weights(
                tiles.masked(patch, logits), part(lse_tile), part(delta_tile)
            )
            dropped = tiles.dropped(patch, weights).astype(x.value.dtype)
            d_value_tile = tiles.matmul(part(d_out_columns, -1), dropped)
            d_weights = tiles.dropped(patch, tiles.matmul(part(d_out_tile), values, contract=-1))
            d_products, d_bias_tile, *d_constants_tile = pull_back(gradients_of_weights(d_weights))
            d_rows, d_key_tile, d_additive = gradients_of(d_products.astype(query.dtype))
            return (
                tiles.with_part(patch, d_query_tile, part(d_query_tile) + d_rows),
                tiles.add_keys(patch, d_key, d_key_tile),
                tiles.add_keys(patch, d_value, d_value_tile),
                tiles.add_pairs(patch, d_bias, d_bias_tile),
                d_additive,
                jax.tree.map(dtypes.added, d_constants, d_constants_tile),
            )

        start = (tiles.full(query.shape, 0), *others)
        d_query_tile, *others = tiles.walk.over_keys(n, key_tile, start)
        d_query_tile = (d_query_tile * tiles.query_scale).astype(d_query.dtype)
        return (tiles.add_rows(d_query, n, d_query_tile), *others)

    wide = None if x.bias is None else dtypes.common(tiles.dtype, x.bias.dtype)
    # Gradients of keys and values have the key axis last: then each product reads its larger
    # operand, the weights, row by row.
    start = (
        tiles.full(x.query.shape, 0, x.query.dtype),
        tiles.full((*batch, heads, size, keys), 0),
        tiles.full((*batch, heads, x.value.shape[-1], keys), 0),
        None if x.bias is None else tiles.full(x.bias.shape, 0, wide),
        None if x.additive is None else tiles.full(x.additive.shape, 0),
        jax.tree.map(_sum_of, [x.scale, floating]),
    )
    d_query, d_key, d_value, d_bias, d_additive, d_constants = tiles.walk.over_queries(
        query_tile, start
    )
    d_scale, d_floating = jax.tree.map(
        lambda d, c: d.astype(c.dtype), d_constants, [x.scale, floating]
    )
    gradients = Inputs(
        query=d_query,
        key=jnp.moveaxis(d_key, -1, -3).astype(x.key.dtype),
        value=jnp.moveaxis(d_value, -1, -3).astype(x.value.dtype),
        bias=None if x.bias is None else d_bias.astype(x.bias.dtype),
        scale=d_scale,
        additive=None if x.additive is None else d_additive.astype(x.additive.dtype),
        constants=rejoin(d_floating, other=None),
    )
    return gradients


def _sum_of(array):
    """Zeros to accumulate the array's gradient, at least float32: 16-bit sums lose small terms."""
    dtype = dtypes.wide(array.dtype)
    return mesh_axes.vary_like(array, jnp.zeros(array.shape, dtype))


def _partition(constants):
    """Returns the floating-point constants, and a function that merges them with the others.

    The function also merges gradients of the floating-point constants (`other=None`: None for the
    constants without gradients).
    """
    is_floating = [jnp.issubdtype(c.dtype, jnp.inexact) for c in constants]
    floating = [c for c, f in zip(constants, is_floating, strict=True) if f]

    def rejoin(floating, other=constants):
        floating = iter(floating)
        other = (None,) * len(constants) if other is None else other
        return tuple(next(floating) if f else o for f, o in zip(is_floating, other, strict=True))

    return floating, rejoin
