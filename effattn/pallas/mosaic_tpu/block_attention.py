"""Block attention for TPUs, lowered by Mosaic.

The last axis of the grid walks over the tiles that a query tile (or a key tile) visits, one after
another on one core; sums stay in scratch memory (VMEM). The index of the next tile is read from
scalar memory before its step begins, so that the next tile is copied in while the current tile is
computed. If the visited tiles are known when the program is traced, as with causality and windows,
one axis lists them all (`steps`), up to four in a step. The kernel loops over the tiles of a step,
because each step has a fixed cost. Otherwise each tile has as many steps as it may need;
extra steps repeat the index of the last tile, and copy nothing.

Arrays are first transposed to `(B, N, T, H)`, as the last two axes of a tile must be the two axes
of a register, and are padded to whole tiles in the same pass.

Logits are transposed, `(s, t)`, and so is the output until it is written. The sums over keys are
then sums of whole registers. Values per query (largest logit, log-sum-exp, delta) are rows
`(1, t)` in registers and in memory: a column `(t, 1)` would take 128 times its size. The kernel for
the gradients of queries sums over keys only in matrix products. So its logits are not transposed,
`(t, s)`, and it turns the rows of its tile into columns once.

The gradients come from two kernels, one for queries and one for keys and values. XLA computes the
gradients of a bias, a scale and the arrays that a score_mod closes over
(`effattn.xla.block_attention`), which is equally exact.

Tiles. A step does t s H multiplications for each product and reads s (H + Hv) numbers. t = 512
gives 512 operations per byte in bfloat16, twice the operations that a core does while memory
delivers one byte. A tile of logits then takes 1 MB in float32; the backward holds four such tiles
at once, in 16 MB of VMEM.
"""

import copy
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from effattn import dispatch
from effattn.arrays import mesh_axes
from effattn.interfaces.block_attention import NO_KEY, Attended, Config, Inputs, output_dtype
from effattn.pallas import block_tiles, partition
from effattn.pallas.block_tiles import Arrays, At, Plan, SoftmaxOfColumns
from effattn.pallas.mosaic_tpu import steps
from effattn.pallas.mosaic_tpu.steps import Grid
from effattn.xla import block_attention as xla

LANES = 128
LIMITS = dispatch.Limits(("float32", "bfloat16"), 256, "tiles of multiples of 128")
_SIDES = 512, 256, 128
# Arrays of queries; the others are of keys.
_OF_QUERIES = "query", "d_out", "lse", "delta", "query_ids", "query_positions"
_LEAST_MEMORY = 2**24  # the limit of a kernel that sets none, in bytes


def refusal(config: Config, x: Inputs) -> str | None:
    """Returns the reason why these kernels cannot take these operands, or None."""
    if reason := block_tiles.refusal(LIMITS, config, x):
        return reason
    given = config.tile if x.layout is None else x.layout.tile
    if given is not None and any(side % LANES for side in given):
        return f"takes tiles of multiples of {LANES} queries and keys, got {given}"
    return steps.refusal(x, _tile(config, x))


