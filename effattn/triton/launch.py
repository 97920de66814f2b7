"""Calls of Triton kernels from JAX: by jax-triton on a GPU, or interpreted."""

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching, mlir

from effattn import dispatch
from effattn.arrays import mesh_axes
from effattn.dispatch import device, partition


def refusal() -> str | None:
    """The reason why this machine cannot run or lower Triton kernels, or None.

    While `effattn.support` records calls, a missing package is no reason.
    """
    needed = "triton" if dispatch.is_interpreted() else "jax_triton"
    if importlib.util.find_spec(needed) is None and dispatch.recorder() is None:
        name = needed.replace("_", "-")
        return f"needs the package {name}: pip install 'effattn[gpu]', from Python 3.12 on"
    if dispatch.is_interpreted() and partition.is_needed():
        return "is interpreted in programs for one device, or inside a shard_map over all mesh axes"
    return device.triton_refusal()


MIN_SIDE = 16  # smallest side of a product on tensor cores


def power_of_2(size: int) -> int:
    """Returns the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def precision(dtype: Any, asked: Any) -> str:
    """The argument `input_precision` of `tl.dot` for inputs of this dtype.

    "tf32" rounds float32 factors to TensorFloat-32. "tf32x3" is full float32: each factor is split
    into its TensorFloat-32 part and the rest, for three products.
    """
    return "tf32x3" if dtype == jnp.float32 or asked == lax.Precision.HIGHEST else "tf32"


class Shared(NamedTuple):
    """An operand that all examples read."""

    array: jax.Array


def call(
    kernel: Any,
    plan: Any,
    grid: tuple[int, ...],
    operands: Sequence[Any],
    results: Sequence[tuple[tuple[int, ...], Any]],
    *,
    warps: int,
    stages: int,
    interpreted: bool,
) -> list[jax.Array]:
    """Runs `kernel(*operands, *results, plan)` for B examples.

    Under `jax.vmap` the mapped axis becomes part of B, and the kernel runs once. If a shared
    operand is mapped, it runs once for each index of the mapped axis instead (`lax.map`).

    Args:
      kernel: function with the decorator `triton.jit`.
      plan: constant, known when the kernel is compiled. Its `repr` is a key of caches, so different
        plans need different texts.
      grid: numbers of programs along each axis for one example; B multiplies the first.
      operands: arrays `(B, ...)`, arrays that all examples share, None, or tuples of arrays.
        If all are shared, B is 1.
      results: shapes, without B, and dtypes.
      warps: number of warps of a program.
      stages: stages of the software pipeline of a loop.
      interpreted: whether the kernel is interpreted.
    """
    leaves, structure = jax.tree.flatten(tuple(operands), is_leaf=lambda x: isinstance(x, Shared))
    given = [leaf.array if isinstance(leaf, Shared) else leaf for leaf in leaves]
    given = mesh_axes.vary_alike(given)
    made = _call().bind(
        *device.aligned(given),
        kernel=kernel,
        plan=plan,
        grid=tuple(grid),
        structure=structure,
        is_shared=tuple(isinstance(leaf, Shared) for leaf in leaves),
        results=tuple((tuple(shape), jnp.dtype(dtype)) for shape, dtype in results),
        options=(warps, stages, interpreted),
        loops=(),
    )
    return [mesh_axes.vary_like(given[0], x) for x in made]


@functools.cache
def _call() -> Any:
    """The JAX primitive of `call`.

    Under `jax.vmap`, the mapped axis of its results comes first, as functions with a custom
    derivative need. A primitive also hides the call from JAX's removal of dead code, which fails
    with jax-triton 0.4 and jax 0.12.
    """
    from jax.extend.core import Primitive  # imported on first use: a slow import

    primitive = Primitive("effattn_triton_call")
    primitive.multiple_results = True
    primitive.def_impl(jax.jit(_run, static_argnames=_STATIC))
    primitive.def_abstract_eval(
        lambda *given, **static: [
            jax.core.ShapedArray(x.shape, x.dtype) for x in _types(given, **static)
        ]
    )
    batching.primitive_batchers[primitive] = _batched
    mlir.register_lowering(primitive, mlir.lower_fun(_run, multiple_results=True))
    return primitive


# Parameters of the operation: arguments of `call`, and `loops`. A loop says which operands have one
# more axis in front, over whose indices the kernel runs one after the other; outermost loop first.
_STATIC = "kernel", "plan", "grid", "structure", "is_shared", "results", "options", "loops"


def _types(given, *, is_shared, results, loops, **_):
    if loops:
        flags, *rest = loops
        size = next(x.shape[0] for x, has_axis in zip(given, flags, strict=True) if has_axis)
        inner = [
            jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if has_axis else x
            for x, has_axis in zip(given, flags, strict=True)
        ]
        each = _types(inner, is_shared=is_shared, results=results, loops=rest)
        return [jax.ShapeDtypeStruct((size, *x.shape), x.dtype) for x in each]
    batch = 1 if all(is_shared) else given[is_shared.index(False)].shape[0]
    return [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape, dtype in results]


def _run(*given, loops, **static):
    if loops:
        flags, *rest = loops

        def one(parts):
            part = iter(parts)
            both = zip(given, flags, strict=True)
            return _run(
                *(next(part) if has_axis else x for x, has_axis in both), loops=rest, **static
            )

        return lax.map(one, [x for x, has_axis in zip(given, flags, strict=True) if has_axis])
    types = _types(given, loops=loops, **static)
    warps, stages, interpreted = static["options"]
    start = _interpreted if interpreted else _on_gpu
    whole = jax.tree.unflatten(static["structure"], given)
    first, *others = static["grid"]
    grid = types[0].shape[0] * first, *others
    return start(static["kernel"], static["plan"], grid, whole, types, warps, stages)


def _batched(given, axes, *, loops, is_shared, **static):
    size = next(x.shape[a] for x, a in zip(given, axes, strict=True) if a is not None)
    given = [x if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(given, axes, strict=True)]
    flags = tuple(axis is not None for axis in axes)
    static["is_shared"] = is_shared
    if loops or any(mapped and of_all for mapped, of_all in zip(flags, is_shared, strict=True)):
        made = _call().bind(*given, loops=(flags, *loops), **static)
    else:
        flat = []
        for x, mapped, of_all in zip(given, flags, is_shared, strict=True):
            wide = x if mapped or of_all else jnp.broadcast_to(x, (size, *x.shape))
            flat.append(x if of_all else wide.reshape(-1, *wide.shape[2:]))
        made = _call().bind(*flat, loops=(), **static)
        made = [x.reshape(size, -1, *x.shape[1:]) for x in made]
    return made, [0] * len(made)


def _interpreted(kernel, plan, grid, operands, types, warps, stages):
    del warps, stages  # the interpreter has neither

    def on_host(operands):
        host = jax.tree.map(np.ascontiguousarray, operands)
        found = [np.zeros(each.shape, each.dtype) for each in types]
        _interpreter().run(kernel, grid, host, found, plan=plan)
        return found

    return jax.pure_callback(on_host, types, operands)


def _on_gpu(kernel, plan, grid, operands, types, warps, stages):
    return _triton_call()(
        *operands,
        kernel=kernel,
        out_type=types,
        grid=grid,
        name=kernel.fn.__name__,
        num_warps=warps,
        num_stages=stages,
        plan=plan,
    )


@functools.cache
def _interpreter() -> Any:
    from effattn.triton import interpreter

    return interpreter


@functools.cache
def _triton_call() -> Any:
    import jax_triton

    return jax_triton.triton_call
