"""Kernels on several devices: each device runs a kernel for its examples and its heads.

A compiler that partitions a program over devices does not look into a kernel. Without a rule, it
gathers all operands of the kernel on every device.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec, reshard

from effattn.arrays import mesh_axes
from effattn.dispatch.places import HEADS, Names, Places, in_use, rows

# Names of array axes, each with the mesh axes that partition it.
MeshAxes = tuple[tuple[str, tuple[str, ...]], ...]


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

    `function` itself is called in a program for one device, in `jax.shard_map`, and where explicit
    mesh axes are hidden and not known.

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
    from effattn.dispatch import compiler_rule  # imported on first use

    def mapped(is_mapped):
        """The function with a mapped axis in front of these operands and of all results."""
        row = f"mapped{sum(str(name).startswith('mapped') for name in results[0])}"
        inner = jax.vmap(function, in_axes=[0 if each else None for each in is_mapped])
        outer = [(row, *of) if each else of for each, of in zip(is_mapped, operands, strict=True)]
        return partitioned(inner, outer, [(row, *of) for of in results])

    return compiler_rule.call(function, on_device, operands, results, mapped)


def _by_shard_map(function, on_device, operands, results, wanted):
    """`partitioned` by `jax.shard_map`, for known mesh axes."""

    def run(*arrays):
        mesh = jax.sharding.get_abstract_mesh()
        shapes = [array.shape for array in arrays]
        found = [array.shape for array in jax.eval_shape(function, *arrays)]
        places = Places.of(mesh, (*operands, *results), (*shapes, *found), wanted)
        return jax.shard_map(
            on_device(places, shapes, found),
            mesh=mesh,
            in_specs=tuple(map(places.spec, shapes, operands)),
            out_specs=tuple(map(places.spec, found, results)),
            check_vma=False,
        )(*arrays)

    return run


def by_device(
    function: Callable[..., tuple[jax.Array, ...]],
    query: jax.Array,
    operands: Any,
    results: int,
    together: int = 1,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Wraps `function` so that it sees no explicit mesh axes.

    If all axes of the mesh are explicit, each device calls the function for its part of the batch
    and the heads in `jax.shard_map`, where kernels run. If only some are, the compiler chooses, by
    `mesh_axes.placed`. On other meshes, `function` is returned unchanged. Results are sharded like
    the queries.

    Args:
      function: `(*operands) -> results`, for any part of the batch and the heads. Operands are
        pytrees of arrays whose first axes are those of the batch, or of scalars.
      query: `(*B, T, N, H)`.
      operands: the axis of the heads of each array, from its end, or 0 for an array without heads:
        a prefix of the tree of operands, like `in_axes` of `jax.vmap`.
      results: number of results; each is `(*B, T, N, size)` or `(*B, T, N)`.
      together: consecutive query heads that must be on one device.
    """
    if not mesh_axes.explicit(query):
        return function
    places = PartitionSpec(*mesh_axes.spec(query)[:-1])
    mesh, batch = jax.typeof(query).sharding.mesh, rows(query.ndim - 3)
    if {*mesh.axis_types} != {AxisType.Explicit}:
        return mesh_axes.placed(function, query, *[places] * results)

    wanted = dict(places_of(query) or ())
    units = query.shape[-2] // together
    while units % math.prod(mesh.shape[axis] for axis in wanted.get(HEADS, ())):
        wanted[HEADS] = wanted[HEADS][:-1]

    def names(shape, heads):
        of: list[str | None] = [*batch, *[None] * (len(shape) - len(batch))] if shape else []
        if heads:
            of[heads] = HEADS
        return tuple(of)

    def run(*given):
        arrays, tree = jax.tree.flatten(given)
        heads = jax.tree.leaves(jax.tree.broadcast(tuple(operands), given))
        shapes = [array.shape for array in arrays]
        named = list(map(names, shapes, heads))
        parts = Places.of(mesh, named, shapes, wanted)
        specs = list(map(parts.spec, shapes, named))
        of_query = query.shape[:-1]

        def of_device(*arrays):
            return function(*jax.tree.unflatten(tree, map(parts.own_heads, arrays, named, shapes)))

        with mesh_axes.of_type(query):
            found = jax.shard_map(
                of_device,
                mesh=mesh,
                in_specs=tuple(specs),
                out_specs=(parts.spec(of_query, names(of_query, -1)),) * results,
            )(*map(reshard, arrays, specs))
            return tuple(reshard(x, places) for x in found)

    return run


_known: Any = jax.make_user_context(None)


@contextlib.contextmanager
def placed_by(known: MeshAxes | None) -> Iterator[None]:
    """Within, the mesh axes that partition each named axis are known; None is unknown."""
    with _known(known):
        yield


def places_of(array: jax.Array) -> MeshAxes | None:
    """Mesh axes of the batch and heads of `(*B, L, heads, size)`; None without explicit axes."""
    if not mesh_axes.explicit(array):
        return None
    names = *rows(array.ndim - 3), None, HEADS, None
    return tuple(in_use([names], [mesh_axes.spec(array)]).items())


def is_needed() -> bool:
    """True if kernels that are traced now may be part of a program for several devices."""
    return jax.device_count() > 1 and not _is_manual() and can_partition(_known.value)


def may_be_divided() -> bool:
    """True if the compiler may divide arrays that are traced now among several devices."""
    return jax.device_count() > 1 and {*_axis_types()} != {AxisType.Manual}


def can_partition(known: MeshAxes | None) -> bool:
    """False where a program for several devices would run a kernel as a whole on every device.

    This is so in a `jax.shard_map` over some of the mesh axes, and in a function that hides
    explicit mesh axes, unless the mesh axes of the batch and the heads are known.
    """
    if _is_manual():
        return {*_axis_types()} == {AxisType.Manual}
    return known is not None or not mesh_axes.are_hidden()


def _is_manual():
    return AxisType.Manual in _axis_types()


def _axis_types():
    return jax.sharding.get_abstract_mesh().axis_types