@partition.forward
def forward(config: Config, x: Inputs, exact: bool) -> Attended:
    """Returns the output, its rounding error if `exact`, and the log-sum-exp."""
    plan, arrays = block_tiles.arrange(config, x, _tile(config, x))
    grid, walk = steps.grid_of(plan, arrays, x, of_keys=False)
    arrays = arrays._replace(walk=walk)
    batch, (t, _), (heads, _) = arrays.query.shape[0], plan.tile, plan.heads
    rows, width = plan.grid[0] * t, plan.sizes[1]

    def at(*given):
        return (*steps.at_step(plan, False, grid, *given)[:3], 0)

    def along(*given):
        b, h, n, _ = at(*given)
        return b, h, 0, n

    run = functools.partial(
        _call,
        _forward_kernel,
        plan,
        grid,
        (batch, heads),
        out_specs=[
            pl.BlockSpec((None, None, t, width), at),
            *2 * [pl.BlockSpec((None, None, 1, t), along)],
        ],
        out_shape=[
            ((batch, heads, rows, width), output_dtype(x, exact)),
            *2 * [((batch, heads, 1, rows), jnp.float32)],
        ],
        scratch_shapes=[(1, t), (1, t), (width, t)],
    )
    out, *along_rows = run(_Inputs.of(plan, arrays, grid, of_keys=False))
    queries = plan.lengths[0]
    out = jnp.swapaxes(out[:, :, :queries], 1, 2).reshape(*x.query.shape[:-1], width)
    lse, lse_error = (
        jnp.swapaxes(array[:, :, 0, :queries], 1, 2).reshape(x.query.shape[:-1])
        for array in along_rows
    )
    return Attended.of(x, out, lse, lse_error)


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
    plan, arrays = block_tiles.arrange(config, x, _tile(config, x))
    batch, (t, s), (heads, key_heads) = arrays.query.shape[0], plan.tile, plan.heads
    axes, (size, width) = x.query.ndim - 3, plan.sizes
    d_out, lse, delta = (array.reshape(-1, *array.shape[axes:]) for array in (d_out, lse, delta))
    # Padding rows get lse = inf, so weight 0, even if a bias or a score_mod changes their logits.
    lse = jnp.where(lse == -jnp.inf, 0, lse)
    rows = _by_head(d_out, t), _in_rows(lse, t, jnp.inf), _in_rows(delta, t, 0)

    def call(kernel, of_keys, blocks, shapes, more=()):
        grid, walk = steps.grid_of(plan, arrays, x, of_keys=of_keys)
        known = arrays._replace(walk=walk)
        inputs = _Inputs.of(plan, known, grid, of_keys=of_keys, upright=not of_keys, rows=rows)

        def at(*given):
            step = steps.at_step(plan, of_keys, grid, *given)
            return step.b, *((given[1], step.m) if of_keys else (step.h, step.n)), 0

        return _call(
            kernel,
            plan,
            grid,
            (batch, key_heads if of_keys else heads),
            inputs,
            out_specs=[pl.BlockSpec((None, None, *block), at) for block in blocks],
            out_shape=shapes,
            scratch_shapes=[*blocks, *more],
        )

    (d_query,) = call(
        _query_kernel,
        False,
        [(t, size)],
        [((batch, heads, plan.grid[0] * t, size), x.query.dtype)],
        2 * [(t, LANES)],
    )
    d_key, d_value = call(
        _key_kernel,
        True,
        [(s, size), (s, width)],
        [((batch, key_heads, plan.grid[1] * s, n), x.key.dtype) for n in (size, width)],
    )
    gradients = Inputs(
        query=jnp.swapaxes(d_query[:, :, : plan.lengths[0]], 1, 2).reshape(x.query.shape),
        key=jnp.swapaxes(d_key[:, :, : plan.lengths[1]], 1, 2).reshape(x.key.shape),
        value=jnp.swapaxes(d_value[:, :, : plan.lengths[1]], 1, 2).reshape(x.value.shape),
    )
    if x.bias is None and x.scale is None and not x.constants:
        return gradients
    config = dataclasses.replace(config, implementations=dispatch.XLA)
    by_rows = (array.reshape(x.query.shape[:-1]) for array in (lse, delta))
    lse, delta = by_rows
    others = xla.backward(config, x, lse, d_out.reshape(*x.query.shape[:-1], width), delta)
    return gradients._replace(bias=others.bias, scale=others.scale, constants=others.constants)


