"""Block attention for Hopper GPUs, lowered by Mosaic GPU.

The kernels are those of `effattn.pallas.triton.block_attention`, and every sum belongs to one
block. In each block one warpgroup only copies: the bulk copy engine (TMA) writes tiles into two
slots of shared memory, swizzled in the order in which tensor cores read them. Barriers tell which
slot is filled and which slot has been read. The other warpgroups compute 64 rows each: they
multiply from shared memory (`wgmma`) and keep sums in registers. Keys and values are copied once
for all rows of a block.

- forward: two computing warpgroups take turns, so that the exponentials of one warpgroup overlap
  with the products of the other. For a tile of 128 x 128 at head size 128 a multiprocessor takes
  1024 cycles for the exponentials and 2048 cycles for the products. `wgmma` adds the product with
  the values to the output, which was rescaled before the turn.
- gradient of the queries: the weights are recomputed from the log-sum-exp, while dO V^T is being
  computed. The sum stays in the accumulator of `wgmma` over all tiles.
- gradients of keys and values: both sums stay in accumulators of `wgmma`. The logits are
  transposed, `(s, t)`, so that weights go from registers into the next product without a change of
  layout.

Order. Blocks whose tiles visit the most tiles start first (`schedule.Schedule`).

Registers. With two computing warpgroups a thread has 232 registers. A product of 64 rows takes one
register per thread for every two columns. At head size 128 and s = 128 the forward keeps 64
registers of the output, and the logits (64) or the weights (32). The gradients of keys and values
take 128 registers at head size 128, which leaves room for two tiles of logits of 64 columns (64
registers). At head size 256 these gradients would take 256 registers, so they are computed in two
calls. For causal attention ptxas 13.5 then keeps everything in registers, except for spills of 120
bytes per thread in the gradients of keys and values at head size 128, and of 252 and 396 bytes in
those of queries and of keys at head size 256.

Memory. Each number of the keys and values that a block reads is multiplied with t queries, 2 t
operations in the forward and t operations per byte of bfloat16. L2 delivers one byte in the time of
180 operations, so with t = 128 it allows at most 71 % of the peak rate. At head size 256 the shared
memory of 227 KB then holds the queries (64 KB) and two slots of s = 64 keys and values (128 KB).
The output is stored through the buffer of the queries if it has their shape and dtype, else through
a buffer of its own. The gradients also read dO, and have 64 rows in place of 128.

XLA computes the gradients of a scale and of the arrays that a score_mod closes over
(`effattn.xla.block_attention`), which is equally exact.
"""

import dataclasses
import functools
import itertools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from effattn import dispatch
from effattn.dispatch import device
from effattn.interfaces.block_attention import Attended, Config, Inputs, output_dtype
from effattn.pallas import block_tiles, partition, visited_tiles
from effattn.pallas.mosaic_gpu import tiles
from effattn.pallas.mosaic_gpu.tiles import Own, Stream, Tile, Turns
from effattn.pallas.mosaic_gpu.warpgroups import (
    ROWS,
    Product,
    constant,
    down,
    entry,
    put_rows,
    read,
    staging,
    swizzled,
    tokens,
    transposed,
)
from effattn.xla import block_attention as xla

LIMITS = dispatch.Limits(
    ("bfloat16", "float16"),
    256,
    "Hopper; tiles of multiples of 64; no dense mask or bias; tables of up to 16 entries by token; "
    "jax 0.12 for a soft cap or a score_mod",
)

# (queries, keys) of a tile for each kernel, by the larger head size.
TILES = {
    64: {"forward": (128, 128), "query": (128, 64), "key": (64, 128)},
    128: {"forward": (128, 128), "query": (128, 64), "key": (64, 128)},
    256: {"forward": (128, 64), "query": (64, 64), "key": (64, 64)},
}
# Names of the arrays of a query tile and of a key tile.
QUERY = "query", "query_ids", "query_positions"
KEY = "key", "key_ids", "key_positions"
_MISCOMPILED = 12080, 12090  # first and last CUDA version whose ptxas miscompiles kernels
_MOST_AT_ONCE = 128  # largest number of output features of one product in the forward
_MOST_KEPT = 256  # largest number of features of all accumulators of a warpgroup
# The kernel cannot gather from registers, so it compares every logit with each entry of a table.
_MOST_COMPARED = 16
_LOG2E = math.log2(math.e)


