"""Gradient of the bias of block attention for GPUs, lowered by Triton (Ampere and later).

A program has one tile of the bias in the shape of the bias, and sums over the axes along which the
bias is broadcast: examples, heads, query tiles or key tiles. A bias `(1, 1, T, S)` therefore needs
no array `(B, N, T, S)`. Every sum belongs to one program, so the gradient is deterministic.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from effattn.interfaces.block_attention import Config, Inputs
from effattn.pallas import block_tiles, visited_tiles
from effattn.pallas.triton.tiles import Tile, call, entry, index_of, store


def gradient(
    config: Config, x: Inputs, rows: tuple[jax.Array, ...], tile: tuple[int, int], warps: int
) -> jax.Array:
    """Returns the gradient in the shape and dtype of the bias.

    Args:
      config: configuration of the call.
      x: inputs of the call.
      rows: log-sum-exp (finite), gradient of the output dO, and delta = rowsum(dO * O) - dL with dL
        the gradient of the log-sum-exp.
      tile: numbers of queries and keys of a tile.
      warps: number of warps per tile.
    """
    assert x.bias is not None
    plan, arrays = block_tiles.arrange(config, x, tile)
    arrays = arrays._replace(walk=() if x.layout is None else (visited_tiles.kinds_of(x.layout),))
    sizes, axes = arrays.bias.shape, x.query.ndim - 3
    tiles = [n if size > 1 else 1 for n, size in zip(plan.grid, sizes[2:], strict=True)]
    rows = tuple(array.reshape(-1, *array.shape[axes:]) for array in rows)
    grid, shapes = (math.prod(tiles), sizes[1], sizes[0]), {"bias": (sizes, jnp.float32)}
    (d_bias,) = call(_bias_kernel, plan, (arrays, rows), grid, shapes, warps)
    return block_tiles.of_bias(d_bias, x)


def _bias_kernel(plan, structure, *refs):
    *inputs, d_bias = refs
    x, (lse, d_out, delta) = jax.tree.unflatten(structure, inputs)
    sizes, counts = d_bias.shape, (x.query.shape[0], plan.heads[0], *plan.grid)
    place, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    columns = np.int32(counts[3] if sizes[3] > 1 else 1)
    first = b, h, lax.div(place, columns), lax.rem(place, columns)
    # Number of steps along each axis: 1, or the whole axis where the bias is broadcast.
    steps = [1 if size > 1 else count for size, count in zip(sizes, counts, strict=True)]

    def add(step, total):
        step, places = step.astype(jnp.int32), []
        for own, count in zip(reversed(first), reversed(steps), strict=True):
            places.append(own + lax.rem(step, np.int32(count)))
            step = lax.div(step, np.int32(count))
        m, n, h, b = places
        tile = Tile(plan, x, b, h)
        at = tile.at(n, m)
        query, d_rows = (tile.rows(array, n, 0, h) for array in (x.query, d_out))
        key, value = (tile.rows(array, m, 1, tile.key_head) for array in (x.key, x.value))
        rows = tile.sums_of_rows(lse, delta, n)
        products, d_weights = tile.dot(query, key.T), tile.dot(d_rows, value.T)
        values = [read for *_, read in tile.reads(at, products)]
        bias = jnp.broadcast_to(tile.pairs(x.bias, n, m).astype(jnp.float32), products.shape)

        def scores(bias):
            return block_tiles.scores(plan, at, products, bias, tile.scale, values)

        logits, pull_back = jax.vjp(scores, bias)

        def d_tile(whole):
            masked = tile.masked(at, n, m, logits, whole)
            _, d_logits = block_tiles.gradients(plan, at, masked, rows, d_weights, tile.load)
            return pull_back(d_logits)[0]

        if not x.walk:
            return total + d_tile(whole=False)
        of_layout = (
            lax.div(k, np.int32(size // own))
            for k, size, own in zip((n, m), plan.layout_tile, plan.tile, strict=True)
        )
        kinds = x.walk[0]
        of_example = b if kinds.shape[0] > 1 else 0
        kind = entry(kinds, of_example, tile.key_head if kinds.shape[1] > 1 else 0, *of_layout)
        visited = jnp.where(kind == 2, d_tile(whole=True), d_tile(whole=False))
        return total + jnp.where(kind == 0, 0.0, visited)

    total = lax.fori_loop(0, math.prod(steps), add, jnp.zeros(plan.tile, jnp.float32))
    _put(Tile(plan, x, b, h), d_bias, first, total)


def _put(tile, d_bias, first, total):
    """Stores the tile, summed over the tile axes along which the bias is broadcast."""
    b, h, n, m = first
    (row, row_there), (column, column_there) = tile.indices(n, 0), tile.indices(m, 1)
    if d_bias.shape[2:] == (1, 1):
        total = jnp.sum(jnp.sum(total, 1, keepdims=True), 0)
        store(d_bias, (b, h, 0, jnp.zeros((1,), jnp.int32)), total, None)
    elif d_bias.shape[2] == 1:
        store(d_bias, (b, h, 0, column), jnp.sum(total, 0), column_there)
    elif d_bias.shape[3] == 1:
        store(d_bias, (b, h, row, 0), jnp.sum(total, 1), row_there)
    else:
        there = [
            jnp.broadcast_to(condition, total.shape)
            for condition in (
                None if row_there is None else row_there[:, None],
                None if column_there is None else column_there[None, :],
            )
            if condition is not None
        ]
        mask = functools.reduce(lambda a, b: a & b, there) if there else None
        index = index_of((b, h, row[:, None], column[None, :]))
        triton.store(d_bias.at[index], total, mask=mask)
