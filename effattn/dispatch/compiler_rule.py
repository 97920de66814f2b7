"""Partition of a kernel by a rule that XLA's partitioner calls, where types carry no shardings.

The partitioner propagates shardings through a kernel by `propagation`, and then asks for the
program of a device.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from effattn.dispatch.places import HEADS, Names, Places, in_use, plain

# A call by the compiler's rule. Exported programs, which cannot contain the rule, call the function
# as a whole. The primitive's parameter `by_rule` tells JAX that lowering needs the devices.
_partitioned = Primitive("effattn_partitioned")
_partitioned.multiple_results = True


@_partitioned.def_abstract_eval
def _abstract(*_, whole, by_rule, mapped):
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in whole.out_avals]


@_partitioned.def_impl
def _evaluation(*arrays, whole, by_rule, mapped):
    return jax.core.eval_jaxpr(whole.jaxpr, whole.consts, *arrays)


def _lowering(context, *arrays, whole, by_rule, mapped):
    exported = context.module_context.lowering_parameters.for_export
    closed = whole if exported else by_rule
    function = functools.partial(jax.core.eval_jaxpr, closed.jaxpr, closed.consts)
    return mlir.lower_fun(function, multiple_results=True)(context, *arrays)


def _batched(arrays, axes, *, whole, by_rule, mapped):
    places = zip(arrays, axes, strict=True)
    in_front = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in places]
    results = mapped([axis is not None for axis in axes])(*in_front)
    return results, (0,) * len(results)


mlir.register_lowering(_partitioned, _lowering)
batching.primitive_batchers[_partitioned] = _batched


def call(
    function: Callable[..., Sequence[jax.Array]],
    on_device: Callable[..., Callable[..., Any]],
    operands: Sequence[Names],
    results: Sequence[Names],
    mapped: Callable[[Sequence[bool]], Callable[..., Any]],
) -> Callable[..., Sequence[jax.Array]]:
    """Returns `function`, partitioned by the rule.

    Args:
      function: the function of whole operands.
      on_device: `(places, shapes of operands, shapes of results) ->` the function of a device.
      operands: names of the axes of each operand.
      results: names of the axes of each result.
      mapped: `(which operands are mapped) ->` the function for `jax.vmap`, partitioned.
    """
    names, count = (*operands, *results), len(operands)

    def partition(mesh, arguments, found):
        arrays = *arguments[:count], *found
        if mesh.empty:  # shardings without a mesh
            devices = list(arrays[0].sharding.devices_indices_map(arrays[0].shape))
            mesh = Mesh(np.array(devices), ("devices",))
        shapes = [array.shape for array in arrays]
        specs = [_spec_of(mesh, array.sharding, array.shape) for array in arrays]
        places = Places.of(mesh, names, shapes, in_use(names, specs))
        shardings = [NamedSharding(mesh, spec) for spec in map(places.spec, shapes, names)]
        everywhere = [NamedSharding(mesh, PartitionSpec())] * (len(arguments) - count)
        run = on_device(places, shapes[:count], shapes[count:])

        def of_operands(*arrays):
            return run(*arrays[:count])

        return mesh, of_operands, tuple(shardings[count:]), (*shardings[:count], *everywhere)

    def rule(mesh, arguments, found):
        more = [(None,) * len(array.shape) for array in arguments[count:]]
        shapes = [[array.shape for array in arrays] for arrays in (arguments, found)]
        return propagation((*operands, *more), results, *shapes)

    def by_rule(closed):
        # XLA's cache of compiled programs does not see the function, so a number stands for it.
        mark = np.uint32(zlib.crc32(str(closed).encode()))

        def whole(*arrays):
            constants = arrays[count + 1 :]
            return tuple(jax.core.eval_jaxpr(closed.jaxpr, constants, *arrays[:count]))

        partitioned = custom_partitioning(whole)
        partitioned.def_partition(partition, sharding_rule=rule, decode_shardings=False)
        return lambda *arrays: partitioned(*arrays, mark, *closed.consts)

    def run(*arrays):
        arrays = tuple(map(jnp.asarray, arrays))
        whole = jax.make_jaxpr(lambda *arrays: tuple(function(*arrays)))(*arrays)
        if whole.effects:  # Pallas's interpreter of Mosaic GPU has side effects
            return tuple(function(*arrays))
        rule = jax.make_jaxpr(by_rule(whole))(*arrays)
        return tuple(_partitioned.bind(*arrays, whole=whole, by_rule=rule, mapped=mapped))

    return run


def _spec_of(mesh, sharding, shape):
    """The mesh axes that partition each axis; None also if a part of a mesh axis does."""
    slices = sharding.devices_indices_map(tuple(shape))
    at, spec = np.indices(mesh.devices.shape), []
    for axis in range(len(shape)):
        starts = np.vectorize(lambda device, axis=axis: slices[device][axis].start or 0)
        first = starts(mesh.devices)
        number = first // min((n for n in first.flat if n), default=1)
        # The number of a device's part is a sum of the device's coordinates along the mesh axes,
        # each with a weight; an axis that does not divide the array has weight 0.
        weights = [np.take(number, 1 % size, n).flat[0] for n, size in enumerate(number.shape)]
        is_whole = (np.tensordot(weights, at, 1) == number).all()
        digits = zip(weights, mesh.axis_names, strict=True)
        axes = sorted((digit for digit in digits if digit[0]), reverse=True)
        spec.append(tuple(name for _, name in axes) or None if is_whole else None)
    return spec


def propagation(operands, results, operand_shapes, result_shapes):
    """The rule by which Shardy propagates shardings through the call.

    Query heads and key heads are propagated apart: together, heads on more devices than there are
    key heads would partition these by part of a mesh axis, for which JAX has no sharding.
    """
    whole: list[str] = []

    def factor(name, size):
        if name is None or size == 1:
            whole.append(f"whole{len(whole)}")
            return whole[-1]
        return f"heads{size}" if plain(name) == HEADS else name

    def mappings(names, shapes):
        return tuple(
            ArrayMapping(*map(factor, of, shape)) for of, shape in zip(names, shapes, strict=True)
        )

    return SdyShardingRule(
        mappings(operands, operand_shapes),
        mappings(results, result_shapes),
        need_replication_factors=tuple(whole),
    )