def refusal(config: Config, x: Inputs) -> str | None:
    """Returns the reason why these kernels cannot take these operands, or None."""
    if reason := block_tiles.refusal(LIMITS, config, x):
        return reason
    for name in ("bias", "mask"):
        if getattr(x, name) is not None:
            return f"takes no dense {name}"
    if jax.__version_info__ < (0, 12) and (config.soft_cap or config.score_mod):
        return f"needs jax 0.12 for a soft cap or a score_mod, got {jax.__version__}"
    given = config.tile if x.layout is None else x.layout.tile
    if given is not None and any(side % ROWS for side in given):
        return f"takes tiles of multiples of {ROWS} queries and keys, got {given}"
    if (entries := block_tiles.entries_by_token(config, x)) > _MOST_COMPARED:
        return (
            "compares each logit with every entry of a table that a pattern or a score_mod reads "
            f"by token, and takes up to {_MOST_COMPARED} entries, got {entries}"
        )
    return _refusal_of_the_device()


def _refusal_of_the_device():
    """Returns the reason why the GPU or its CUDA version is not supported; None without a GPU."""
    if reason := device.refusal(lambda major: major == 9, "9.x (Hopper)"):
        return reason
    gpu = device.gpu()
    version = None if gpu is None else re.search(r"cuda (\d+)", gpu.client.platform_version)
    if version is not None and _MISCOMPILED[0] <= int(version[1]) <= _MISCOMPILED[1]:
        return (
            "needs a CUDA version outside 12.8.0 to 12.9.0, whose ptxas miscompiles kernels of "
            f"Mosaic GPU with causal masks, got {_written(int(version[1]))}"
        )
    return None


def _written(version: int) -> str:
    """The number of a CUDA version, such as 12080, as text, 12.8.0."""
    return f"{version // 1000}.{version % 1000 // 10}.{version % 10}"