def tilings(config: Config, x: Inputs) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Returns the candidate tiles `(t, s)` to tune, one tile for all kernels."""
    lengths = x.query.shape[-3], x.key.shape[-3]
    sides = [[s for s in _SIDES if s <= max(length, LANES)] for length in lengths]
    return {"all": tuple(each for each in itertools.product(*sides) if each != _tile(config, x))}


def _tile(config, x):
    """Returns `(t, s)`: the largest sides up to the lengths, or that divide the given tile."""
    if tuned := config.implementations.tile("mosaic_tpu", "all"):
        return tuned
    given = config.tile if x.layout is None else x.layout.tile
    if given is not None:
        q, k = (next(side for side in _SIDES if size % side == 0) for size in given)
        return q, k
    lengths = x.query.shape[-3], x.key.shape[-3]
    q, k = (next((s for s in _SIDES if s <= length), LANES) for length in lengths)
    return q, k


def _padded(array, axis, multiple, value=0):
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return jnp.pad(array, widths, constant_values=value)


def _by_head(array, multiple):
    """Transposes `(B, L, heads, H)` to `(B, heads, L', H)`, padded to L'."""
    return _padded(jnp.swapaxes(array, 1, 2), 2, multiple)


def _in_rows(array, multiple, value):
    """Transposes `(B, L, heads)` to `(B, heads, 1, L')`, padded to L' with `value`."""
    return _padded(jnp.swapaxes(array, 1, 2), 2, multiple, value)[:, :, None]


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """Inputs of a kernel and the block specification of each input.

    Attributes:
      scalars: query offset and walk arrays; scalar memory holds them, to find the blocks.
      arrays: arrays by name.
      specs: block specification of each array, by name.
    """

    scalars: tuple[jax.Array, ...]
    arrays: dict[str, Any]
    specs: dict[str, Any]

    @classmethod
    def of(cls, plan: Plan, x: Arrays, grid: Grid, *, of_keys, upright=False, rows=()) -> "_Inputs":
        (t, s), group = plan.tile, plan.group
        # A step copies one tile of the results, and `at_once` tiles of the others.
        copied = (t * grid.at_once, s) if of_keys else (t, s * grid.at_once)

        def place(*given):
            return steps.at_step(plan, of_keys, grid, *given)[:4]

        arrays: dict[str, Any] = {}
        specs: dict[str, Any] = {}

        def add(name, array, block, index):
            if array is not None:
                arrays[name], specs[name] = array, pl.BlockSpec(block, index)

        def of_queries(*given):
            b, h, n, _ = place(*given)
            return b, h, n, 0

        def of_keys_(*given):
            b, h, _, m = place(*given)
            return b, h // group, m, 0

        add("query", _by_head(x.query, t), (None, None, copied[0], plan.sizes[0]), of_queries)
        add("key", _by_head(x.key, s), (None, None, copied[1], plan.sizes[0]), of_keys_)
        add("value", _by_head(x.value, s), (None, None, copied[1], plan.sizes[1]), of_keys_)
        if rows:

            def along_rows(*given):
                b, h, n, _ = place(*given)
                return b, h, 0, n

            add("d_out", rows[0], (None, None, copied[0], plan.sizes[1]), of_queries)
            add("lse", rows[1], (None, None, 1, copied[0]), along_rows)
            add("delta", rows[2], (None, None, 1, copied[0]), along_rows)

        # Arrays of tokens: keys are rows of a tile and queries columns, or the other way round.
        for name, array, which, value in (
            ("query_positions", x.query_positions, 0, 0),
            ("key_positions", x.key_positions, 1, 0),
            ("query_ids", x.query_ids, 0, 0),
            ("key_ids", x.key_ids, 1, NO_KEY),
        ):
            if array is None:
                continue
            array = _padded(array, 1, plan.tile[which], value)
            is_column = which == int(not upright)

            def of_tokens(*given, which=which, is_column=is_column):
                b, _, *tiles = place(*given)
                return (b, tiles[which], 0) if is_column else (b, 0, tiles[which])

            size = copied[which]
            shape = (None, size, 1) if is_column else (None, 1, size)
            add(name, array[..., None] if is_column else array[:, None], shape, of_tokens)

        for name, array in (("bias", x.bias), ("mask", x.mask)):
            if array is None:
                continue
            sizes: tuple[int, ...] = array.shape
            block: list[Any] = [None, None]
            for axis, side in ((2, t), (3, s)):
                if sizes[axis] > 1:
                    array = _padded(array, axis, side)
                block.append(side if sizes[axis] > 1 else 1)

            def of_pairs(*given, sizes=sizes):
                at = place(*given)
                found = [0 if size == 1 else i for i, size in zip(at, sizes, strict=True)]
                return (*found[:2], *(found[2:] if upright else found[:1:-1]))

            if not upright:
                array, block = jnp.swapaxes(array, 2, 3), [*block[:2], *block[:1:-1]]
            add(name, array, tuple(block), of_pairs)

        memory = pltpu.SMEM
        for name, array in [
            ("scale", x.scale),
            *((f"table{n}", a) for n, a in enumerate(x.tables)),
        ]:
            if array is not None:
                arrays[name], specs[name] = array, pl.BlockSpec(memory_space=memory)
        return cls((x.offset, *x.walk), arrays, specs)


