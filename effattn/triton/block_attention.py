"""Block attention in the Triton language: plans and calls of `block_kernels`."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from effattn import dispatch
from effattn.interfaces.block_attention import Config, Inputs
from effattn.pallas import block_tiles, partition
from effattn.patterns.layouts import BlockLayout
from effattn.triton import elementwise, launch

LIMITS = dispatch.Limits(
    ("float32", "bfloat16", "float16"),
    256,
    "Ampere or later; jax-triton; tiles of multiples of 16",
)
LEAST = 16  # smallest side of a product on tensor cores

# (queries of a tile, keys of a tile, warps) for each kernel, by (bytes of a number, width of the
# larger head size). All fit in 99 KB of shared memory.
TILES = {
    (2, 64): {"forward": (128, 64, 4), "query": (128, 64, 8), "key": (64, 64, 4)},
    (2, 128): {"forward": (128, 64, 8), "query": (128, 32, 8), "key": (64, 64, 8)},
    (2, 256): {"forward": (64, 32, 8), "query": (32, 32, 8), "key": (32, 32, 8)},
    (4, 64): {"forward": (128, 32, 8), "query": (32, 32, 4), "key": (32, 32, 4)},
    (4, 128): {"forward": (32, 32, 4), "query": (32, 32, 8), "key": (32, 32, 8)},
    (4, 256): {"forward": (16, 16, 4), "query": (16, 16, 4), "key": (16, 16, 4)},
}


class Operands(NamedTuple):
    """Operands of the kernels, as in `effattn.pallas.block_tiles.Arrays`.

    A kernel never reads an absent operand; another array takes its place. The lists of visited
    tiles are `walk_a` to `walk_d`, and `integers` and `numbers` are the tables of the programs.
    """

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    scale: Any
    offset: Any
    query_positions: Any
    key_positions: Any
    query_ids: Any
    key_ids: Any
    integers: Any
    numbers: Any
    walk_a: Any
    walk_b: Any
    walk_c: Any
    walk_d: Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and rules of the kernels.

    Attributes:
      queries, keys, heads, key_heads, size, value_size: T, S, N, K, H and Hv.
      t, s: queries and keys of a tile.
      scale, soft_cap, left, right, rate: of the configuration; `rate` is that of dropout, and
        `scale` is None if it is an array.
      precision: of products: "tf32", or "tf32x3" for full float32.
      offset_by_example, has_query_positions, has_key_positions, has_query_ids, has_key_ids,
        has_bias, has_mask: which operands are present.
      bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j: strides of bias and mask; 0
        along axes over which they are broadcast.
      has_layout: whether a block-sparse layout lists the visited tiles.
      walk_by_example, walk_by_head, walk_heads, walk_rows: axes of these lists.
      layout_rows, layout_columns: tiles of the kernel in a tile of the layout, along the axis of
        the program's own tile and along the axis of the walk.
      partial_columns, full_columns: lengths of the lists of a layout.
      score, d_score, add_reads, pattern, keep: functions in the Triton language, or None.
      entries: length of the sums that `add_reads` adds to.
      batch: number of examples, for the gradient of the bias; 0 in other kernels.
    """

    queries: int
    keys: int
    heads: int
    key_heads: int
    size: int
    value_size: int
    t: int
    s: int
    scale: float | None
    soft_cap: float | None
    left: int | None
    right: int | None
    rate: float
    precision: str
    offset_by_example: bool
    has_query_positions: bool
    has_key_positions: bool
    has_query_ids: bool
    has_key_ids: bool
    has_bias: bool
    has_mask: bool
    bias_b: int
    bias_h: int
    bias_i: int
    bias_j: int
    mask_b: int
    mask_h: int
    mask_i: int
    mask_j: int
    has_layout: bool
    walk_by_example: bool
    walk_by_head: bool
    walk_heads: int
    walk_rows: int
    layout_rows: int
    layout_columns: int
    partial_columns: int
    full_columns: int
    score: Any
    d_score: Any
    add_reads: Any
    pattern: Any
    keep: Any
    entries: int
    batch: int

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.key_heads

    @property
    def query_tiles(self) -> int:
        """Number of tiles of queries."""
        return -(-self.queries // self.t)

    @property
    def key_tiles(self) -> int:
        """Number of tiles of keys."""
        return -(-self.keys // self.s)

    @property
    def width(self) -> int:
        """Features of a tile, a power of two."""
        return max(LEAST, launch.power_of_2(self.size))

    @property
    def value_width(self) -> int:
        """Values of a tile, a power of two."""
        return max(LEAST, launch.power_of_2(self.value_size))

    @property
    def steps_m(self) -> int:
        """Number of key tiles over which the gradient of the bias is summed."""
        return 1 if self.bias_j else self.key_tiles

    @property
    def steps_n(self) -> int:
        """Number of query tiles over which it is summed."""
        return 1 if self.bias_i else self.query_tiles

    @property
    def steps_h(self) -> int:
        """Number of heads over which it is summed."""
        return 1 if self.bias_h else self.heads

    @property
    def bias_steps(self) -> int:
        """Number of tiles that a program of the gradient of the bias sums."""
        examples = 1 if self.bias_b else self.batch
        return self.steps_m * self.steps_n * self.steps_h * examples

    @property
    def bias_key_tiles(self) -> int:
        """Number of key tiles of the bias."""
        return self.key_tiles if self.bias_j else 1

    @property
    def kind_columns(self) -> int:
        """Number of tiles in a row of a layout."""
        return -(-self.key_tiles // self.layout_columns)

    @property
    def masks_whole(self) -> bool:
        """True if whole tiles need all masks but the element rule of the pattern."""
        return self.has_layout


def refusal(config: Config, x: Inputs) -> str | None:
    """Returns the reason why these kernels cannot take these operands, or None."""
    if reason := block_tiles.refusal(LIMITS, config, x, any_pattern=True):
        return reason
    given = config.tile if x.layout is None else x.layout.tile
    if given is not None and any(side % LEAST for side in given):
        return f"takes tiles of multiples of {LEAST} queries and keys, got {given}"
    programs = block_tiles.programs_of(config, x, jnp.float32)
    for program in programs.values():
        if program is not None and (reason := elementwise.refusal(program)):
            return f"cannot write a function of pairs, which {reason}"
    return launch.refusal()


@partition.forward
def forward(config: Config, x: Inputs, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the output in `dtype`, the log-sum-exp and the rounding error of the log-sum-exp."""
    call = _Call(config, x, "forward")
    plan = call.plan
    of_rows = (plan.queries, plan.heads), jnp.float32
    results = [((plan.queries, plan.heads, plan.value_size), dtype), of_rows, of_rows]
    out, *sums = call.run("forward", (plan.query_tiles, plan.heads), (), results)
    lse, lse_error = (array.reshape(x.query.shape[:-1]) for array in sums)
    return out.reshape(*x.query.shape[:-1], plan.value_size), lse, lse_error


@partition.backward
def backward(
    config: Config, x: Inputs, lse: jax.Array, d_out: jax.Array, delta: jax.Array
) -> Inputs:
    """Returns the gradients of the inputs; see `effattn.pallas.triton.block_attention.backward`."""
    # A finite log-sum-exp for rows without keys: all logits of these rows are -inf.
    rows = [jnp.where(lse == -jnp.inf, 0, lse), d_out, delta]
    rows = [array.reshape(-1, *array.shape[x.query.ndim - 3 :]) for array in rows]
    call = _Call(config, x, "query")
    plan = call.plan
    by_entry = plan.query_tiles, plan.heads, plan.entries
    results = [
        ((plan.queries, plan.heads, plan.size), x.query.dtype),
        ((plan.queries, plan.heads) if plan.scale is None else (1,), jnp.float32),
        (by_entry if plan.add_reads is not None else (1,), jnp.float32),
    ]
    grid = plan.query_tiles, plan.heads
    d_query, d_scale, d_numbers = call.run("d_query", grid, rows, results)
    call = _Call(config, x, "key")
    plan = call.plan
    of_key = (plan.keys, plan.key_heads, plan.size), x.key.dtype
    of_value = (plan.keys, plan.key_heads, plan.value_size), x.value.dtype
    grid = plan.key_tiles, plan.key_heads
    d_key, d_value = call.run("d_key_value", grid, rows, [of_key, of_value])
    return Inputs(
        query=d_query.reshape(x.query.shape),
        key=d_key.reshape(x.key.shape),
        value=d_value.reshape(x.value.shape),
        bias=None if x.bias is None else _bias_gradient(config, x, rows),
        scale=None if x.scale is None else d_scale.sum().astype(x.scale.dtype),
        constants=_of_constants(config, x, d_numbers),
    )


def _of_constants(config, x, d_numbers):
    """Gradients of the arrays that the score_mod closes over, from the sums of all programs."""
    arranged, arrays = block_tiles.arrange(config, x, (LEAST, LEAST))
    places = elementwise.tables_of(arrays.tables).places

    def of_constant(number, constant):
        if not jnp.issubdtype(constant.dtype, jnp.floating):
            return None
        _, first = places[arranged.table_of_constant(number)]
        total = d_numbers.sum((0, 1, 2))[first : first + constant.size]
        return total.reshape(constant.shape).astype(constant.dtype)

    return tuple(of_constant(*each) for each in enumerate(x.constants))


def _bias_gradient(config, x, rows) -> jax.Array:
    """The gradient in the shape and dtype of the bias, which a program sums over all examples."""
    call = _Call(config, x, "query", of_all=True)
    plan, shape = call.plan, call.bias_sizes
    query_tiles = plan.query_tiles if plan.bias_i else 1
    grid = query_tiles * plan.bias_key_tiles, shape[1], shape[0]
    kinds = rows[0] if x.layout is None else _kinds(x.layout)
    operands = [launch.Shared(array) for array in (kinds, *rows)]
    (gradient,) = call.run("d_bias", grid, operands, [(shape, jnp.float32)])
    return gradient.reshape(x.bias.shape).astype(x.bias.dtype)


def _kinds(layout: BlockLayout) -> jax.Array:
    """Returns int32 `(B or 1, K or 1, nq, nk)`: 0 for skipped, 1 for partial, 2 for full tiles."""
    visited, full = (jnp.asarray(layout.block_mask(kind)) for kind in (None, "full"))
    kinds = visited.astype(jnp.int32) + full
    *batch, heads = kinds.shape[:-2] or (1,)
    return kinds.reshape(-1 if batch else 1, heads, *kinds.shape[-2:])


def tilings(config: Config, x: Inputs) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Returns no candidates: nothing tunes these kernels yet."""
    return dict.fromkeys(TILES[2, 64], ())


def _tile(kernel: str, config: Config, x: Inputs) -> tuple[tuple[int, int], int]:
    """Returns the tile `(t, s)`, no larger than the lengths, and the number of warps per tile."""
    widest = max(launch.power_of_2(array.shape[-1]) for array in (x.query, x.value))
    *sides, warps = TILES[x.query.dtype.itemsize, max(64, widest)][kernel]
    given = config.tile if x.layout is None else x.layout.tile
    # Halve each side until it divides the given tile, or else the rounded length.
    sizes = given or [launch.power_of_2(n) for n in (x.query.shape[-3], x.key.shape[-3])]
    tile = []
    for side, size in zip(sides, sizes, strict=True):
        while side > LEAST and size % side:
            side //= 2
        tile.append(side)
    return (tile[0], tile[1]), warps


class _Call:
    """Plan and operands of one kernel; `of_all` says that its programs sum over all examples."""

    def __init__(self, config: Config, x: Inputs, kernel: str, *, of_all: bool = False):
        tile, self._warps = _tile(kernel, config, x)
        arranged, arrays = block_tiles.arrange(config, x, tile)
        of_keys = kernel == "key"
        walk = block_tiles.walk_arrays(arranged, arrays, x, of_keys=of_keys)
        tables = elementwise.tables_of(arrays.tables)
        batch = arrays.query.shape[0]
        self._interpreted = bool(config.implementations.interpreted)
        self.plan = _plan(arranged, arrays, walk, tables, of_keys, batch if of_all else 0)
        self.bias_sizes: Any = None if arrays.bias is None else arrays.bias.shape

        def whole(array, *, is_large=False):
            """Arrays without examples are shared; small ones are repeated under `vmap`."""
            if array is None:
                array = arrays.query
            is_shared = of_all or array.shape[0] != batch or (batch == 1 and is_large)
            return launch.Shared(array) if is_shared else array

        self._operands = Operands(
            query=whole(arrays.query),
            key=whole(arrays.key),
            value=whole(arrays.value),
            scale=launch.Shared(arrays.query if arrays.scale is None else arrays.scale),
            bias=whole(arrays.bias, is_large=True),
            mask=whole(arrays.mask, is_large=True),
            offset=whole(arrays.offset),
            query_positions=whole(arrays.query_positions),
            key_positions=whole(arrays.key_positions),
            query_ids=whole(arrays.query_ids),
            key_ids=whole(arrays.key_ids),
            integers=launch.Shared(tables.integers),
            numbers=launch.Shared(tables.numbers),
            **{
                name: whole(walk[place] if place < len(walk) else None, is_large=True)
                for place, name in enumerate(("walk_a", "walk_b", "walk_c", "walk_d"))
            },
        )

    def run(self, name, grid, rows, results):
        from effattn.triton import block_kernels  # Triton is an optional package

        kernel = getattr(block_kernels, name)
        options: Any = {"warps": self._warps, "stages": 2, "interpreted": self._interpreted}
        operands = self._operands, *rows
        return launch.call(kernel, self.plan, grid, operands, results, **options)


def _plan(arranged, arrays, walk, tables, of_keys, batch) -> Plan:
    config, layout = arranged.config, arranged.layout_tile
    rows, columns = 1, 1
    if layout is not None:
        rows, columns = (a // b for a, b in zip(layout, arranged.tile, strict=True))
        rows, columns = (columns, rows) if of_keys else (rows, columns)
    lists = walk[0].shape
    functions = _functions(arranged, tables)
    return Plan(
        queries=arranged.lengths[0],
        keys=arranged.lengths[1],
        heads=arranged.heads[0],
        key_heads=arranged.heads[1],
        size=arranged.sizes[0],
        value_size=arranged.sizes[1],
        t=arranged.tile[0],
        s=arranged.tile[1],
        scale=None if arrays.scale is not None else float(config.scale),
        soft_cap=config.soft_cap,
        left=config.left,
        right=config.right,
        rate=float(config.dropout_rate or 0),
        precision=launch.precision(arrays.query.dtype, config.precision),
        offset_by_example=arrays.offset.shape[0] > 1,
        has_query_positions=arrays.query_positions is not None,
        has_key_positions=arrays.key_positions is not None,
        has_query_ids=arrays.query_ids is not None,
        has_key_ids=arrays.key_ids is not None,
        has_bias=arrays.bias is not None,
        has_mask=arrays.mask is not None,
        **_strides("bias", arrays.bias),
        **_strides("mask", arrays.mask),
        has_layout=layout is not None,
        walk_by_example=lists[0] > 1,
        walk_by_head=lists[1] > 1,
        walk_heads=lists[1],
        walk_rows=lists[2],
        layout_rows=rows,
        layout_columns=columns,
        partial_columns=walk[2].shape[-1] if layout is not None else 0,
        full_columns=walk[3].shape[-1] if layout is not None else 0,
        **functions,
        entries=launch.power_of_2(tables.numbers.size),
        batch=batch,
    )


def _strides(name, array):
    sizes = (1, 1, 1, 1) if array is None else array.shape
    found, stride = {}, 1
    for axis, size in zip("jihb", reversed(sizes), strict=True):
        found[f"{name}_{axis}"] = stride if size > 1 else 0
        stride *= size
    return found


def _functions(arranged, tables):
    """The functions of pairs in the Triton language."""
    found = dict.fromkeys(("score", "d_score", "add_reads", "pattern", "keep"))
    for name, program in arranged.programs.items():
        first = arranged.first_table[name]
        places = tables.places[first : first + len(program.tables)]
        found[name] = elementwise.function(name, program, places)
        if name == "score":
            found["d_score"] = elementwise.function("d_score", program, places, derivative=True)
            if arranged.summed:
                found["add_reads"] = elementwise.function_of_reads(program, places)
    return found
