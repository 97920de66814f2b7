"""Block attention for Hopper GPUs, lowered by Mosaic GPU.

The kernels are those of `effattn.pallas.triton.block_attention`, and every sum belongs to one
block. In each block one warpgroup only copies: the bulk copy engine (TMA) writes tiles into two
slots of shared memory, swizzled in the order in which tensor cores read them. Barriers tell which
slot is filled and which slot has been read. The other warpgroups compute 64 rows each: they
multiply from shared memory (`wgmma`) and keep sums in registers. Keys and values are copied once
for all rows of a block.

- forward: two computing warpgroups take turns, so that the exponentials of one warpgroup overlap
  with the products of the other. For a tile of 128 x 128 at head size 128 a multiprocessor takes
  1024 cycles for the exponentials and 2048 cycles for the products.
- gradient of the queries: the weights are recomputed from the log-sum-exp. The sum stays in the
  accumulator of `wgmma` over all tiles.
- gradients of keys and values: both sums stay in accumulators of `wgmma`. The logits are
  transposed, `(s, t)`, so that weights go from registers into the next product without a change of
  layout.

Registers. With two computing warpgroups a thread has 232 registers. A product of 64 rows takes one
register per thread for every two columns. At head size 128 and s = 128 the forward keeps 64
registers of the output; the logits (64) and the product that is added to the output (64) are not
live at the same time, and one of them is live together with the weights (32). The gradients of keys
and values take 128 registers at head size 128, which leaves room for two tiles of logits of 64
columns (64 registers). At head size 256 these gradients would take 256 registers, so they are
computed in two calls. For causal attention ptxas 13.5 then keeps everything in registers, except
for spills of 100 bytes per thread in the gradients of keys and values at head size 128, and of 72
to 260 bytes in all kernels but one at head size 256.

Memory. Each number of the keys and values that a block reads is multiplied with t queries, 2 t
operations in the forward and t operations per byte of bfloat16. L2 delivers one byte in the time of
180 operations, so with t = 128 it allows at most 71 % of the peak rate. At head size 256 the shared
memory of 227 KB then holds the queries (64 KB), two slots of s = 64 keys and values (128 KB) and
the staging buffer of the output (16 KB). The gradients also read dO, and have 64 rows in place of
128.

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
from effattn.interfaces.block_attention import Config, Inputs
from effattn.pallas import block_tiles, partition
from effattn.pallas.mosaic_gpu import tiles
from effattn.pallas.mosaic_gpu.tiles import ROWS, Own, Product, Stream, Tile, Turns, down
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
_MOST_BLOCKS = 2**16 - 1  # CUDA limit on the sizes of two axes of a grid
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
    examples = math.prod(x.query.shape[:-3])
    if max(examples, x.query.shape[-2]) > _MOST_BLOCKS:
        heads = x.query.shape[-2]
        return f"takes up to {_MOST_BLOCKS} examples and heads each, got {examples} and {heads}"
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
            f"Mosaic GPU with causal masks, got {version[1]}"
        )
    return None


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
def forward(config: Config, x: Inputs, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the output in `dtype`, the log-sum-exp, and zeros as its rounding error.

    The error is not computed, as the kernel multiplies logits with a factor for powers of 2: where
    the rounding error of the log-sum-exp matters, that factor has rounded the logits as much.
    """
    plan, arrays = _arrange("forward", config, x)
    batch, queries, heads, _ = arrays.query.shape
    workers = plan.tile[0] // ROWS
    scratch = (
        Own.scratch(tiles.of_tokens(arrays, *QUERY), workers),
        Stream.scratch(tiles.of_tokens(arrays, *KEY), plan.tile[1], workers),
        Stream.scratch(tiles.of_tokens(arrays, "value"), plan.tile[1], workers),
        Product.scratch(plan, plan.tile[1], x.value.dtype, workers),
        Turns.scratch(workers),
        tiles.staging(workers, dtype),
        plgpu.SMEM((workers, ROWS), jnp.float32),
    )
    shapes = (
        ((batch, queries, heads, arrays.value.shape[3]), dtype),
        ((batch, heads, plan.grid[0] * plan.tile[0]), jnp.float32),
    )
    grid = batch, heads, plan.grid[0]
    out, lse = tiles.call("forward", _forward_kernel, plan, arrays, grid, shapes, scratch, workers)
    out = out[:, : plan.lengths[0], :, : plan.sizes[1]]
    lse = jnp.swapaxes(lse[..., : plan.lengths[0]], 1, 2)
    lse = lse.reshape(x.query.shape[:-1])
    return out.reshape(*lse.shape, plan.sizes[1]), lse, jnp.zeros_like(lse)


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
    """Arrays of the queries for the gradients: lse and delta `(B, N, T')`, dO `(B, T', N, Hv')`."""

    lse: Any
    d_out: Any
    delta: Any

    @classmethod
    def of(cls, plan, x: Inputs, rows) -> "_Rows":
        axes, t = x.query.ndim - 3, plan.tile[0]
        lse, d_out, delta = (array.reshape(-1, *array.shape[axes:]) for array in rows)
        # Rows of padding get lse = inf, so weight 0, even if a score_mod changes their logits.
        return cls(tiles.by_head(lse, t, jnp.inf), tiles.tokens(d_out), tiles.by_head(delta, t))