def _call(
    kernel, plan, grid: Grid, leading, inputs: _Inputs, *, out_specs, out_shape, scratch_shapes
):
    scalars, arrays = mesh_axes.vary_alike((inputs.scalars, inputs.arrays))
    varying = jax.typeof(scalars[0]).manual_axis_type
    # In a list of steps, those of one tile of results follow each other.
    parallel = 2 if grid.rank == 3 else 3
    semantics: Any = ("parallel",) * parallel + ("arbitrary",) * (grid.rank - parallel)
    return pl.pallas_call(
        functools.partial(kernel, plan, len(scalars), tuple(arrays), grid),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(*leading, *grid.axes),
            in_specs=[inputs.specs[name] for name in arrays],
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch_shapes],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
            for shape, dtype in out_shape
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=_vector_memory(plan, grid, inputs)
        ),
        cost_estimate=_cost(plan, kernel, math.prod(leading) * grid.visited, inputs, out_shape),
        interpret=plan.config.implementations.interpreted,
        name=f"block_attention{kernel.__name__.removesuffix('_kernel')}",
    )(*scalars, *arrays.values())


def _vector_memory(plan, grid, inputs):
    """Returns the bytes of VMEM that a kernel may use.

    Each block of an array has two copies; at most four arrays of logits exist at a time.
    """
    t, s = plan.tile
    tokens = t + s + max(t, s) * (grid.at_once - 1)
    numbers = 2 * tokens * sum(plan.sizes) * 2 + 4 * t * s
    pairs = sum(2 * t * s for name in ("bias", "mask") if name in inputs.arrays)
    return max(4 * (numbers + pairs), _LEAST_MEMORY)


def _cost(plan, kernel, visited, inputs, out_shape):
    """Returns the estimated cost of a call, with which XLA plans what runs beside it."""
    pairs = visited * math.prod(plan.tile)
    size, width = plan.sizes
    products = {_forward_kernel: size + width, _query_kernel: 2 * size + width}
    each = products.get(kernel, 2 * (size + width))
    arrays = sum(array.size * array.dtype.itemsize for array in inputs.arrays.values())
    results = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in out_shape)
    return pl.CostEstimate(
        flops=2 * pairs * each, bytes_accessed=arrays + results, transcendentals=pairs
    )


# Kernels


