"""Block attention in the Triton language: plans and calls of `block_kernels`."""

from typing import Any

import jax
import jax.numpy as jnp

from effattn import dispatch
from effattn.interfaces.block_attention import Attended, Config, Inputs, output_dtype
from effattn.pallas import block_tiles, partition, visited_tiles
from effattn.triton import elementwise, launch
from effattn.triton.block_plan import Operands, is_per_example, plan_of

LIMITS = dispatch.Limits(
    ("float32", "bfloat16", "float16"),
    256,
    "Ampere or later; jax-triton; tiles of multiples of 16",
)

# (queries of a tile, keys of a tile, warps) for each kernel, by (bytes of an input, larger head
# size, rounded up). With these tiles every kernel fits in the shared memory of its GPU.
TILES = {
    (2, 64): {"forward": (128, 64, 8), "query": (128, 64, 8), "key": (32, 64, 4)},
    (2, 128): {"forward": (128, 64, 8), "query": (128, 32, 8), "key": (32, 64, 8)},
    (2, 256): {"forward": (64, 32, 8), "query": (32, 32, 8), "key": (32, 32, 8)},
    (4, 64): {"forward": (128, 32, 8), "query": (32, 32, 4), "key": (32, 32, 4)},
    (4, 128): {"forward": (32, 32, 4), "query": (32, 32, 8), "key": (16, 32, 8)},
    (4, 256): {"forward": (16, 16, 4), "query": (16, 16, 8), "key": (16, 16, 8)},
}


def refusal(config: Config, x: Inputs) -> str | None:
    """Returns the reason why these kernels cannot take these operands, or None."""
    if reason := block_tiles.refusal(LIMITS, config, x, any_pattern=True):
        return reason
    given = config.tile if x.layout is None else x.layout.tile
    if given is not None and any(side % launch.MIN_SIDE for side in given):
        return f"takes tiles of multiples of {launch.MIN_SIDE} queries and keys, got {given}"
    (t, _), (d_t, _), (_, s) = (_tile(name, config, x)[0] for name in ("forward", "query", "key"))
    if reason := visited_tiles.refusal_of_grid(x, min(t, d_t), s):
        return reason
    programs = block_tiles.programs_of(config, x, jnp.float32)
    for program in programs.values():
        if program is not None and (reason := elementwise.refusal(program)):
            return f"cannot write a function of pairs, which {reason}"
    return launch.refusal()


@partition.forward
def forward(config: Config, x: Inputs, exact: bool) -> Attended:
    """Returns the output, its rounding error if `exact`, and the log-sum-exp."""
    call = _Call(config, x, "forward")
    plan = call.plan
    of_rows = (plan.queries, plan.heads), jnp.float32
    of_out = (plan.queries, plan.heads, plan.value_size), output_dtype(x, exact)
    out, *sums = call.run("forward", (plan.heads, plan.query_tiles), (), [of_out, of_rows, of_rows])
    lse, lse_error = (array.reshape(x.query.shape[:-1]) for array in sums)
    return Attended.of(x, out.reshape(*x.query.shape[:-1], plan.value_size), lse, lse_error)


@partition.backward
def backward(
    config: Config, x: Inputs, lse: jax.Array, d_out: jax.Array, delta: jax.Array
) -> Inputs:
    """Returns the gradients of the inputs; see `effattn.pallas.triton.block_attention.backward`."""
    # A finite log-sum-exp for rows without keys, whose weights exp(-inf - lse) are then 0, not NaN.
    rows = [jnp.where(lse == -jnp.inf, 0, lse), d_out, delta]
    rows = [array.reshape(-1, *array.shape[x.query.ndim - 3 :]) for array in rows]
    of_queries = call = _Call(config, x, "query")
    plan = call.plan
    by_entry = plan.query_tiles, plan.heads, plan.entries
    results = [
        ((plan.queries, plan.heads, plan.size), x.query.dtype),
        ((plan.queries, plan.heads) if plan.scale is None else (1,), jnp.float32),
        (by_entry if plan.add_reads is not None else (1,), jnp.float32),
    ]
    grid = plan.heads, plan.query_tiles
    d_query, d_scale, d_numbers = call.run("d_query", grid, rows, results)
    call = _Call(config, x, "key")
    plan = call.plan
    of_key = (plan.keys, plan.key_heads, plan.size), x.key.dtype
    of_value = (plan.keys, plan.key_heads, plan.value_size), x.value.dtype
    grid = plan.key_heads, plan.key_tiles
    d_key, d_value = call.run("d_key_value", grid, rows, [of_key, of_value])
    return Inputs(
        query=d_query.reshape(x.query.shape),
        key=d_key.reshape(x.key.shape),
        value=d_value.reshape(x.value.shape),
        bias=None if x.bias is None else _bias_gradient(config, x, rows),
        scale=None if x.scale is None else d_scale.sum().astype(x.scale.dtype),
        constants=_of_constants(x, of_queries, d_numbers),
    )


