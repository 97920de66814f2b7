"""Calls of Triton kernels from JAX: by jax-triton on a GPU, or interpreted."""

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from effattn import dispatch
from effattn.arrays import mesh_axes
from effattn.dispatch import device


def refusal() -> str | None:
    """The reason why this machine cannot run or lower Triton kernels, or None."""
    needed = "triton" if dispatch.is_interpreted() else "jax_triton"
    if importlib.util.find_spec(needed) is None:
        name = needed.replace("_", "-")
        return f"needs the package {name}: pip install 'effattn[gpu]', from Python 3.12 on"
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
    start = _interpreted if interpreted else _on_gpu
    leaves, structure = jax.tree.flatten(tuple(operands), is_leaf=lambda x: isinstance(x, Shared))
    is_shared = [isinstance(leaf, Shared) for leaf in leaves]

    # This also hides the call from JAX's removal of dead code, on which jax-triton 0.4 and jax 0.12
    # disagree.
    @jax.custom_batching.custom_vmap
    def run(*given):
        batch = 1 if all(is_shared) else given[is_shared.index(False)].shape[0]
        types = [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape, dtype in results]
        whole = jax.tree.unflatten(structure, given)
        return start(kernel, plan, (batch * grid[0], *grid[1:]), whole, types, warps, stages)

    @run.def_vmap
    def _(size, is_mapped, *given):
        mapped = [of_all and here for of_all, here in zip(is_shared, is_mapped, strict=True)]
        wide = [
            x if here or of_all else jnp.broadcast_to(x, (size, *x.shape))
            for x, here, of_all in zip(given, is_mapped, is_shared, strict=True)
        ]
        if any(mapped):
            own = [here or not of_all for here, of_all in zip(is_mapped, is_shared, strict=True)]

            def one(parts):
                part = iter(parts)
                both = zip(wide, own, strict=True)
                return run(*(next(part) if is_own else x for x, is_own in both))

            made = lax.map(one, [x for x, is_own in zip(wide, own, strict=True) if is_own])
        else:
            flat = [
                x if of_all else x.reshape(-1, *x.shape[2:])
                for x, of_all in zip(wide, is_shared, strict=True)
            ]
            made = [x.reshape(size, -1, *x.shape[1:]) for x in run(*flat)]
        return made, [True] * len(made)

    given = [leaf.array if isinstance(leaf, Shared) else leaf for leaf in leaves]
    given = mesh_axes.vary_alike(given)
    return [mesh_axes.vary_like(given[0], x) for x in run(*device.aligned(given))]


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