class _Tile:
    """Blocks of one step, and one of the tiles that it visits, `(s, t)`, or `(t, s)` if upright."""

    def __init__(self, plan, scalars, blocks, grid: Grid, *, of_keys, upright):
        self.plan, self.blocks, self.upright = plan, blocks, upright
        self.at_once, self.of_keys, self.part = grid.at_once, of_keys, 0
        indices = tuple(pl.program_id(axis) for axis in range(grid.rank))
        self.step = steps.at_step(plan, of_keys, grid, *indices, *scalars)
        self.b, self.h, self.n, self.m, *_ = self.step
        offset = scalars[0]
        self.offset = offset[self.b if offset.shape[0] > 1 else 0]
        exact = blocks["query"].dtype == jnp.float32
        self.precision = lax.Precision.HIGHEST if exact else plan.config.precision
        self.scale = blocks["scale"][0] if "scale" in blocks else None

    def dot(self, left, right, contract=(1, 1)):
        """Product over the axes `contract`, accumulated in float32."""
        numbers = (((contract[0],), (contract[1],)), ((), ()))
        return lax.dot_general(
            left,
            right,
            numbers,
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )

    def products(self, of_queries, of_keys):
        """Products of the tiles of two arrays, by name."""
        of_queries, of_keys = self.block(of_queries), self.block(of_keys)
        return self.dot(of_queries, of_keys) if self.upright else self.dot(of_keys, of_queries)

    def block(self, name):
        """Loads the tile of an array by name; None if the array is absent."""
        if name not in self.blocks:
            return None
        ref, of_queries = self.blocks[name], name in _OF_QUERIES
        if self.at_once == 1 or of_queries != self.of_keys:
            return ref[...]
        size = self.plan.tile[0 if of_queries else 1]
        tokens = pl.ds(pl.multiple_of(self.part * size, size), size)
        # Other arrays of one number a token exclude steps of several tiles.
        return ref[:, tokens] if name in ("lse", "delta") else ref[tokens]

    def at(self):
        """Returns indices and positions of the tile."""
        index = []
        for axis, tile in ((0, self.n), (1, self.m)):
            size, down = self.plan.tile[axis], axis == int(not self.upright)
            shape = (size, 1) if down else (1, size)
            index.append(tile * size + lax.broadcasted_iota(jnp.int32, shape, 0 if down else 1))
        i, j = self.block("query_positions"), self.block("key_positions")
        i = self.offset + index[0] if i is None else i
        return At(self.b, self.h, i, index[1] if j is None else j, index[1])

    def load(self, table, at):
        """Loads entries of a table; an array `at` costs one comparison per table entry."""
        ref = self.blocks[f"table{table}"]
        if jnp.ndim(at) == 0:
            return ref[at]

        def choose(entry, found):
            return jnp.where(at == entry, ref[entry], found)

        start = jnp.zeros(at.shape, ref.dtype)
        return lax.fori_loop(0, ref.shape[0], choose, start)

    def logits(self, at, products, masked):
        """Returns the masked logits, and the pull-back from logits to products."""
        plan, values = self.plan, []
        if plan.score is not None:
            reads = block_tiles.lookups(plan, "score", self.load, products, at.b, at.h, at.i, at.j)
            values = [value for *_, value in reads]
        bias = self.block("bias")

        def scores(products):
            return block_tiles.scores(plan, at, products, bias, self.scale, values)

        logits, pull_back = jax.vjp(scores, products)
        mask = self.block("mask")
        mask = None if mask is None else mask.astype(jnp.int32)
        ids = self.block("query_ids"), self.block("key_ids")
        allowed = block_tiles.allowed(plan, at, *ids, mask, self.load, whole=not masked)
        return block_tiles.masked(logits, allowed), pull_back

    def visit(self, step):
        """Runs `step(tile, masked)` for each tile that this step visits."""
        parts = self.step.parts
        if parts is None:
            for masked in (True, False):
                here = self.step.masked if masked else ~self.step.masked
                pl.when(self.step.visited & here)(functools.partial(step, self, masked))
            return

        def of_part(part, masked):
            tile, other = copy.copy(self), "n" if self.of_keys else "m"
            tile.part = part
            setattr(tile, other, getattr(self, other) * self.at_once + part)
            step(tile, masked)

        count, masked_part = parts.masked
        lax.fori_loop(parts.first, parts.stop, lambda part, _: of_part(part, False), None)
        lax.fori_loop(0, count, lambda rank, _: of_part(masked_part(rank), True), None)


