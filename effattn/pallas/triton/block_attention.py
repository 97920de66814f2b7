"""Block attention for GPUs, lowered by Triton (Ampere and later).

There are three kernels. Every sum belongs to one program (no atomics), so results are deterministic
bit for bit:

- forward: a program has one query tile of one head and walks over key tiles with an online softmax.
  The output `(t, Hv)`, the largest logit and the sum of weights of each row stay in registers.
- gradient of the queries: the same walk; the weights are recomputed from the log-sum-exp.
- gradients of keys and values: a program has one key tile of one key head and walks over the query
  tiles of all query heads of that key head. The logits are transposed, `(s, t)`, so that every
  product reads its operands in the order in which they are stored.

Query head n reads key head n // G directly; no array is repeated, transposed or padded in memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from effattn import dispatch
from effattn.dispatch import device
from effattn.interfaces.block_attention import Attended, Config, Inputs, output_dtype
from effattn.pallas import block_tiles, partition, visited_tiles
from effattn.pallas.block_tiles import Softmax
from effattn.pallas.triton import bias_gradient
from effattn.pallas.triton.tiles import LEAST, Tile, call, own_tile, put_rows, store, width

LIMITS = dispatch.Limits(
    ("float32", "bfloat16", "float16"), 256, "Ampere or later; tiles of multiples of 16"
)

# (queries of a tile, keys of a tile, warps) for each kernel, by (bytes of a number, width of the
# larger head size). In float32 they are the fastest tried on an H200, up to 128 wide in 99 KB of
# shared memory.
TILES = {
    (2, 64): {"forward": (128, 64, 4), "query": (128, 64, 8), "key": (64, 64, 4)},
    (2, 128): {"forward": (128, 64, 8), "query": (128, 32, 8), "key": (64, 64, 8)},
    (2, 256): {"forward": (64, 32, 8), "query": (32, 32, 8), "key": (32, 32, 8)},
    (4, 64): {"forward": (128, 32, 4), "query": (64, 32, 4), "key": (64, 32, 4)},
    (4, 128): {"forward": (32, 32, 4), "query": (32, 32, 4), "key": (32, 32, 4)},
    (4, 256): {"forward": (32, 32, 8), "query": (16, 32, 8), "key": (32, 16, 4)},
}

# More candidates for `effattn.tune`.
_MORE_TILES = (
    (128, 128, 8),
    (128, 64, 8),
    (128, 64, 4),
    (64, 64, 4),
    (64, 32, 4),
    (32, 64, 4),
    (32, 32, 4),
)


def refusal(config: Config, x: Inputs) -> str | None:
    """Returns the reason why these kernels cannot take these operands, or None."""
    if reason := block_tiles.refusal(LIMITS, config, x, any_pattern=True):
        return reason
    given = config.tile if x.layout is None else x.layout.tile
    if given is not None and any(side % LEAST for side in given):
        return f"takes tiles of multiples of {LEAST} queries and keys, got {given}"
    largest = max(
        array.size for array in jax.tree.leaves(x._replace(layout=None, layout_of_keys=None))
    )
    largest = max(largest, x.query.size // x.query.shape[-1] * x.value.shape[-1])
    if largest >= 2**31:
        return f"takes arrays of fewer than 2**31 numbers, as it counts in int32, got {largest}"
    (t, _), (d_t, _), (_, s) = (_tile(name, config, x)[0] for name in ("forward", "query", "key"))
    return visited_tiles.refusal_of_grid(x, min(t, d_t), s) or device.triton_refusal()


@partition.forward
def forward(config: Config, x: Inputs, exact: bool) -> Attended:
    """Returns the output, its rounding error if `exact`, and the log-sum-exp."""
    tile, warps = _tile("forward", config, x)
    plan, arrays = _arrange(config, x, tile, of_keys=False)
    batch, queries, heads, _ = arrays.query.shape
    shapes = {
        "out": ((batch, queries, heads, plan.sizes[1]), output_dtype(x, exact)),
        "lse": ((batch, queries, heads), jnp.float32),
        "lse_error": ((batch, queries, heads), jnp.float32),
    }
    grid = heads * batch, plan.grid[0]
    out, *of_rows = call(_forward_kernel, plan, arrays, grid, shapes, warps)
    lse, lse_error = (array.reshape(x.query.shape[:-1]) for array in of_rows)
    return Attended.of(x, out.reshape(*x.query.shape[:-1], plan.sizes[1]), lse, lse_error)


@partition.backward
def backward(
    config: Config, x: Inputs, lse: jax.Array, d_out: jax.Array, delta: jax.Array
) -> Inputs:
    """Returns the gradients of the inputs.

    Args:
      config: configuration of the call.
      x: inputs of the call.
      lse: log-sum-exp `(*B, T, N)`.
      d_out: gradient of the output, dO.
      delta: rowsum(dO * O) - dL `(*B, T, N)`, with dL the gradient of the log-sum-exp.
    """
    # A finite log-sum-exp for rows without keys: all logits of these rows are -inf.
    rows = jnp.where(lse == -jnp.inf, 0, lse), d_out, delta
    d_query, d_scale, d_constants = _query_gradient(config, x, rows)
    d_key, d_value = _key_gradient(config, x, rows)
    d_bias = None
    if x.bias is not None:
        tile, warps = _tile("query", config, x)
        d_bias = bias_gradient.gradient(config, x, rows, tile, warps)
    return Inputs(
        query=d_query,
        key=d_key,
        value=d_value,
        bias=d_bias,
        scale=d_scale,
        constants=d_constants,
    )


def tilings(config: Config, x: Inputs) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Returns the candidates (queries, keys, warps) to tune for each kernel."""
    return {
        kernel: tuple(tile for tile in _MORE_TILES if tile != own)
        for kernel, own in _tiles_of(x).items()
    }


