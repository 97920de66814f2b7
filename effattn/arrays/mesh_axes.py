"""What the cores need to know of the mesh: axes that vary by device, and axes that are explicit."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, auto_axes, reshard

Arrays = TypeVar("Arrays")
Method = TypeVar("Method", bound=Callable[..., Any])


def explicit(x: jax.Array) -> bool:
    """Whether the mesh of the array has explicit axes."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def placed(function: Callable[..., Any], like: jax.Array, *specs: PartitionSpec) -> Callable:
    """The function, free of explicit mesh axes inside, with results placed by `specs`.

    Where the mesh of `like` has explicit axes, the types of arrays say how they are sharded;
    inside, the compiler places them, as it does on other meshes. There this changes nothing.
    """
    if not explicit(like):
        return function

    def run(*arguments):
        with of_type(like):
            return auto_axes(function, out_sharding=specs)(*arguments)

    return run


@contextlib.contextmanager
def of_type(like: jax.Array) -> Iterator[None]:
    """The mesh that the array's type carries, for what is traced within, as by `jax.set_mesh`."""
    known = jax.sharding.get_abstract_mesh()
    if not explicit(like) or not known.empty:
        yield
        return
    place: Any = None if isinstance(like, jax.core.Tracer) else like.sharding
    # Eager operations need to know the devices, which the types of traced arrays do not say.
    if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
        with jax.set_mesh(place.mesh):
            yield
    else:
        with jax.sharding.use_abstract_mesh(jax.typeof(like).sharding.mesh):
            yield


def on_mesh_of_input(method: Method) -> Method:
    """A module's method, called where the mesh of its first argument is known.

    The parameters are taken to that mesh, so that their gradients are summed over it.
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
    """The function of the arguments, free of explicit mesh axes inside, and placed as x is."""
    (y,) = placed(lambda *given: (function(*given),), x, PartitionSpec(*spec(x)))(*arguments)
    return y


def extended(
    function: Callable[..., tuple[jax.Array, Any]],
    module: Any,
    x: jax.Array,
    state: Any,
    *more: Any,
) -> tuple[jax.Array, Any]:
    """`function(module, x, state, *more)`, free of explicit mesh axes inside.

    Of `(y, state)`, y is placed as x is, and the state as it was, with its rows where those of x
    are.
    """
    if not explicit(x):
        return function(module, x, state, *more)
    rows, *_ = spec(x)
    specs = jax.tree.map(lambda leaf: PartitionSpec(rows, *spec(leaf)[1:]), state)
    return placed(function, x, PartitionSpec(*spec(x)), specs)(module, x, state, *more)


@contextlib.contextmanager
def within_placed(like: jax.Array, traced: str) -> Iterator[None]:
    """The mesh as what is `placed` like this finds it, for what is traced ahead of that.

    `traced` names it, for the message where it closes over an array of the explicit mesh.
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
            f"{traced} closes over an array on a mesh with explicit axes: there it takes constants "
            "of NumPy alone; make the mesh with jax.sharding.AxisType.Auto"
        ) from error


def spec(x: jax.Array) -> tuple:
    """Over which mesh axes each axis of the array is sharded, as its type says."""
    known = tuple(jax.typeof(x).sharding.spec)
    return known + (None,) * (x.ndim - len(known))


def beside(new: jax.Array, kept: jax.Array) -> jax.Array:
    """`kept (B, S, ...)`, with the rows and features where explicit axes have those of `new`."""
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
    """Lets all arrays vary over the axes that any of them varies over.

    A custom rule is then local to a device, and the gradient of a replicated array is summed over
    devices by the transpose of this.
    """
    axes = frozenset().union(*map(_varying, jax.tree.leaves(arrays)))
    return jax.tree.map(lambda x: _vary(x, axes), arrays)


def vary_like(like: jax.Array, x: Any) -> jax.Array:
    """Lets `x`, the same on all devices, vary as `like` does: a loop's carry keeps its type."""
    return _vary(x, _varying(like))
