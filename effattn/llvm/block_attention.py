"""Block attention for CPUs, in float32: what JAX sees of the kernels of `block_kernels`."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from effattn import dispatch
from effattn.cores import block_attention
from effattn.cores.block_attention import Operands, Rule
from effattn.llvm import compiled
from effattn.xla import block_attention as by_xla
from effattn.xla import mesh_axes, tiling

LIMITS = dispatch.Limits(
    ("float32",),
    others="llvmlite; causality, windows, lengths and documents alone; numbers as offset and scale",
)


def refusal(rule: Rule, x: Operands) -> str | None:
    """Why it does not take these operands, if so."""
    for array in (x.query, x.key, x.value):
        if reason := LIMITS.refusal(array.dtype):
            return reason
    arrays = "additive", "bias", "mask", "positions", "layout"
    options = "activation", "soft_cap", "score_mod", "pattern", "tile"
    given = [name for name in arrays if getattr(x, name) is not None]
    given += [name for name in options if getattr(rule, name) is not None]
    given += ["dropout"] if rule.dropout_rate else []
    given += ["a traced scale"] if rule.scale is None else []
    given += ["a traced query_offset"] if rule.offset is None else []
    if given:
        return f"does not take {' and '.join(given)}"
    return compiled.refusal()


def tilings(rule: Rule, x: Operands) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Its tiles have one size."""
    return {}


def forward(rule: Rule, x: Operands, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The output in the dtype given, the log-sum-exp, and what rounding took from it."""
    out, lse, lost = _run("forward", rule, x)
    return out.astype(dtype), lse, lost


def backward(
    rule: Rule, x: Operands, lse: jax.Array, d_out: jax.Array, shared: jax.Array
) -> Operands:
    """The gradients, from that of the output and `shared` `(*B, T, N)`, dO . O - dL."""
    d_query, d_key, d_value = _run("backward", rule, x, lse, d_out, shared)
    return Operands(query=d_query, key=d_key, value=d_value)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run(direction: str, rule: Rule, x: Operands, *rows: jax.Array) -> tuple[jax.Array, ...]:
    query_ids, key_ids = block_attention.ids(x)
    if key_ids is not None and query_ids is None:
        query_ids = jnp.ones(x.query.shape[:-2], jnp.int32)
    ids = () if key_ids is None else (query_ids, key_ids)
    operands = mesh_axes.vary_alike((x.query, x.key, x.value, *ids, *rows))
    results = _attention.bind(*operands, direction=direction, rule=rule)
    return tuple(mesh_axes.vary_like(operands[0], result) for result in results)


@_run.defjvp
def _run_jvp(direction, rule, primals, tangents):
    """Derivatives in forward mode, of gradients, are XLA's."""

    def form(x, *rows):
        if direction == "forward":
            return by_xla.forward(rule, x, jnp.float32)
        found = by_xla.backward(rule, x, *rows)
        return found.query, found.key, found.value

    return jax.jvp(form, primals, tangents)


# The primitive: (query, key, value[, query_ids, key_ids][, lse, d_out, shared]) to (out, lse, lost)
# or (d_query, d_key, d_value). When a program is lowered to run here it becomes a kernel; one that
# is exported, to be run who knows where, has XLA's form.
_attention = Primitive("effattn_block_attention")
_attention.multiple_results = True

_ROWS = {"forward": 0, "backward": 3}


def _split(direction: str, arrays: Any) -> tuple[Operands, Any]:
    """The operands, and the rows of the backward."""
    count = len(arrays) - _ROWS[direction]
    (query, key, value, *ids), rows = arrays[:count], arrays[count:]
    return Operands(query, key, value, segments=tuple(ids) or None), rows


@_attention.def_abstract_eval
def _shapes(*arrays, direction, rule):
    x, _ = _split(direction, arrays)
    shapes = [x.query.shape, x.key.shape, x.value.shape]
    if direction == "forward":
        rows = x.query.shape[:-1]
        shapes = [(*rows, x.value.shape[-1]), rows, rows]
    return [jax.core.ShapedArray(shape, jnp.float32) for shape in shapes]


def _by_xla(*arrays, direction, rule):
    x, rows = _split(direction, arrays)
    if direction == "forward":
        return by_xla.forward(rule, x, jnp.float32)
    found = by_xla.backward(rule, x, *rows)
    return found.query, found.key, found.value


def _by_kernel(*arrays, direction, rule):
    x, rows = _split(direction, arrays)
    none = (jnp.zeros(0, jnp.int32),) * 2
    operands = (x.query, x.key, x.value, *(x.segments or none))
    run = functools.partial(_call, rule, x)
    if direction == "forward":
        out_shape = (*x.query.shape[:-1], x.value.shape[-1])
        of_rows = x.query.shape[:-1]
        out, largest, total = run("forward", [out_shape, of_rows, of_rows], operands)
        log_total = jnp.log(jnp.where(total == 0, 1, total))
        lse = largest + log_total
        return out, jnp.where(total == 0, -jnp.inf, lse), log_total - (lse - largest)
    lse, d_out, shared = rows
    lse = jnp.where(lse == -jnp.inf, 0, lse)  # of rows that see nothing
    splits = _splits(x)
    shapes = [x.query.shape, (splits, *x.key.shape), (splits, *x.value.shape)]
    d_query, d_key, d_value = run("backward", shapes, (*operands, lse, d_out, shared), splits)
    return d_query, d_key.sum(0), d_value.sum(0)


def _call(rule, x, direction, shapes, operands, splits=1):
    from effattn.llvm import block_kernels  # where llvmlite is not, XLA is

    name = f"effattn_block_attention_{direction}"
    write = getattr(block_kernels, f"write_{direction}")
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    limits = {
        "left": block_kernels.UNLIMITED if rule.left is None else rule.left,
        "right": block_kernels.UNLIMITED if rule.right is None else rule.right,
        "offset": rule.offset,
        "has_ids": x.segments is not None,
        "splits": splits,
    }
    limits = np.array([limits[each] for each in block_kernels.LIMITS], np.int64)
    call = jax.ffi.ffi_call(compiled.handler(name, write), results)
    return call(*operands, limits=limits, scale=np.float32(rule.scale))


def _splits(x: Operands) -> int:
    """How many tasks share a key head, so that each thread has one; their gradients are added."""
    from effattn.llvm.tiles import TILE

    heads = tiling.known_product(x.key.shape[:-3]) * x.key.shape[-2]
    tiles = -(-x.query.shape[-3] // TILE)
    return max(1, min(-(-threads() // heads), tiles))


@functools.cache
def threads() -> int:
    """As many as XLA has: one for each processor that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # on Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _lowering_here(context, *arrays, **parameters):
    exported = context.module_context.lowering_parameters.for_export
    lowering = _lowering_by_xla if exported else mlir.lower_fun(_by_kernel, multiple_results=True)
    return lowering(context, *arrays, **parameters)


def _batched(arrays, axes, *, direction, rule):
    (size,) = {
        array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None
    }
    mapped = [
        jnp.broadcast_to(array, (size, *array.shape))
        if axis is None
        else jnp.moveaxis(array, axis, 0)
        for array, axis in zip(arrays, axes, strict=True)
    ]
    results = _attention.bind(*mapped, direction=direction, rule=rule)
    return results, (0,) * len(results)


_attention.def_impl(_by_kernel)
_lowering_by_xla = mlir.lower_fun(_by_xla, multiple_results=True)
mlir.register_lowering(_attention, _lowering_by_xla)
mlir.register_lowering(_attention, _lowering_here, platform="cpu")
batching.primitive_batchers[_attention] = _batched
