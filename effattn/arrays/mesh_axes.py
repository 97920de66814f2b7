"""Sharding helpers: explicit mesh axes, and arrays that vary by device inside `jax.shard_map`."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, auto_axes, reshard

Arrays = TypeVar("Arrays")
Method = TypeVar("Method", bound=Callable[..., Any])


def explicit(x: jax.Array) -> bool:
    """True if the mesh of the array has explicit axes."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def on_mesh_that_is_set(x: jax.Array) -> jax.Array:
    """Places an array without a mesh on the explicit mesh of `jax.set_mesh`, whole on each device.

    Arrays that are made under `jax.set_mesh`, such as zeros, are on that mesh, and JAX refuses some
    operations between them and an array without a mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types or not jax.typeof(x).sharding.mesh.empty:
        return x
    return reshard(x, PartitionSpec())


def placed(function: Callable[..., Any], like: jax.Array, *specs: PartitionSpec) -> Callable:
    """Wraps `function` so that explicit mesh axes are automatic inside (`jax.sharding.auto_axes`).

    On a mesh with explicit axes, array types contain the sharding. Inside the wrapped function the
    compiler chooses the sharding, and the results are sharded by `specs`. If the mesh of `like` has
    no explicit axes, the function is returned unchanged.
    """
    if not explicit(like):
        return function

    def run(*arguments):
        with of_type(like), _hidden(True):
            return auto_axes(function, out_sharding=specs)(*arguments)

    return run


_hidden: Any = jax.make_user_context(False)


def are_hidden() -> bool:
    """True in a function that `placed` calls: the mesh has explicit axes, but types do not."""
    return _hidden.value


@contextlib.contextmanager
def of_type(like: jax.Array) -> Iterator[None]:
    """Sets the mesh of the array's type for code within, like `jax.set_mesh`."""
    known = jax.sharding.get_abstract_mesh()
    if not explicit(like) or not known.empty:
        yield
        return
    place: Any = None if isinstance(like, jax.core.Tracer) else like.sharding
    # Eager operations need the devices, which are not part of the types of traced arrays.
    if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
        with jax.set_mesh(place.mesh):
            yield
    else:
        with jax.sharding.use_abstract_mesh(jax.typeof(like).sharding.mesh):
            yield


def on_mesh_of_input(method: Method) -> Method:
    """Decorator: calls a module's method with the mesh of its first argument set.

    The parameters are resharded to the mesh, so that their gradients are summed over the mesh.
    """

    @functools.wraps(method)
    def call(module, x, *arguments, **options):
        known = jax.sharding.get_abstract_mesh()
        if not isinstance(x, jax.Array) or not explicit(x) or not known.empty:
            return method(module, x, *arguments, **options)
        with of_type(x):
            module = jax.tree.map(lambda leaf: reshard(leaf, PartitionSpec(*spec(leaf))), module)
            return method(module, x, *arguments, **options)

    return cast(Method, call)


def placed_like(x: jax.Array, function: Callable[..., jax.Array], *arguments: Any) -> jax.Array:
    """Calls `function(*arguments)` by `placed`; the result is sharded like `x`."""
    (y,) = placed(lambda *given: (function(*given),), x, PartitionSpec(*spec(x)))(*arguments)
    return y


def extended(
    function: Callable[..., tuple[Any, ...]],
    module: Any,
    x: Any,
    state: Any,
    *more: Any,
    further: int = 0,
) -> tuple[Any, ...]:
    """Calls `function(module, x, state, *more)` by `placed`.

    x is an array or several arrays of the same sharding. The function returns `(y, state, ...)`,
    with `further` more results. y is sharded like x, and further results like the rows and tokens
    of x. The new state is sharded like the old state, with its rows (first axis) sharded like those
    of x.
    """
    like, *_ = jax.tree.leaves(x)
    if not explicit(like):
        return function(module, x, state, *more)
    rows, *_ = spec(like)
    specs = jax.tree.map(lambda leaf: PartitionSpec(rows, *spec(leaf)[1:]), state)
    places = PartitionSpec(*spec(like)), specs, *[PartitionSpec(*spec(like)[:2])] * further
    return placed(function, like, *places)(module, x, state, *more)