def _of_constants(x, call, d_numbers):
    """Gradients of the arrays that the score_mod closes over, from the sums of all programs."""

    def of_constant(number, constant):
        if not jnp.issubdtype(constant.dtype, jnp.floating):
            return None
        _, first = call.places[call.arranged.table_of_constant(number)]
        total = d_numbers.sum((0, 1, 2))[first : first + constant.size]
        return total.reshape(constant.shape).astype(constant.dtype)

    return tuple(of_constant(*each) for each in enumerate(x.constants))


def _bias_gradient(config, x, rows) -> jax.Array:
    """Gradient of the bias, in its shape and dtype, summed over the axes it is broadcast along."""
    call = _Call(config, x, "query", of_all=True)
    plan, shape = call.plan, call.bias_sizes
    grid = shape[0] * plan.bias_query_tiles * plan.bias_key_tiles, shape[1]
    kinds = rows[0] if x.layout is None else visited_tiles.kinds_of(x.layout)
    operands = [launch.Shared(array) for array in (kinds, *rows)]
    (gradient,) = call.run("d_bias", grid, operands, [(shape, jnp.float32)])
    return block_tiles.of_bias(gradient, x)


def tilings(config: Config, x: Inputs) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Returns no candidates: nothing tunes these kernels yet."""
    return dict.fromkeys(TILES[2, 64], ())


def _tile(kernel: str, config: Config, x: Inputs) -> tuple[tuple[int, int], int]:
    """Returns the tile `(t, s)`, no larger than the lengths, and the number of warps per tile."""
    widest = max(launch.power_of_2(array.shape[-1]) for array in (x.query, x.value))
    *sides, warps = TILES[x.query.dtype.itemsize, max(64, widest)][kernel]
    return block_tiles.fitted(sides, config, x, launch.MIN_SIDE), warps


class _Call:
    """Plan and operands of one kernel; `of_all` says that its programs read all examples."""

    def __init__(self, config: Config, x: Inputs, kernel: str, *, of_all: bool = False):
        tile, self._warps = _tile(kernel, config, x)
        self.arranged, arrays = block_tiles.arrange(config, x, tile)
        of_keys = kernel == "key"
        walk, order = visited_tiles.walk_and_order(self.arranged, arrays, x, of_keys=of_keys)
        tables = elementwise.tables_of(arrays.tables)
        self.places = tables.places
        batch = arrays.query.shape[0]
        self._interpreted = bool(config.implementations.interpreted)
        self.plan = plan_of(self.arranged, arrays, walk, tables, of_keys=of_keys, of_all=of_all)
        self.bias_sizes: Any = None if arrays.bias is None else arrays.bias.shape

        def operand(array, *, is_large=False):
            if array is None:
                return operand(arrays.query)
            is_shared = of_all or not is_per_example(array, batch, is_large=is_large)
            return launch.Shared(array) if is_shared else array

        def of_walk(place):
            array = walk[place] if place < len(walk) else None
            return operand(array, is_large=x.layout is not None)

        self._operands = Operands(
            query=operand(arrays.query),
            key=operand(arrays.key),
            value=operand(arrays.value),
            bias=operand(arrays.bias, is_large=True),
            mask=operand(arrays.mask, is_large=True),
            scale=operand(None) if arrays.scale is None else launch.Shared(arrays.scale),
            offset=operand(arrays.offset),
            query_positions=operand(arrays.query_positions),
            key_positions=operand(arrays.key_positions),
            query_ids=operand(arrays.query_ids),
            key_ids=operand(arrays.key_ids),
            integers=launch.Shared(tables.integers),
            numbers=launch.Shared(tables.numbers),
            partial_counts=of_walk(0),
            full_counts=of_walk(1),
            partial_tiles=of_walk(2),
            full_tiles=of_walk(3),
            order=operand(order, is_large=x.layout is not None),
        )

    def run(self, name, grid, rows, results):
        from effattn.triton import block_kernels  # Triton is an optional package

        kernel = getattr(block_kernels, name)
        options: Any = {"warps": self._warps, "stages": 2, "interpreted": self._interpreted}
        operands = tuple(self._operands), *rows
        return launch.call(kernel, self.plan, grid, operands, results, **options)
