"""Placeholder for a platform without an implementation: an error at lowering, not at tracing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from effattn.arrays import mesh_axes


def refusing(message: str, results: Any) -> Callable[..., Any]:
    """Returns a function that raises `NotImplementedError` when it is lowered or run eagerly.

    Args:
      message: text of the error.
      results: pytree of shapes and dtypes of the results, as `jax.eval_shape` returns them.
    """
    leaves, structure = jax.tree.flatten(results)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)

    def refused(*operands):
        arrays = jax.tree.leaves(operands)
        found = _refused.bind(*arrays, shapes=shapes, message=message)
        return jax.tree.unflatten(structure, [mesh_axes.vary_like(arrays[0], x) for x in found])

    return refused


_refused = Primitive("effattn_refused")
_refused.multiple_results = True


@_refused.def_abstract_eval
def _abstract(*_, shapes, message):
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in shapes]


@_refused.def_impl
def _evaluation(*_, shapes, message):
    raise NotImplementedError(message)


def _lowering(context, *_, shapes, message):
    raise NotImplementedError(message)


def _batched(arrays, axes, *, shapes, message):
    (size,) = {
        array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None
    }
    shapes = tuple(((size, *shape), dtype) for shape, dtype in shapes)
    results = _refused.bind(*arrays, shapes=shapes, message=message)
    return results, (0,) * len(results)


def _differentiated(arrays, tangents, *, shapes, message):
    """Zero tangents: a program that contains the primitive cannot be lowered, so none is used."""
    results = _refused.bind(*arrays, shapes=shapes, message=message)
    return results, [jnp.zeros_like(x) for x in results]


ad.primitive_jvps[_refused] = _differentiated
mlir.register_lowering(_refused, _lowering)
batching.primitive_batchers[_refused] = _batched