def tilings(config: Config, x: Inputs) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Returns the candidate tiles `(t, s)` to tune for each kernel."""
    sides = ROWS, 2 * ROWS
    return {
        kernel: tuple(tile for tile in itertools.product(sides, sides) if tile != own)
        for kernel, own in _tiles_of(x).items()
    }


def _tiles_of(x: Inputs) -> dict[str, tuple[int, int]]:
    sizes = x.query.shape[-1], x.value.shape[-1]
    return TILES[next(width for width in TILES if width >= max(sizes))]


@partition.forward
def forward(config: Config, x: Inputs, exact: bool) -> Attended:
    """Returns the output, its rounding error if `exact`, and the log-sum-exp.

    `lse_error` is zero: the kernel multiplies logits by log2(e), which rounds them as much as the
    log-sum-exp is rounded.
    """
    plan, arrays = _arrange("forward", config, x)
    batch, queries, heads, size = arrays.query.shape
    workers, value_size, dtype = plan.tile[0] // ROWS, arrays.value.shape[3], x.value.dtype
    is_exact = output_dtype(x, exact) != dtype
    scratch = (
        Own.scratch(tiles.of_tokens(arrays, *QUERY), workers),
        Stream.scratch(tiles.of_tokens(arrays, *KEY), plan.tile[1], workers),
        Stream.scratch(tiles.of_tokens(arrays, "value"), plan.tile[1], workers),
        Product.scratch(
            plan.config.implementations.interpreted, plan.tile[1], x.value.dtype, workers
        ),
        Turns.scratch(workers),
        # The output is stored through the buffer of the queries if that has its shape and dtype.
        None
        if dtype == x.query.dtype and value_size == size
        else staging(workers, swizzled(dtype), dtype),
        plgpu.SMEM((workers, ROWS), jnp.float32),
    )
    of_out = (batch, queries, heads, value_size), dtype
    of_rows = (batch, heads, plan.grid[0] * plan.tile[0]), jnp.float32
    shapes = of_out, of_rows, *([of_out] if is_exact else [])
    out, lse, *others = tiles.call(
        "forward", _forward_kernel, plan, arrays, None, shapes, scratch, of_keys=False
    )
    lse = jnp.swapaxes(lse[..., : plan.lengths[0]], 1, 2)
    lse = lse.reshape(x.query.shape[:-1])

    def of_tokens(array):
        array = array[:, : plan.lengths[0], :, : plan.sizes[1]]
        return array.reshape(*lse.shape, plan.sizes[1])

    out_error = of_tokens(others[0]) if others else None
    return Attended(of_tokens(out), out_error, lse, jnp.zeros_like(lse))


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
    d_query = _query_gradient(config, x, rows)
    if x.query.shape[-1] + x.value.shape[-1] <= _MOST_KEPT:
        d_key, d_value = _key_gradient(config, x, rows, ("key", "value"))
    else:
        (d_key,) = _key_gradient(config, x, rows, ("key",))
        (d_value,) = _key_gradient(config, x, rows, ("value",))
    gradients = Inputs(query=d_query, key=d_key, value=d_value)
    if x.scale is None and not x.constants:
        return gradients
    config = dataclasses.replace(config, implementations=dispatch.XLA)
    others = xla.backward(config, x, rows[0], d_out, delta)
    return gradients._replace(scale=others.scale, constants=others.constants)


class _Rows(NamedTuple):
    """Arrays of the queries for the gradients: lse and delta `(B, N, T')`, dO `(B, T', N, Hv')`.

    The log-sum-exp is that in the base of `_factor`.
    """

    lse: Any
    d_out: Any
    delta: Any

    @classmethod
    def of(cls, plan, x: Inputs, rows) -> "_Rows":
        axes, t = x.query.ndim - 3, plan.tile[0]
        lse, d_out, delta = (array.reshape(-1, *array.shape[axes:]) for array in rows)
        lse = lse if _factor(plan) is None else lse * _LOG2E
        # Rows of padding get lse = inf, so weight 0, even if a score_mod changes their logits.
        return cls(tiles.by_head(lse, t, jnp.inf), tokens(d_out), tiles.by_head(delta, t))


def _arrange(kernel: str, config: Config, x: Inputs):
    """Returns the plan of a kernel, with its tile, and the arrays that the kernel reads."""
    sides = config.implementations.tile("mosaic_gpu", kernel) or _tiles_of(x)[kernel]
    plan, arrays = block_tiles.arrange(config, x, block_tiles.fitted(sides, config, x, ROWS))
    walk, order = visited_tiles.walk_and_order(plan, arrays, x, of_keys=kernel == "key")
    return plan, tiles.as_read(plan, arrays._replace(walk=walk, order=order))


class _Queries:
    """Query tile of a block, with the walk over tiles of keys and values."""

    def __init__(self, plan, x, block, keys, values):
        self.plan, self.x, self.b, self.h, self.n = plan, x, block.b, block.h, block.n
        self.key_head = lax.div(block.h, np.int32(plan.group))
        self.keys = Stream(tiles.of_tokens(x, *KEY), *keys)
        self.values = Stream(tiles.of_tokens(x, "value"), *values)
        self.walk = visited_tiles.walk(
            plan, entry, x.walk, self.b, self.key_head, self.n, of_keys=False
        )
        self.visited = self.walk.whole + self.walk.masked

    def copy(self):
        """Copies all visited tiles; runs in the copying warpgroup."""

        def step(number, m, carry, whole):
            for stream in (self.keys, self.values):
                stream.put(number, self.b, self.key_head, m * self.plan.tile[1])
            return carry

        tiles.fold(self.walk, step, None)
        for stream in (self.keys, self.values):
            stream.finish(self.visited)


def _forward_kernel(plan, x, _, outputs, scratch, block):
    out, lse, *out_error = outputs
    own, keys, values, staged, turns, rows_of_out, rows_of_lse = scratch
    tile_of = _Queries(plan, x, block, keys, values)
    keys, values, worker = tile_of.keys, tile_of.values, block.worker

    def compute():
        first = tile_of.n * plan.tile[0] + worker * ROWS
        tile = Tile(plan, x, block.b, block.h)
        product = Product.of_worker(staged, worker)
        of_queries = tiles.of_tokens(x, *QUERY)
        own_rows = Own(of_queries, *own).get(worker, block.b, block.h, first)
        query, parts = own_rows["query"], _parts(x.value.shape[-1])
        turns_of = Turns(turns, worker)
        # exp2 has an instruction, exp has not: `largest` is the largest logit times log2(e).
        factor = _factor(plan)
        turns_of.start()

        def wait_for_keys(number):
            pl.when(number < tile_of.visited)(lambda: keys.wait(number))

        wait_for_keys(0)

        def step(number, m, carry, whole):
            largest, total, mixed = carry
            beside = own_rows | keys.at(number)
            products = product.of(query, transposed(beside["key"]), turns_of.change)
            at = tile.at(first, m * plan.tile[1], beside)
            logits = products if factor else tile.scores(at, products)(products)
            logits = tile.masked(at, logits, beside, whole)
            keys.done(number)
            scale = factor or _LOG2E
            before, largest = largest, jnp.maximum(largest, jnp.max(logits, 1) * scale)
            weights = jnp.exp2(logits * scale - down(largest, logits.shape[1]))
            decay = jnp.exp2(before - largest)
            total = total * decay + jnp.sum(weights, 1)
            weights = tile.dropped(at, weights).astype(query.dtype)
            mixed = tuple(part * down(decay, part.shape[1]) for part in mixed)
            # All of this is computed before this worker's turn, in which products alone run.
            largest, total, mixed, weights = lax.optimization_barrier(
                (largest, total, mixed, weights)
            )
            turns_of.change(lambda: values.wait(number))
            value = values.at(number)["value"]
            mixed = product.onto(
                mixed,
                weights,
                [value.at[:, features] for features in parts],
                lambda: wait_for_keys(number + 1),
            )
            values.done(number)
            return largest, total, mixed

        start = (
            constant((ROWS,), np.finfo(np.float32).min),
            constant((ROWS,), 0),
            tuple(constant((ROWS, features.size), 0) for features in parts),
        )
        largest, total, mixed = tiles.fold(tile_of.walk, step, start)
        turns_of.finish()
        seen = total != 0  # NaN stays NaN
        total = jnp.where(seen, total, 1.0)
        rows_of_lse[worker, :] = jnp.where(seen, largest / _LOG2E + jnp.log(total), -jnp.inf)
        plgpu.commit_smem()
        rows = pl.ds(first, ROWS)
        plgpu.copy_smem_to_gmem(rows_of_lse.at[worker], lse.at[block.b, block.h, rows])
        room = query if rows_of_out is None else rows_of_out.at[worker]
        outputs = [part / down(total, part.shape[1]) for part in mixed]
        put_rows(room, outputs, out.at[block.b, rows, block.h])
        for target in out_error:
            rest = [part - part.astype(target.dtype).astype(jnp.float32) for part in outputs]
            put_rows(room, rest, target.at[block.b, rows, block.h])

    tiles.roles(plan.tile[0] // ROWS, worker, compute, tile_of.copy)


def _factor(plan):
    """Returns log2(e) times the scale, if logits are products times a static positive scale.

    The caller merges the scale with the factor log2(e) of `exp2`, so the scale costs no operation.
    A positive scale does not change which product is the largest. For other logits: None.
    """
    config = plan.config
    if (
        plan.score is None
        and config.soft_cap is None
        and config.scale is not None
        and config.scale > 0
    ):
        return config.scale * _LOG2E
    return None


def _parts(width):
    """Slices of the output features, `_MOST_AT_ONCE` or fewer features each."""
    size = _MOST_AT_ONCE
    return [pl.ds(start, min(size, width - start)) for start in range(0, width, size)]


def _weights(tile, at, products, beside, whole, lse):
    """Returns the recomputed weights before dropout, from the log-sum-exp as in `_Rows`."""
    factor = _factor(tile.plan)
    logits = tile.scores(at, products)(products) if factor is None else products
    logits = tile.masked(at, logits, beside, whole)
    return jnp.exp(logits - lse) if factor is None else jnp.exp2(logits * factor - lse)


def _gradients(tile, product, at, beside, whole, pairs, of_rows):
    """Returns the weights after dropout, and the gradient of the products of queries and keys.

    With `_factor` the gradient lacks the factor of the scale, which `_scaled` applies to its sum,
    except in float16: there the larger gradient could overflow.

    Args:
      tile: part of a tile.
      product: products of the worker.
      at: indices and positions of the part.
      beside: arrays of its tokens, by name.
      whole: whether all its pairs may attend.
      pairs: factors of the products of queries and keys, and of dO V^T.
      of_rows: function that loads "lse" or "delta", broadcast to the part. It is called late, as
        these numbers take as many registers as a product in a transposed part.
    """
    plan = tile.plan
    if _factor(plan) is not None:

        def between(products):
            return _weights(tile, at, products, beside, whole, of_rows("lse"))

        weights, d_weights = product.of_both(*pairs, between=between)
        d_products = weights * (tile.dropped(at, d_weights) - of_rows("delta"))
        if not _scaled_last(plan, beside["query"].dtype):
            d_products = d_products * plan.config.scale
        return tile.dropped(at, weights), d_products
    products, d_weights = product.of_both(*pairs, between=lambda products: products)
    logits, pull_back = jax.vjp(tile.scores(at, products), products)
    logits = tile.masked(at, logits, beside, whole)
    sums = of_rows("lse"), of_rows("delta")
    weights, d_logits = block_tiles.gradients(plan, at, logits, sums, d_weights, tile.load)
    return weights, pull_back(d_logits)[0]


def _scaled_last(plan, dtype):
    return _factor(plan) is not None and dtype == jnp.bfloat16


def _scaled(plan, gradient, dtype):
    """Returns the gradient of queries or keys from the sum over `_gradients`."""
    return gradient * plan.config.scale if _scaled_last(plan, dtype) else gradient


# Gradient of the queries


def _query_gradient(config, x: Inputs, rows):
    plan, arrays = _arrange("query", config, x)
    workers, dtype = plan.tile[0] // ROWS, x.query.dtype
    of_rows = _Rows.of(plan, x, rows)
    scratch = (
        Own.scratch(tiles.of_tokens(arrays, *QUERY) | of_rows._asdict(), workers),
        Stream.scratch(tiles.of_tokens(arrays, *KEY), plan.tile[1], workers),
        Stream.scratch(tiles.of_tokens(arrays, "value"), plan.tile[1], workers),
        Product.scratch(plan.config.implementations.interpreted, plan.tile[1], dtype, workers),
    )
    shapes = ((arrays.query.shape, dtype),)
    (d_query,) = tiles.call(
        "query", _query_kernel, plan, arrays, of_rows, shapes, scratch, of_keys=False
    )
    return _of_shape(d_query, x.query)


def _query_kernel(plan, x, rows, outputs, scratch, block):
    own, keys, values, staged = scratch
    tile_of = _Queries(plan, x, block, keys, values)
    keys, values, worker = tile_of.keys, tile_of.values, block.worker

    def compute():
        first = tile_of.n * plan.tile[0] + worker * ROWS
        tile = Tile(plan, x, block.b, block.h)
        product = Product.of_worker(staged, worker)
        of_queries = tiles.of_tokens(x, *QUERY) | rows._asdict()
        own_rows = Own(of_queries, *own).get(worker, block.b, block.h, first)
        sums = {name: tile.each(own_rows[name], 0) for name in ("lse", "delta")}

        def total(d_query):
            def step(number, m, carry, whole):
                beside = own_rows | keys.get(number) | values.get(number)
                at = tile.at(first, m * plan.tile[1], beside)
                pairs = (
                    (beside["query"], transposed(beside["key"])),
                    (beside["d_out"], transposed(beside["value"])),
                )
                _, d_products = _gradients(
                    tile, product, at, beside, whole, pairs, sums.__getitem__
                )
                values.done(number)
                product.add(d_query, d_products.astype(x.key.dtype), beside["key"])
                plgpu.wgmma_wait(0)
                keys.done(number)
                return carry

            tiles.fold(tile_of.walk, step, None)
            return read(d_query)

        found = pl.run_scoped(total, plgpu.ACC((ROWS, x.query.shape[-1]), jnp.float32))
        target = outputs[0].at[block.b, pl.ds(first, ROWS), block.h]
        put_rows(own_rows["query"], [_scaled(plan, found, x.query.dtype)], target)

    tiles.roles(plan.tile[0] // ROWS, worker, compute, tile_of.copy)


# Gradients of keys and values


def _key_gradient(config, x: Inputs, rows, wanted):
    """Yields the gradients of the arrays named in `wanted`: "key", "value" or both."""
    plan, arrays = _arrange("key", config, x)
    workers, dtype, of_rows = plan.tile[1] // ROWS, x.key.dtype, _Rows.of(plan, x, rows)
    scratch = (
        Own.scratch(tiles.of_tokens(arrays, *KEY, "value"), workers),
        Stream.scratch(tiles.of_tokens(arrays, *QUERY), plan.tile[0], workers),
        Stream.scratch(of_rows._asdict(), plan.tile[0], workers),
        Product.scratch(plan.config.implementations.interpreted, plan.tile[0], dtype, workers),
    )
    shapes = tuple((getattr(arrays, name).shape, dtype) for name in wanted)
    kernel = functools.partial(_key_kernel, wanted)
    name = "_".join(wanted)
    found = tiles.call(name, kernel, plan, arrays, of_rows, shapes, scratch, of_keys=True)
    for name, gradient in zip(wanted, found, strict=True):
        yield _of_shape(gradient, getattr(x, name))


def _of_shape(padded, like):
    """Removes the padding and restores the shape of `like`."""
    length, _, size = like.shape[-3:]
    return padded[:, :length, :, :size].reshape(like.shape)


def _key_kernel(wanted, plan, x, rows, outputs, scratch, block):
    own, queries, d_outs, staged = scratch
    queries = Stream(tiles.of_tokens(x, *QUERY), *queries)
    d_outs = Stream(rows._asdict(), *d_outs)
    b, key_head, m, worker = block
    t, s = plan.tile
    walk = visited_tiles.walk(plan, entry, x.walk, b, key_head, m, of_keys=True)
    visited = walk.whole + walk.masked

    def over_heads(of_head):
        def body(g, carry):
            of_head(key_head * plan.group + g, g * visited)
            return carry

        lax.fori_loop(0, plan.group, body, None)

    def copy():
        def of_head(h, numbered_from):
            def step(number, n, carry, whole):
                queries.put(number, b, h, n * t)
                d_outs.put(number, b, h, n * t)
                return carry

            tiles.fold(walk, step, None, numbered_from)

        over_heads(of_head)
        for stream in (queries, d_outs):
            stream.finish(plan.group * visited)

    def compute():
        first = m * s + worker * ROWS
        product = Product.of_worker(staged, worker)
        of_keys = tiles.of_tokens(x, *KEY, "value")
        own_rows = Own(of_keys, *own).get(worker, b, key_head, first)

        def total(*accumulators):
            totals = dict(zip(wanted, accumulators, strict=True))

            def of_head(h, numbered_from):
                tile = Tile(plan, x, b, h, transposed=True)

                def step(number, n, carry, whole):
                    beside = own_rows | queries.get(number) | d_outs.get(number)
                    at = tile.at(n * t, first, beside)
                    left_and_right = beside["key"], transposed(beside["query"])

                    def of_rows(name):
                        return tile.each(beside[name], 0)

                    if "key" in wanted:
                        pairs = left_and_right, (beside["value"], transposed(beside["d_out"]))
                        weights, d_products = _gradients(
                            tile, product, at, beside, whole, pairs, of_rows
                        )
                    else:
                        products = product.of(*left_and_right)
                        weights = _weights(tile, at, products, beside, whole, of_rows("lse"))
                        weights = tile.dropped(at, weights)
                    if "value" in wanted:
                        weights = weights.astype(x.value.dtype)
                        product.add(totals["value"], weights, beside["d_out"])
                    if "key" in wanted:
                        d_products = d_products.astype(x.key.dtype)
                        product.add(totals["key"], d_products, beside["query"])
                    plgpu.wgmma_wait(1 if "key" in wanted else 0)  # dO has been read
                    d_outs.done(number)
                    plgpu.wgmma_wait(0)
                    queries.done(number)
                    return carry

                tiles.fold(walk, step, None, numbered_from)

            over_heads(of_head)
            return [read(totals[name]) for name in wanted]

        sizes = [getattr(x, name).shape[-1] for name in wanted]
        found = pl.run_scoped(total, *(plgpu.ACC((ROWS, n), jnp.float32) for n in sizes))
        for name, output, gradient in zip(wanted, outputs, found, strict=True):
            target = output.at[b, pl.ds(first, ROWS), key_head]
            gradient = _scaled(plan, gradient, x.key.dtype) if name == "key" else gradient
            put_rows(own_rows[name], [gradient], target)

    tiles.roles(s // ROWS, worker, compute, copy)
