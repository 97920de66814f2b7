"""Kernels on several devices: each device runs a kernel for its examples and its heads.

A compiler that partitions a program over devices does not look into a kernel. Without a rule, it
gathers all operands of the kernel on every device.
"""

import contextlib
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
from jax.sharding import AxisType, NamedSharding, PartitionSpec

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
    heads, which may be on several devices. These devices share the entry. Of a result, each of them
    has its part, and the parts are added up, except for `SAME`.

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
    run = jax.custom_batching.custom_vmap(_by_rule(function, on_device, operands, results))

    @run.def_vmap
    def mapped(size, is_mapped, *arrays):
        row = f"mapped{sum(str(name).startswith('mapped') for name in results[0])}"
        inner = jax.vmap(function, in_axes=[0 if each else None for each in is_mapped])
        outer = [(row, *of) if each else of for each, of in zip(is_mapped, operands, strict=True)]
        found = partitioned(inner, outer, [(row, *of) for of in results])(*arrays)
        return tuple(found), (True,) * len(results)

    return run


def _by_rule(function, on_device, operands, results):
    """`partitioned` by a rule for the compiler, which finds the mesh axes."""
    names, count = (*operands, *results), len(operands)

    def partition(mesh, arguments, found):
        arrays = *arguments[:count], *found
        shapes = [array.shape for array in arrays]
        specs = [array.sharding.spec for array in arrays]
        places = _Places.of(mesh, names, shapes, _in_use(names, specs))
        shardings = [NamedSharding(mesh, spec) for spec in map(places.spec, shapes, names)]
        run = on_device(places, shapes[:count], shapes[count:])
        everywhere = NamedSharding(mesh, PartitionSpec())
        return mesh, _unmarked(run), tuple(shardings[count:]), (*shardings[:count], everywhere)

    def rule(mesh, arguments, found):
        shapes = [[array.shape for array in arrays] for arrays in (arguments, found)]
        return _rule((*operands, ()), results, *shapes)

    call = custom_partitioning(_unmarked(function))
    call.def_partition(partition, sharding_rule=rule)

    def run(*arrays):
        # XLA's cache of compiled programs does not see the function, so an operand stands for it.
        text = str(jax.make_jaxpr(function)(*arrays))
        return call(*arrays, np.uint32(zlib.crc32(text.encode())))

    return run


def _unmarked(function):
    """The function of all arguments but the last."""
    return lambda *arrays: tuple(function(*arrays[:-1]))


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
        """Name and axis of shared heads, their number on a device, and mesh axes that share them."""
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
