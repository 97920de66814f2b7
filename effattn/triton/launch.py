"""Calls of Triton kernels from JAX: by jax-triton on a GPU, or interpreted."""

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

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
        return f"needs the package {needed.replace('_', '-')}: pip install 'effattn[gpu]'"
    return device.triton_refusal()


def power_of_2(size: int) -> int:
    """Returns the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def precision(dtype: Any, asked: Any) -> str:
    """Precision of products of this dtype: "tf32", or "tf32x3" for full float32.

    In "tf32x3" each factor is split into its TensorFloat-32 part and the rest: three products. The
    default precision would round float32 to TensorFloat-32.
    """
    return "tf32x3" if dtype == jnp.float32 or asked == lax.Precision.HIGHEST else "tf32"


def call(
    kernel: Any,
    plan: Any,
    grid: tuple[int, ...],
    arrays: Sequence[jax.Array | None],
    results: Sequence[tuple[tuple[int, ...], Any]],
    *,
    shared: Sequence[jax.Array | None] = (),
    warps: int,
    stages: int,
    interpreted: bool,
) -> list[jax.Array]:
    """Runs `kernel(*arrays, *shared, *results, plan)` for B examples.

    Under `jax.vmap` the mapped axis becomes part of B, and the kernel runs once. It runs for one
    example of the mapped axis after the other if a shared array is mapped.

    Args:
      kernel: function with the decorator `triton.jit`.
      plan: constant, whose text tells it from all other plans.
      grid: numbers of programs; the first number is that of an example.
      arrays: operands `(B, ...)`; None stays None.
      results: shapes, without B, and dtypes.
      shared: operands that all examples read; None stays None.
      warps: number of warps of a program.
      stages: tiles in flight.
      interpreted: whether the kernel is interpreted.
    """
    start = _interpreted if interpreted else _on_gpu
    all_arrays = (*arrays, *shared)
    own = sum(array is not None for array in arrays)

    @jax.custom_batching.custom_vmap
    def run(*given):
        batch, found = given[0].shape[0], iter(given)
        operands = [None if array is None else next(found) for array in all_arrays]
        types = [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape, dtype in results]
        return start(kernel, plan, (batch * grid[0], *grid[1:]), operands, types, warps, stages)

    @run.def_vmap
    def _(size, is_mapped, *given):
        wide = [
            x if is_one else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_one in zip(given[:own], is_mapped[:own], strict=True)
        ]
        if any(is_mapped[own:]):
            mapped = [x for x, is_one in zip(given[own:], is_mapped[own:], strict=True) if is_one]

            def one(x):
                mine, of_shared = x[0], iter(x[1])
                both = zip(given[own:], is_mapped[own:], strict=True)
                return run(*mine, *(next(of_shared) if is_one else x for x, is_one in both))

            made = lax.map(one, (wide, mapped))
        else:
            made = run(*(x.reshape(-1, *x.shape[2:]) for x in wide), *given[own:])
            made = [x.reshape(size, -1, *x.shape[1:]) for x in made]
        return made, [True] * len(made)

    given = mesh_axes.vary_alike([array for array in all_arrays if array is not None])
    return [mesh_axes.vary_like(given[0], x) for x in run(*device.aligned(given))]


def _interpreted(kernel, plan, grid, operands, types, warps, stages):
    del warps, stages  # the interpreter has neither

    def on_host(operands):
        host = [None if x is None else np.ascontiguousarray(x) for x in operands]
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
