"""A kernel as a JAX primitive, with an XLA implementation where the kernel cannot run."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from effattn.arrays import mesh_axes
from effattn.arrays.linear_map import with_derivatives
from effattn.dispatch.partition import partitioned
from effattn.dispatch.places import Names, rows

Form = Callable[..., Sequence[jax.Array]]


def kernel(
    name: str,
    by_kernel: Form,
    by_xla: Form,
    shapes: Callable[..., Sequence[tuple[int, ...]]],
    names: Callable[..., tuple[Sequence[Names], Sequence[Names]]],
) -> Form:
    """Makes a primitive; returns the function `(static, *arrays) -> tuple of float32 arrays`.

    A program lowered for CPUs of this process runs the kernel, each device for its part of the
    batch and the heads. Exported programs, which may run on other machines, and forward-mode
    derivatives use the XLA implementation.

    All arrays have the same number of leading batch axes; an axis of length 1 is broadcast. Under
    `vmap`, arrays that are not mapped get a batch axis of length 1 and are not copied.

    Args:
      name: name of the primitive.
      by_kernel: the kernel, `(static, shapes of the results, *arrays) -> results`.
      by_xla: the XLA implementation, `(static, *arrays) -> results`, for arrays whose batch axes
        are all of full length.
      shapes: `(static, *arrays) -> shapes of the results`, for arrays whose batch axes are all of
        full length.
      names: `(static, *arrays) ->` the names of the axes of each array and of each result, besides
        the batch axes, as for `effattn.dispatch.places`.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def full_shapes(static, arrays):
        counts = [len(of) for of in names(static, *arrays)[0]]
        leading = [x.shape[: x.ndim - count] for x, count in zip(arrays, counts, strict=True)]
        batch = jnp.broadcast_shapes(*leading)
        return [(*batch, *x.shape[x.ndim - n :]) for x, n in zip(arrays, counts, strict=True)]

    def in_xla(static, *arrays):
        full = full_shapes(static, arrays)
        return by_xla(static, *map(jnp.broadcast_to, arrays, full))

    def result_shapes(static, *arrays):
        full = full_shapes(static, arrays)
        return shapes(static, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in full))

    def in_kernel(static, *arrays):
        return by_kernel(static, result_shapes(static, *arrays), *arrays)

    def on_each_device(static, *arrays):
        operands, results = names(static, *arrays)
        batch = rows(arrays[0].ndim - len(operands[0]))
        named = [[(*batch, *of) for of in each] for each in (operands, results)]
        return partitioned(functools.partial(primitive.bind, static=static), *named)(*arrays)

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def run(static, *arrays):
        operands = mesh_axes.vary_alike(arrays)
        results = on_each_device(static, *operands)
        return tuple(mesh_axes.vary_like(operands[0], result) for result in results)

    @run.defjvp
    def jvp(static, primals, tangents):
        return jax.jvp(lambda *arrays: tuple(in_xla(static, *arrays)), primals, tangents)

    @primitive.def_abstract_eval
    def abstract(*arrays, static):
        found = result_shapes(static, *arrays)
        return [jax.core.ShapedArray(shape, jnp.float32) for shape in found]

    def lowering_of(form: Form) -> Callable[..., Any]:
        return mlir.lower_fun(lambda *arrays, static: form(static, *arrays), multiple_results=True)

    lower_xla, lower_kernel = lowering_of(in_xla), lowering_of(in_kernel)

    def lower_here(context, *arrays, static):
        exported = context.module_context.lowering_parameters.for_export
        return (lower_xla if exported else lower_kernel)(context, *arrays, static=static)

    def batched(arrays, mapped, *, static):
        in_front = [
            x[None] if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(arrays, mapped, strict=True)
        ]
        results = primitive.bind(*in_front, static=static)
        return results, (0,) * len(results)

    primitive.def_impl(lambda *arrays, static: in_kernel(static, *arrays))
    mlir.register_lowering(primitive, lower_xla)
    mlir.register_lowering(primitive, lower_here, platform="cpu")
    batching.primitive_batchers[primitive] = batched
    return run


def with_gradients(run: Form, gradients: Callable[..., Any]) -> Callable[..., Any]:
    """The function `(*operands) -> run("forward", *operands)` with a backward pass.

    Args:
      run: a result of `kernel`, whose static argument is the direction.
      gradients: `(run, operands, cotangents) -> gradients of the operands`, with None for an
        operand without a gradient.
    """

    def outputs(_, *operands):
        return run("forward", *operands)

    def with_residuals(_, *operands):
        return run("forward", *operands), operands

    def backward(_, operands, cotangents):
        return gradients(run, operands, cotangents)

    return functools.partial(with_derivatives(outputs, with_residuals, backward), None)


def in_first_part(gradient: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Pads a gradient `(..., heads, size)` of the XLA form to the shape that kernels return.

    Kernels return several parts for each head, which the caller sums: `shape` has more heads, or an
    axis of parts after the heads. The first part is the gradient, the others are zero.
    """
    if gradient.shape == shape:
        return gradient
    if not gradient.size:
        return jnp.zeros_like(gradient, shape=shape)
    size = gradient.shape[-1]
    parts = math.prod(shape) // gradient.size - 1
    zeros = jnp.zeros_like(gradient, shape=(*gradient.shape[:-1], parts, size))
    return jnp.concatenate([gradient[..., None, :], zeros], -2).reshape(shape)
