"""Mesh axes that partition the batch and the heads of a kernel's operands and results."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

# Names of the axes of an array; None for an axis that each device needs as a whole. An axis of
# heads has one of three names, which differ only where several devices share a head.
Names = tuple[str | None, ...]
HEADS = "heads"  # operands: each device reads the head; results: the devices' parts are added
SAME = "same heads"  # results: equal on these devices, so the part of one device counts
ONCE = "heads once"  # operands: one of these devices reads the head, the others get zeros


def rows(count: int) -> Names:
    """Names of `count` batch axes."""
    return tuple(f"row{axis}" for axis in range(count))


def plain(name: str) -> str:
    """The name without what it says of shared heads: all three names of heads are `HEADS`."""
    return HEADS if name in (SAME, ONCE) else name


def in_use(names: Sequence[Names], specs: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each named axis: those of the first array that has any."""
    found: dict[str, tuple[str, ...]] = {}
    for of, spec in zip(names, specs, strict=True):
        for name, axes in zip(of, spec, strict=False):
            if name is not None and axes is not None:
                found.setdefault(plain(name), axes if isinstance(axes, tuple) else (axes,))
    return found


class Places(NamedTuple):
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
    ) -> "Places":
        """The wanted mesh axes, without those that would divide an axis unevenly."""
        sizes: dict[str, set[int]] = {}
        for of, shape in zip(names, shapes, strict=True):
            for name, size in zip(of, shape, strict=True):
                if name is not None:
                    sizes.setdefault(plain(name), set()).add(size)
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
        if name is None:
            return (), ()
        axes = self.axes.get(plain(name), ())
        return ((), axes) if size == 1 else self._split(size, axes)

    def spec(self, shape: Sequence[int], of: Names) -> PartitionSpec:
        """The sharding of an array."""
        parts = (self._of_axis(name, size)[0] for name, size in zip(of, shape, strict=True))
        return PartitionSpec(*(axes or None for axes in parts))

    def _shared(self, of, shape):
        """Name and axis of shared heads, the number on a device, and the mesh axes; or None."""
        for axis, (name, size) in enumerate(zip(of, shape, strict=True)):
            if name in (HEADS, SAME, ONCE):
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
            if name is not None and plain(name) in shared_by:
                shared_by[plain(name)] = self._of_axis(name, size)[1]
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
