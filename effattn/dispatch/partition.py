"""Kernels on several devices: each device runs a kernel for its examples and its heads.

A compiler that partitions a program over devices does not look into a kernel. Without a rule, it
gathers all operands of the kernel on every device.
"""

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from effattn.arrays import mesh_axes

# Names of the axes of an array; None for an axis that a device needs as a whole.
Names = tuple[str | None, ...]
HEADS = "heads"
# Heads of a result that do not depend on the heads that share them.
SAME = "same heads"
# Heads of an operand that only one of the devices that share them may count; others get zeros.
ONCE = "heads once"

# Mesh axes of named axes.
Places = tuple[tuple[str, tuple[str, ...]], ...]


def rows(count: int) -> Names:
    """Names of `count` batch axes."""
    return tuple(f"row{axis}" for axis in range(count))


def partitioned(
    function: Callable[..., Sequence[jax.Array]],
    operands: Sequence[Names],
    results: Sequence[Names],
) -> Callable[..., Sequence[jax.Array]]:
    """Returns `function`, so that each device calls it for its part of the batch and the heads.

    Named axes are partitioned as those of the operands are, and all other axes are gathered. Axes
    with the same name have the same length, or length 1 for what all entries share. An axis of
    heads may also have any divisor as its length: each entry then belongs to as many consecutive
    heads, which may be on several devices. These devices share the entry. If it is an entry of a
    result, each device has a part of it, and the parts are added up, except for `SAME`.

    A program for one device, or in `jax.shard_map` over all mesh axes, calls `function` itself.

    Args:
      function: `(*arrays) -> arrays`, for any part of the batch and the heads.
      operands: names of the axes of each operand.
      results: names of the axes of each result. A result that lacks an axis of the operands is a
        sum over it, and is summed over devices.
    """
    if not is_needed():
        return function

    def on_device(places, arguments, found):
        """The function of the parts on a device, for arrays of these full shapes."""

        def run(*arrays):
            mine = map(places.own_heads, arrays, operands, arguments)
            return tuple(map(places.summed, function(*mine), results, found))

        return run

    if (known := _known.value) is not None:
        return _by_shard_map(function, on_device, operands, results, dict(known))
    rule = _by_rule(function, on_device, operands, results)

    def mapped(is_mapped):
        """The function with a mapped axis in front of these operands and of all results."""
        row = f"mapped{sum(str(name).startswith('mapped') for name in results[0])}"
        inner = jax.vmap(function, in_axes=[0 if each else None for each in is_mapped])
        outer = [(row, *of) if each else of for each, of in zip(is_mapped, operands, strict=True)]
        return partitioned(inner, outer, [(row, *of) for of in results])

    def run(*arrays):
        whole = jax.make_jaxpr(lambda *arrays: tuple(function(*arrays)))(*arrays)
        if whole.effects:  # Pallas's interpreter of Mosaic GPU has side effects
            return tuple(function(*arrays))
        by_rule = jax.make_jaxpr(rule(whole))(*arrays)
        return tuple(_partitioned.bind(*arrays, whole=whole, by_rule=by_rule, mapped=mapped))

    return run


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


def _by_rule(function, on_device, operands, results):
    """Returns, for the function as a closed jaxpr, its call by a rule for the compiler."""
    names, count = (*operands, *results), len(operands)

    def partition(mesh, arguments, found):
        arrays = *arguments[:count], *found
        if mesh.empty:  # shardings without a mesh
            devices = list(arrays[0].sharding.devices_indices_map(arrays[0].shape))
            mesh = Mesh(np.array(devices), ("devices",))
        shapes = [array.shape for array in arrays]
        specs = [_spec_of(mesh, array.sharding, array.shape) for array in arrays]
        places = _Places.of(mesh, names, shapes, _in_use(names, specs))
        shardings = [NamedSharding(mesh, spec) for spec in map(places.spec, shapes, names)]
        everywhere = [NamedSharding(mesh, PartitionSpec())] * (len(arguments) - count)
        run = on_device(places, shapes[:count], shapes[count:])

        def of_operands(*arrays):
            return run(*arrays[:count])

        return mesh, of_operands, tuple(shardings[count:]), (*shardings[:count], *everywhere)

    def rule(mesh, arguments, found):
        more = [(None,) * len(array.shape) for array in arguments[count:]]
        shapes = [[array.shape for array in arrays] for arrays in (arguments, found)]
        return _rule((*operands, *more), results, *shapes)

    def of_whole(closed):
        # XLA's cache of compiled programs does not see the function, so a number stands for it.
        mark = np.uint32(zlib.crc32(str(closed).encode()))

        def whole(*arrays):
            constants = arrays[count + 1 :]
            return tuple(jax.core.eval_jaxpr(closed.jaxpr, constants, *arrays[:count]))

        call = custom_partitioning(whole)
        call.def_partition(partition, sharding_rule=rule, decode_shardings=False)
        return lambda *arrays: call(*arrays, mark, *closed.consts)

    return of_whole