def _tiles_of(x: Inputs) -> dict[str, tuple[int, int, int]]:
    widest = max(width(array.shape[-1]) for array in (x.query, x.value))
    return TILES[x.query.dtype.itemsize, max(64, widest)]


def _tile(kernel: str, config: Config, x: Inputs) -> tuple[tuple[int, int], int]:
    """Returns the tile `(t, s)`, no larger than the lengths, and the number of warps per tile."""
    tuned = config.implementations.tile("triton", kernel)
    *sides, warps = tuned or _tiles_of(x)[kernel]
    return block_tiles.fitted(sides, config, x, LEAST), warps


def _rows_together(x, rows):
    """Reshapes arrays `(*B, T, N, ...)` to `(B, T, N, ...)`."""
    axes = x.query.ndim - 3
    return tuple(array.reshape(-1, *array.shape[axes:]) for array in rows)


def _arrange(config, x: Inputs, tile, *, of_keys):
    """Returns the plan of a kernel, and the arrays that the kernel reads."""
    plan, arrays = block_tiles.arrange(config, x, tile)
    walk, order = visited_tiles.walk_and_order(plan, arrays, x, of_keys=of_keys)
    return plan, arrays._replace(walk=walk, order=order)


def _forward_kernel(plan, structure, *refs):
    *inputs, out, lse, lse_error = refs
    x = jax.tree.unflatten(structure, inputs)
    b, h, n = own_tile(plan, x, of_keys=False)
    tile = Tile(plan, x, b, h)
    query = tile.rows(x.query, n, 0, tile.h)

    def step(m, carry, whole):
        at = tile.at(n, m)
        products = tile.dot(query, tile.rows(x.key, m, 1, tile.key_head).T)
        values = [value for *_, value in tile.reads(at, products)]
        bias = tile.pairs(x.bias, n, m)
        logits = block_tiles.scores(plan, at, products, bias, tile.scale, values)

        def mix(weights):
            value = tile.rows(x.value, m, 1, tile.key_head)
            return tile.dot(tile.dropped(at, weights).astype(value.dtype), value)

        return carry.seeing(tile.masked(at, n, m, logits, whole), mix)

    start = Softmax.start(plan.tile[0], width(plan.sizes[1]))
    output, *of_rows = tile.walk(n, step, start).finish()
    put_rows(tile, out, n, 0, tile.h, output)
    place, there = tile.indices(n, 0)
    for ref, value in zip((lse, lse_error), of_rows, strict=True):
        store(ref, (tile.b, place, tile.h), value, there)


