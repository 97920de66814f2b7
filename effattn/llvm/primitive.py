"""A kernel as JAX sees it: a primitive, which is XLA's form wherever the kernel cannot be."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from effattn.xla import mesh_axes

Form = Callable[..., Sequence[jax.Array]]


def kernel(
    name: str, by_kernel: Form, by_xla: Form, shapes: Callable[..., Sequence[tuple[int, ...]]]
) -> Form:
    """The function `(static, *arrays) -> tuple of arrays`.

    When a program is lowered to run here it becomes the kernel. One that is exported, to be run who
    knows where, has XLA's form, and so have derivatives in forward mode. Under `vmap` arrays get
    one more axis in front, all of them.

    Args:
      name: of the primitive.
      by_kernel: `(static, *arrays)` to the results, in float32.
      by_xla: the same, in XLA.
      shapes: `(static, *arrays)` to the shapes of the results.
    """
    made = Primitive(name)
    made.multiple_results = True

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def run(static, *arrays):
        operands = mesh_axes.vary_alike(arrays)
        results = made.bind(*operands, static=static)
        return tuple(mesh_axes.vary_like(operands[0], result) for result in results)

    @run.defjvp
    def jvp(static, primals, tangents):
        return jax.jvp(lambda *arrays: tuple(by_xla(static, *arrays)), primals, tangents)

    @made.def_abstract_eval
    def abstract(*arrays, static):
        return [jax.core.ShapedArray(shape, jnp.float32) for shape in shapes(static, *arrays)]

    def lowering_of(form: Form) -> Callable[..., Any]:
        return mlir.lower_fun(lambda *arrays, static: form(static, *arrays), multiple_results=True)

    in_xla, in_kernel = lowering_of(by_xla), lowering_of(by_kernel)

    def lowering_here(context, *arrays, static):
        exported = context.module_context.lowering_parameters.for_export
        return (in_xla if exported else in_kernel)(context, *arrays, static=static)

    def batched(arrays, axes, *, static):
        (size,) = {
            array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None
        }
        in_front = [
            jnp.broadcast_to(array, (size, *array.shape))
            if axis is None
            else jnp.moveaxis(array, axis, 0)
            for array, axis in zip(arrays, axes, strict=True)
        ]
        results = made.bind(*in_front, static=static)
        return results, (0,) * len(results)

    made.def_impl(lambda *arrays, static: by_kernel(static, *arrays))
    mlir.register_lowering(made, in_xla)
    mlir.register_lowering(made, lowering_here, platform="cpu")
    batching.primitive_batchers[made] = batched
    return run