def _spec_of(mesh, sharding, shape):
    """The mesh axes that partition each axis; None also if a part of a mesh axis does."""
    slices = sharding.devices_indices_map(tuple(shape))
    at, spec = np.indices(mesh.devices.shape), []
    for axis in range(len(shape)):
        starts = np.vectorize(lambda device, axis=axis: slices[device][axis].start or 0)
        first = starts(mesh.devices)
        number = first // min((n for n in first.flat if n), default=1)
        # The number of a part is made of its device's places along mesh axes, as of digits.
        weights = [np.take(number, 1 % size, n).flat[0] for n, size in enumerate(number.shape)]
        is_whole = (np.tensordot(weights, at, 1) == number).all()
        digits = zip(weights, mesh.axis_names, strict=True)
        axes = sorted((digit for digit in digits if digit[0]), reverse=True)
        spec.append(tuple(name for _, name in axes) or None if is_whole else None)
    return spec


def _by_shard_map(function, on_device, operands, results, wanted):
    """`partitioned` by `jax.shard_map`, for known mesh axes."""

    def run(*arrays):
        mesh = jax.sharding.get_abstract_mesh()
        shapes = [array.shape for array in arrays]
        found = [array.shape for array in jax.eval_shape(function, *arrays)]
        places = _Places.of(mesh, (*operands, *results), (*shapes, *found), wanted)
        return jax.shard_map(
            on_device(places, shapes, found),
            mesh=mesh,
            in_specs=tuple(map(places.spec, shapes, operands)),
            out_specs=tuple(map(places.spec, found, results)),
            check_vma=False,
        )(*arrays)

    return run


_known: Any = jax.make_user_context(None)


@contextlib.contextmanager
def placed_by(known: Places | None) -> Iterator[None]:
    """Within, the mesh axes that partition each named axis are known; None is unknown."""
    with _known(known):
        yield


def places_of(array: jax.Array) -> Places | None:
    """Mesh axes of the batch and heads of `(*B, L, heads, size)`; None without explicit axes."""
    if not mesh_axes.explicit(array):
        return None
    names = *rows(array.ndim - 3), None, HEADS, None
    return tuple(_in_use([names], [mesh_axes.spec(array)]).items())


def _in_use(names, specs):
    """The mesh axes of each named axis: those of the first array that has any."""
    found: dict[str, tuple[str, ...]] = {}
    for of, spec in zip(names, specs, strict=True):
        for name, axes in zip(of, spec, strict=False):
            if name is not None and axes is not None:
                found.setdefault(_kind(name), axes if isinstance(axes, tuple) else (axes,))
    return found


def _kind(name):
    return HEADS if name in (SAME, ONCE) else name


def is_needed() -> bool:
    """True if kernels that are traced now may be part of a program for several devices."""
    return jax.device_count() > 1 and not _is_manual() and can_partition(_known.value)


def can_partition(known: Places | None) -> bool:
    """False for kernels that a program for several devices runs as a whole on every device.

    These are calls in a `jax.shard_map` over some but not all mesh axes, and calls in a function
    that hides explicit mesh axes, unless the mesh axes of the batch and heads are known.
    """
    if _is_manual():
        return {*_axis_types()} == {AxisType.Manual}
    return known is not None or not mesh_axes.are_hidden()


def _is_manual():
    return AxisType.Manual in _axis_types()


def _axis_types():
    return jax.sharding.get_abstract_mesh().axis_types