def _unpack(plan, scalars, names, grid, refs, *, of_keys, upright=False):
    blocks = dict(zip(names, refs[scalars:], strict=False))
    tile = _Tile(plan, refs[:scalars], blocks, grid, of_keys=of_keys, upright=upright)
    return tile, refs[scalars + len(names) :]


def _forward_kernel(plan, scalars, names, grid, *refs):
    tile, results = _unpack(plan, scalars, names, grid, refs, of_keys=False)
    out, lse, lse_error, *sums = results

    @pl.when(tile.step.first)
    def _():
        start = SoftmaxOfColumns.of_tile(*sums[2].shape[::-1])
        for ref, value in zip(sums, start, strict=True):
            ref[...] = value

    @tile.visit
    def _(tile, masked):
        at = tile.at()
        logits, _ = tile.logits(at, tile.products("query", "key"), masked)

        def mix(weights):
            value = tile.block("value")
            weights = block_tiles.dropped(plan, at, weights, tile.load)
            return tile.dot(value, weights.astype(value.dtype), (0, 0))

        before = SoftmaxOfColumns(*(ref[...] for ref in sums))
        for ref, value in zip(sums, before.seeing(logits, mix), strict=True):
            ref[...] = value

    @pl.when(tile.step.last)
    def _():
        output, *of_rows = SoftmaxOfColumns(*(ref[...] for ref in sums)).finish()
        out[...] = output.T.astype(out.dtype)
        for ref, value in zip((lse, lse_error), of_rows, strict=True):
            ref[...] = value


def _gradients(tile, at, masked, rows):
    """Returns the weights after dropout and the gradient of the products, from lse and delta."""
    products, d_weights = tile.products("query", "key"), tile.products("d_out", "value")
    logits, pull_back = tile.logits(at, products, masked)
    weights, d_logits = block_tiles.gradients(tile.plan, at, logits, rows, d_weights, tile.load)
    return weights, pull_back(d_logits)[0]


def _query_kernel(plan, scalars, names, grid, *refs):
    tile, refs = _unpack(plan, scalars, names, grid, refs, of_keys=False, upright=True)
    d_query, total, *columns = refs

    @pl.when(tile.step.first)
    def _():
        total[...] = jnp.zeros_like(total)
        for name, column in zip(("lse", "delta"), columns, strict=True):
            column[...] = jnp.broadcast_to(tile.block(name), column.shape[::-1]).T

    @tile.visit
    def _(tile, masked):
        # Columns of equal numbers: a register has 128 of them.
        rows = [jnp.broadcast_to(column[:, :1], plan.tile) for column in columns]
        _, d_products = _gradients(tile, tile.at(), masked, rows)
        key = tile.block("key")
        total[...] += tile.dot(d_products.astype(key.dtype), key, (1, 0))

    @pl.when(tile.step.last)
    def _():
        d_query[...] = total[...].astype(d_query.dtype)


def _key_kernel(plan, scalars, names, grid, *refs):
    tile, results = _unpack(plan, scalars, names, grid, refs, of_keys=True)
    d_key, d_value, of_key, of_value = results

    @pl.when(tile.step.first)
    def _():
        of_key[...], of_value[...] = jnp.zeros_like(of_key), jnp.zeros_like(of_value)

    @tile.visit
    def _(tile, masked):
        rows = tile.block("lse"), tile.block("delta")
        weights, d_products = _gradients(tile, tile.at(), masked, rows)
        query, d_out = tile.block("query"), tile.block("d_out")
        of_key[...] += tile.dot(d_products.astype(query.dtype), query, (1, 0))
        of_value[...] += tile.dot(weights.astype(d_out.dtype), d_out, (1, 0))

    @pl.when(tile.step.last)
    def _():
        d_key[...], d_value[...] = (
            of_key[...].astype(d_key.dtype),
            of_value[...].astype(d_value.dtype),
        )