def _arrange(kernel: str, config: Config, x: Inputs):
    """Returns the plan of a kernel, with its tile, and the arrays that the kernel reads."""
    sides = config.implementations.tile("mosaic_gpu", kernel) or _tiles_of(x)[kernel]
    plan, arrays = block_tiles.arrange(config, x, block_tiles.fitted(sides, config, x, ROWS))
    walk = block_tiles.walk_arrays(plan, arrays, x, of_keys=kernel == "key")
    return plan, tiles.as_read(plan, arrays._replace(walk=walk))


class _Queries:
    """Query tile of a block, with the walk over tiles of keys and values."""

    def __init__(self, plan, x, block, keys, values):
        self.plan, self.x, self.b, self.h = plan, x, block.b, block.h
        # The last query tiles come first: with causal attention they have the most work.
        self.n = plan.grid[0] - 1 - block.n
        self.key_head = lax.div(block.h, np.int32(plan.group))
        self.keys = Stream(tiles.of_tokens(x, *KEY), *keys)
        self.values = Stream(tiles.of_tokens(x, "value"), *values)
        self.walk = block_tiles.walk(
            plan, tiles.entry, x.walk, self.b, self.key_head, self.n, of_keys=False
        )

    def copy(self):
        """Copies all visited tiles; runs in the copying warpgroup."""

        def step(number, m, carry, whole):
            for stream in (self.keys, self.values):
                stream.put(number, self.b, self.key_head, m * self.plan.tile[1])
            return carry

        tiles.fold(self.walk, step, None)
        for stream in (self.keys, self.values):
            stream.finish(self.walk.whole + self.walk.masked)