@contextlib.contextmanager
def within_placed(like: jax.Array, traced: str) -> Iterator[None]:
    """Sets the mesh for code that is traced before a `placed` function is called with it.

    `traced` is the name of the traced function, for the `ValueError` that is raised if the function
    closes over an array on a mesh with explicit axes.
    """
    if not explicit(like):
        yield
        return
    mesh = jax.typeof(like).sharding.mesh
    free = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Auto))
    try:
        with jax.sharding.use_abstract_mesh(free):
            yield
    except ValueError as error:
        if "should match the aval mesh" not in str(error):
            raise
        raise ValueError(
            f"{traced} may close over NumPy arrays only, got an array on a mesh with explicit "
            "axes; make the mesh with jax.sharding.AxisType.Auto"
        ) from error


def check_axis(axis_name: str) -> None:
    """Raises `ValueError` outside of `jax.shard_map` over a mesh with this axis."""
    try:
        lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name must be a mesh axis of the jax.shard_map around this call, got "
            f"{axis_name!r}; call it inside jax.shard_map, over a mesh with that axis"
        ) from None


Wanted = Sequence[tuple[str, ...]]  # mesh axes for each axis of an array; further axes are whole


def dividing(sizes: Mapping[str, int], shape: Sequence[int], wanted: Wanted) -> PartitionSpec:
    """Divides the axes of an array among the devices of a mesh.

    Args:
      sizes: number of devices by mesh axis.
      shape: shape of the array.
      wanted: mesh axes for each axis; without those that are not in `sizes`, or that cannot divide
        the axis evenly.
    """
    places = []
    for rest, names in zip(shape, wanted, strict=False):
        found = []
        for name in names:
            if name in sizes and rest % sizes[name] == 0:
                found.append(name)
                rest //= sizes[name]
        places.append(tuple(found) or None)
    return PartitionSpec(*places)


def constrained(x: jax.Array, wanted: Wanted) -> jax.Array:
    """Divides the axes of x among devices by `dividing`.

    Only the automatic axes of a mesh that is set (`jax.set_mesh`) divide; without any that can, x
    is returned unchanged.
    """
    place = dividing(_automatic_sizes(), x.shape, wanted)
    return lax.with_sharding_constraint(x, place) if any(place) else x


def _automatic_sizes():
    """Sizes of the automatic axes of the mesh that is set."""
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in types if kind == AxisType.Auto}


def are_divided(shape: Sequence[int], wanted: Wanted, axis: int) -> bool:
    """True if several devices of the mesh that is set divide an axis of an array."""
    several = {name: size for name, size in _automatic_sizes().items() if size > 1}
    return bool(dividing(several, shape, wanted)[axis])


def whole(x: jax.Array, axis: int) -> jax.Array:
    """Gives each device all entries along an axis; the compiler chooses for the other axes."""
    place: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    place[axis] = None
    return lax.with_sharding_constraint(x, PartitionSpec(*place))


def gathered(x: jax.Array, axis: int) -> jax.Array:
    """Gives each device all entries along an axis, on a mesh with explicit axes."""
    if not explicit(x):
        return x
    place = list(spec(x))
    place[axis] = None
    return reshard(x, PartitionSpec(*place))


def spec(x: jax.Array) -> tuple:
    """Mesh axes that shard each axis of the array, from the array's type."""
    known = tuple(jax.typeof(x).sharding.spec)
    return known + (None,) * (x.ndim - len(known))


def beside(new: jax.Array, kept: jax.Array) -> jax.Array:
    """Reshards `kept (B, S, ...)` so that its rows and features are sharded like those of `new`.

    Without explicit mesh axes, `kept` is returned unchanged.
    """
    if not explicit(new):
        return kept
    (rows, _, *features), (_, tokens, *_) = spec(new), spec(kept)
    return reshard(kept, PartitionSpec(rows, tokens, *features[: kept.ndim - 2]))


def _varying(x: Any) -> frozenset:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _vary(x: Any, axes: frozenset) -> jax.Array:
    missing = tuple(sorted(axes - _varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(arrays: Arrays) -> Arrays:
    """Marks all arrays as varying over every mesh axis that any of the arrays varies over.

    A custom VJP can then work on each device alone. The transpose of this function sums the
    gradient of a replicated array over devices.
    """
    axes = frozenset().union(*map(_varying, jax.tree.leaves(arrays)))
    return jax.tree.map(lambda x: _vary(x, axes), arrays)


def vary_like(like: jax.Array, x: Any) -> jax.Array:
    """Marks `x`, equal on all devices, as varying like `like`: a loop carry then keeps its type."""
    return _vary(x, _varying(like))