# Gradients of the queries, of the scale, and of the arrays that a score_mod closes over


def _query_gradient(config, x: Inputs, rows):
    tile, warps = _tile("query", config, x)
    plan, arrays = _arrange(config, x, tile, of_keys=False)
    batch, queries, heads, _ = arrays.query.shape
    shapes: dict[Any, Any] = {"query": (arrays.query.shape, arrays.query.dtype)}
    if arrays.scale is not None:
        shapes["scale"] = (batch, queries, heads), jnp.float32
    for table in plan.summed:
        entries = pl.next_power_of_2(arrays.tables[table].size)
        shapes[table] = (batch, heads, plan.grid[0], entries), jnp.float32
    inputs, grid = (arrays, _rows_together(x, rows)), (heads * batch, plan.grid[0])
    found = dict(zip(shapes, call(_query_kernel, plan, inputs, grid, shapes, warps), strict=True))

    def of_constant(number, constant):
        table = plan.table_of_constant(number)
        if table not in found:
            return None
        total = found[table].sum((0, 1, 2))[: constant.size]
        return total.reshape(constant.shape).astype(constant.dtype)

    d_scale = found["scale"].sum().astype(x.scale.dtype) if x.scale is not None else None
    d_constants = tuple(of_constant(*each) for each in enumerate(x.constants))
    return found["query"].reshape(x.query.shape), d_scale, d_constants


def _query_kernel(plan, structure, *refs):
    inputs, (d_query, *summed) = refs[: structure.num_leaves], refs[structure.num_leaves :]
    x, (lse, d_out, delta) = jax.tree.unflatten(structure, inputs)
    b, h, n = own_tile(plan, x, of_keys=False)
    tile = Tile(plan, x, b, h)
    query, d_rows = (tile.rows(array, n, 0, tile.h) for array in (x.query, d_out))
    rows = tile.sums_of_rows(lse, delta, n)
    has_scale = x.scale is not None

    def step(m, carry, whole):
        d_tile, d_scale, d_tables = carry
        at = tile.at(n, m)
        key, value = (tile.rows(array, m, 1, tile.key_head) for array in (x.key, x.value))
        products, d_weights = tile.dot(query, key.T), tile.dot(d_rows, value.T)
        bias = tile.pairs(x.bias, n, m)
        # Broadcast to the whole tile, so that `pull_back` sums no gradient over both tile axes.
        reads = [
            (table, entries, jnp.broadcast_to(read, products.shape))
            for table, entries, read in tile.reads(at, products)
        ]
        scale = None if tile.scale is None else jnp.broadcast_to(tile.scale, products.shape)

        def scores(products, scale, free):
            free = iter(free)
            values = [next(free) if t in plan.summed else read for t, _, read in reads]
            return block_tiles.scores(plan, at, products, bias, scale, values)

        free = [read for table, _, read in reads if table in plan.summed]
        logits, pull_back = jax.vjp(scores, products, scale, free)
        logits = tile.masked(at, n, m, logits, whole)
        _, d_logits = block_tiles.gradients(plan, at, logits, rows, d_weights, tile.load)
        d_products, more_scale, d_reads = pull_back(d_logits)
        d_tile = d_tile + tile.dot(d_products.astype(key.dtype), key)
        if has_scale:
            d_scale = d_scale + jnp.sum(more_scale, 1)
        entries = [(table, entry) for table, entry, _ in reads if table in plan.summed]
        for (table, entry), d_read in zip(entries, d_reads, strict=True):
            d_tables = d_tables | {table: _by_entry(d_tables[table], entry, d_read)}
        return d_tile, d_scale, d_tables

    start = (
        jnp.zeros(query.shape, jnp.float32),
        jnp.zeros(plan.tile[:1], jnp.float32) if has_scale else None,
        {
            table: jnp.zeros(ref.shape[-1:], jnp.float32)
            for table, ref in zip(plan.summed, summed[has_scale:], strict=True)
        },
    )
    d_tile, d_scale, d_tables = tile.walk(n, step, start)
    put_rows(tile, d_query, n, 0, tile.h, d_tile)
    if has_scale:
        place, there = tile.indices(n, 0)
        store(summed[0], (tile.b, place, tile.h), d_scale, there)
    for table, ref in zip(plan.summed, summed[has_scale:], strict=True):
        entry = jnp.arange(ref.shape[-1], dtype=jnp.int32)
        store(ref, (tile.b, tile.h, n, entry), d_tables[table], None)