def _forward_kernel(plan, x, outputs, scratch, block):
    out, lse = outputs
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
        scale = _scale_alone(plan)
        factor = _LOG2E * (scale or 1)
        turns_of.start()

        def step(number, m, carry, whole):
            largest, total, mixed = carry
            beside = own_rows | keys.get(number)
            products = product.of(query, tiles.transposed(beside["key"]), turns_of.change)
            at = tile.at(first, m * plan.tile[1], beside)
            logits = products if scale else tile.scores(at, products)(products)
            logits = tile.masked(at, logits, beside, whole)
            keys.done(number)
            before, largest = largest, jnp.maximum(largest, jnp.max(logits, 1) * factor)
            weights = jnp.exp2(logits * factor - down(largest, logits.shape[1]))
            decay = jnp.exp2(before - largest)
            total = total * decay + jnp.sum(weights, 1)
            weights = tile.dropped(at, weights).astype(query.dtype)
            value = values.get(number)["value"]
            turns_of.change()
            mixed = tuple(
                part * down(decay, part.shape[1]) + product.of(weights, value.at[:, features])
                for part, features in zip(mixed, parts, strict=True)
            )
            values.done(number)
            return largest, total, mixed

        start = (
            tiles.constant((ROWS,), np.finfo(np.float32).min),
            tiles.constant((ROWS,), 0),
            tuple(tiles.constant((ROWS, features.size), 0) for features in parts),
        )
        largest, total, mixed = tiles.fold(tile_of.walk, step, start)
        turns_of.finish()
        seen = total > 0
        total = jnp.where(seen, total, 1.0)
        rows_of_lse[worker, :] = jnp.where(seen, largest / _LOG2E + jnp.log(total), -jnp.inf)
        plgpu.commit_smem()
        rows = pl.ds(first, ROWS)
        plgpu.copy_smem_to_gmem(rows_of_lse.at[worker], lse.at[block.b, block.h, rows])
        for part, features in zip(mixed, parts, strict=True):
            target = out.at[block.b, rows, block.h, features]
            tiles.put_rows(rows_of_out.at[worker], part / down(total, part.shape[1]), target)

    tiles.roles(plan.tile[0] // ROWS, worker, compute, tile_of.copy)


def _scale_alone(plan):
    """Returns the scale if logits are products times a static positive scale; otherwise None.

    The caller merges such a scale with the factor log2(e) of `exp2`, so the scale costs no
    operation. A positive scale does not change which product is the largest.
    """
    config = plan.config
    if (
        plan.score is None
        and config.soft_cap is None
        and config.scale is not None
        and config.scale > 0
    ):
        return config.scale
    return None


def _parts(width):
    """Slices of the output features, `_MOST_AT_ONCE` or fewer features each."""
    size = _MOST_AT_ONCE
    return [pl.ds(start, min(size, width - start)) for start in range(0, width, size)]


# Gradient of the queries


def _query_gradient(config, x: Inputs, rows):
    plan, arrays = _arrange("query", config, x)
    workers, dtype, (batch, _, heads, _) = plan.tile[0] // ROWS, x.query.dtype, arrays.query.shape
    inputs = arrays, _Rows.of(plan, x, rows)
    scratch = (
        Own.scratch(tiles.of_tokens(arrays, *QUERY) | inputs[1]._asdict(), workers),
        Stream.scratch(tiles.of_tokens(arrays, *KEY), plan.tile[1], workers),
        Stream.scratch(tiles.of_tokens(arrays, "value"), plan.tile[1], workers),
        Product.scratch(plan, plan.tile[1], dtype, workers),
        tiles.staging(workers, dtype),
    )
    grid, shapes = (batch, heads, plan.grid[0]), ((arrays.query.shape, dtype),)
    (d_query,) = tiles.call("query", _query_kernel, plan, inputs, grid, shapes, scratch, workers)
    return _of_shape(d_query, x.query)


def _query_kernel(plan, inputs, outputs, scratch, block):
    x, rows = inputs
    own, keys, values, staged, rows_of_gradient = scratch
    tile_of = _Queries(plan, x, block, keys, values)
    keys, values, worker = tile_of.keys, tile_of.values, block.worker

    def compute():
        first = tile_of.n * plan.tile[0] + worker * ROWS
        tile = Tile(plan, x, block.b, block.h)
        product = Product.of_worker(staged, worker)
        of_queries = tiles.of_tokens(x, *QUERY) | rows._asdict()
        own_rows = Own(of_queries, *own).get(worker, block.b, block.h, first)
        sums = tile.each(own_rows["lse"], 0), tile.each(own_rows["delta"], 0)

        def total(d_query):
            def step(number, m, carry, whole):
                beside = own_rows | keys.get(number) | values.get(number)
                at = tile.at(first, m * plan.tile[1], beside)
                products, d_weights = product.of_both(
                    (beside["query"], tiles.transposed(beside["key"])),
                    (beside["d_out"], tiles.transposed(beside["value"])),
                )
                values.done(number)
                logits, pull_back = jax.vjp(tile.scores(at, products), products)
                logits = tile.masked(at, logits, beside, whole)
                _, d_logits = block_tiles.gradients(plan, at, logits, sums, d_weights, tile.load)
                (d_products,) = pull_back(d_logits)
                product.add(d_query, d_products.astype(x.key.dtype), beside["key"])
                plgpu.wgmma_wait(0)
                keys.done(number)
                return carry

            tiles.fold(tile_of.walk, step, None)
            return d_query[...]

        found = pl.run_scoped(total, plgpu.ACC((ROWS, x.query.shape[-1]), jnp.float32))
        target = outputs[0].at[block.b, pl.ds(first, ROWS), block.h]
        tiles.put_rows(rows_of_gradient.at[worker], found, target)

    tiles.roles(plan.tile[0] // ROWS, worker, compute, tile_of.copy)


# Gradients of keys and values


def _key_gradient(config, x: Inputs, rows, wanted):
    """Yields the gradients of the arrays named in `wanted`: "key", "value" or both."""
    plan, arrays = _arrange("key", config, x)
    workers, dtype, (batch, _, heads, _) = plan.tile[1] // ROWS, x.key.dtype, arrays.key.shape
    inputs = arrays, _Rows.of(plan, x, rows)
    scratch = (
        Own.scratch(tiles.of_tokens(arrays, *KEY, "value"), workers),
        Stream.scratch(tiles.of_tokens(arrays, *QUERY), plan.tile[0], workers),
        Stream.scratch(inputs[1]._asdict(), plan.tile[0], workers),
        Product.scratch(plan, plan.tile[0], dtype, workers),
        tiles.staging(workers, dtype),
    )
    grid = batch, heads, plan.grid[1]
    shapes = tuple((getattr(arrays, name).shape, dtype) for name in wanted)
    kernel = functools.partial(_key_kernel, wanted)
    name = "_".join(wanted)
    found = tiles.call(name, kernel, plan, inputs, grid, shapes, scratch, workers)
    for name, gradient in zip(wanted, found, strict=True):
        yield _of_shape(gradient, getattr(x, name))


def _of_shape(padded, like):
    """Removes the padding and restore the shape of `like`."""
    length, _, size = like.shape[-3:]
    return padded[:, :length, :, :size].reshape(like.shape)


def _key_kernel(wanted, plan, inputs, outputs, scratch, block):
    x, rows = inputs
    own, queries, d_outs, staged, rows_of_gradient = scratch
    queries = Stream(tiles.of_tokens(x, *QUERY), *queries)
    d_outs = Stream(rows._asdict(), *d_outs)
    b, key_head, m, worker = block
    t, s = plan.tile
    walk = block_tiles.walk(plan, tiles.entry, x.walk, b, key_head, m, of_keys=True)
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
            sums = dict(zip(wanted, accumulators, strict=True))

            def of_head(h, numbered_from):
                tile = Tile(plan, x, b, h, transposed=True)

                def step(number, n, carry, whole):
                    beside = own_rows | queries.get(number) | d_outs.get(number)
                    at = tile.at(n * t, first, beside)
                    left_and_right = beside["key"], tiles.transposed(beside["query"])
                    if "key" in wanted:
                        products, d_weights = product.of_both(
                            left_and_right, (beside["value"], tiles.transposed(beside["d_out"]))
                        )
                    else:
                        products = product.of(*left_and_right)
                    logits, pull_back = jax.vjp(tile.scores(at, products), products)
                    logits = tile.masked(at, logits, beside, whole)
                    of_rows = tile.each(beside["lse"], 0), tile.each(beside["delta"], 0)
                    if "key" in wanted:
                        weights, d_logits = block_tiles.gradients(
                            plan, at, logits, of_rows, d_weights, tile.load
                        )
                    else:
                        weights = tile.dropped(at, jnp.exp(logits - of_rows[0]))
                    if "value" in wanted:
                        weights = weights.astype(x.value.dtype)
                        product.add(sums["value"], weights, beside["d_out"])
                        plgpu.wgmma_wait(0)
                    d_outs.done(number)
                    if "key" in wanted:
                        (d_products,) = pull_back(d_logits)
                        d_products = d_products.astype(x.key.dtype)
                        product.add(sums["key"], d_products, beside["query"])
                        plgpu.wgmma_wait(0)
                    queries.done(number)
                    return carry

                tiles.fold(walk, step, None, numbered_from)

            over_heads(of_head)
            return [sums[name][...] for name in wanted]

        sizes = [getattr(x, name).shape[-1] for name in wanted]
        found = pl.run_scoped(total, *(plgpu.ACC((ROWS, n), jnp.float32) for n in sizes))
        for output, gradient in zip(outputs, found, strict=True):
            target = output.at[b, pl.ds(first, ROWS), key_head]
            tiles.put_rows(rows_of_gradient.at[worker], gradient, target)

    tiles.roles(s // ROWS, worker, compute, copy)