class _Places(NamedTuple):
    """The mesh axes that partition each named axis, and the length of each named axis.

    Attributes:
      mesh: the mesh.
      sizes: lengths by name, the largest last.
      axes: mesh axes by name.
    """

    mesh: Any
    sizes: dict[str, list[int]]
    axes: dict[str, tuple[str, ...]]

    @classmethod
    def of(
        cls,
        mesh: Any,
        names: Sequence[Names],
        shapes: Sequence[Sequence[int]],
        wanted: Mapping[str, tuple[str, ...]],
    ) -> "_Places":
        """The wanted mesh axes, without those that would divide an axis unevenly."""
        sizes: dict[str, set[int]] = {}
        for of, shape in zip(names, shapes, strict=True):
            for name, size in zip(of, shape, strict=True):
                if name is not None:
                    sizes.setdefault(_kind(name), set()).add(size)
        in_order = {name: sorted(found) for name, found in sizes.items()}
        places, taken = cls(mesh, in_order, {}), set[str]()
        for name, axes in wanted.items():
            while axes and (taken & {*axes} or not places._divides(name, axes)):
                axes = axes[:-1]
            if axes and name in in_order:
                places.axes[name] = axes
                taken |= {*axes}
        return places

    def _count(self, axes):
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def _divides(self, name, axes):
        """True if all axes of this name can be divided among so many devices."""
        sizes = [size for size in self.sizes.get(name, [1]) if size > 1]
        whole = bool(sizes) and sizes[-1] % self._count(axes) == 0
        return whole and all(self._split(size, axes) is not None for size in sizes)

    def _split(self, size, axes):
        """Divides mesh axes into those that partition `size` heads, and those that share heads.

        None if the heads cannot be divided so.
        """
        count = 0
        while count < len(axes) and size % self._count(axes[: count + 1]) == 0:
            count += 1
        own, shared = axes[:count], axes[count:]
        fits = self._count(shared) % (size // self._count(own)) == 0
        return (own, shared) if fits or not shared else None

    def _of_axis(self, name, size):
        """The mesh axes that partition an axis, and those that share it."""
        axes = self.axes.get(_kind(name), ())
        if name is None or size == 1:
            return (), axes
        return self._split(size, axes)

    def spec(self, shape: Sequence[int], of: Names) -> PartitionSpec:
        parts = (self._of_axis(name, size)[0] for name, size in zip(of, shape, strict=True))
        return PartitionSpec(*(axes or None for axes in parts))

    def _shared(self, of, shape):
        """Name and axis of shared heads, the number on a device, and the mesh axes; or None."""
        for axis, (name, size) in enumerate(zip(of, shape, strict=True)):
            if _kind(name) == HEADS:
                own, shared = self._of_axis(name, size)
                if shared:
                    return name, axis, size // self._count(own), shared
        return None

    def own_heads(self, array: jax.Array, of: Names, shape: Sequence[int]) -> jax.Array:
        """Takes the head that the heads of this device share, if more heads are on the device."""
        if (found := self._shared(of, shape)) is None:
            return array
        name, axis, here, shared = found
        each = self._count(shared) // here  # devices that share a head
        number = lax.axis_index(shared)
        if here > 1:
            array = lax.dynamic_slice_in_dim(array, number // each, 1, axis)
        return jnp.where(number % each == 0, array, 0) if name == ONCE else array

    def summed(self, array: jax.Array, of: Names, shape: Sequence[int]) -> jax.Array:
        """Adds up the parts of a result that devices have."""
        shared_by = dict(self.axes)
        for name, size in zip(of, shape, strict=True):
            if _kind(name) in shared_by:
                shared_by[_kind(name)] = self._of_axis(name, size)[1]
        if (found := self._shared(of, shape)) is not None:
            name, axis, here, shared = found
            each = self._count(shared) // here
            number = lax.axis_index(shared)
            if name == SAME and here == 1:
                shared_by[HEADS] = ()
            elif name == SAME:
                array = jnp.where(number % each == 0, array, 0)
            if here > 1:
                full = jnp.zeros((*array.shape[:axis], here, *array.shape[axis + 1 :]), array.dtype)
                array = lax.dynamic_update_slice_in_dim(full, array, number // each, axis)
        axes = tuple(axis for each in shared_by.values() for axis in each)
        return lax.psum(array, axes) if axes else array


def _rule(operands, results, operand_shapes, result_shapes):
    """The rule by which Shardy propagates shardings through the call.

    Query heads and key heads are propagated apart: together, heads on more devices than there are
    key heads would partition these by part of a mesh axis, for which JAX has no sharding.
    """
    whole: list[str] = []

    def factor(name, size):
        if name is None or size == 1:
            whole.append(f"whole{len(whole)}")
            return whole[-1]
        return f"heads{size}" if _kind(name) == HEADS else name

    def mappings(names, shapes):
        return tuple(
            ArrayMapping(*map(factor, of, shape)) for of, shape in zip(names, shapes, strict=True)
        )

    return SdyShardingRule(
        mappings(operands, operand_shapes),
        mappings(results, result_shapes),
        need_replication_factors=tuple(whole),
    )