def _by_entry(totals, at, values):
    """Adds each of `values` `(t, s)` to the table entry, given by `at`, that it was read from."""
    entry = jnp.arange(totals.shape[0], dtype=jnp.int32)
    if jnp.ndim(at) == 0:
        return totals + jnp.where(entry == at, jnp.sum(jnp.sum(values, 1), 0), 0.0)
    at = jnp.broadcast_to(at, values.shape)

    def add(e, totals):
        here = jnp.sum(jnp.sum(jnp.where(at == e, values, 0.0), 1), 0)
        return totals + jnp.where(entry == e, here, 0.0)

    return lax.fori_loop(0, totals.shape[0], add, totals)


# Gradients of keys and values


def _key_gradient(config, x: Inputs, rows):
    tile, warps = _tile("key", config, x)
    plan, arrays = _arrange(config, x, tile, of_keys=True)
    shapes = {name: (getattr(arrays, name).shape, x.key.dtype) for name in ("key", "value")}
    inputs = arrays, _rows_together(x, rows)
    grid = plan.heads[1] * arrays.key.shape[0], plan.grid[1]
    d_key, d_value = call(_key_kernel, plan, inputs, grid, shapes, warps)
    return d_key.reshape(x.key.shape), d_value.reshape(x.value.shape)


def _key_kernel(plan, structure, *refs):
    *inputs, d_key, d_value = refs
    x, (lse, d_out, delta) = jax.tree.unflatten(structure, inputs)
    b, key_head, m = own_tile(plan, x, of_keys=True)
    of_head = Tile(plan, x, b, key_head * plan.group)
    key, value = (of_head.rows(array, m, 1, key_head) for array in (x.key, x.value))

    def of_query_head(g, carry):
        tile = Tile(plan, x, b, key_head * plan.group + g.astype(jnp.int32), transposed=True)

        def step(n, carry, whole):
            d_key, d_value = carry
            at = tile.at(n, m)
            query, d_rows = (tile.rows(array, n, 0, tile.h) for array in (x.query, d_out))
            rows = tile.sums_of_rows(lse, delta, n)
            products, d_weights = tile.dot(key, query.T), tile.dot(value, d_rows.T)
            values = [read for *_, read in tile.reads(at, products)]
            bias = tile.pairs(x.bias, n, m)

            def scores(products):
                return block_tiles.scores(plan, at, products, bias, tile.scale, values)

            logits, pull_back = jax.vjp(scores, products)
            logits = tile.masked(at, n, m, logits, whole)
            weights, d_logits = block_tiles.gradients(plan, at, logits, rows, d_weights, tile.load)
            (d_products,) = pull_back(d_logits)
            d_value = d_value + tile.dot(weights.astype(d_rows.dtype), d_rows)
            d_key = d_key + tile.dot(d_products.astype(query.dtype), query)
            return d_key, d_value

        return tile.walk(m, step, carry, of_keys=True)

    start = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    totals = lax.fori_loop(0, plan.group, of_query_head, start)
    for ref, total in zip((d_key, d_value), totals, strict=True):
        put_rows(of_head, ref, m, 1, key_head, total)
