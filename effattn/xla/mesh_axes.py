"""What the cores need to know of the mesh: axes that vary by device, and axes that are explicit."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec, auto_axes, reshard

Arrays = TypeVar("Arrays")


def explicit(x: jax.Array) -> bool:
    """Whether the mesh of the array has explicit axes."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def placed(function: Callable[..., Any], like: jax.Array, *specs: PartitionSpec) -> Callable:
    """The function, free of explicit mesh axes inside, with results placed by `specs`.

    Where the mesh of `like` has explicit axes, the types of arrays say how they are sharded;
    inside, the compiler places them, as it does on other meshes. There this changes nothing.
    """
    return auto_axes(function, out_sharding=specs) if explicit(like) else function


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


def _varying(x: jax.Array) -> frozenset:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def _vary(x: jax.Array, axes: frozenset) -> jax.Array:
    missing = tuple(sorted(axes - _varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(arrays: Arrays) -> Arrays:
    """Lets all arrays vary over the axes that any of them varies over.

    A custom rule is then local to a device, and the gradient of a replicated array is summed over
    devices by the transpose of this.
    """
    axes = frozenset().union(*map(_varying, jax.tree.leaves(arrays)))
    return jax.tree.map(lambda x: _vary(x, axes), arrays)


def vary_like(like: jax.Array, x: jax.Array) -> jax.Array:
    """Lets `x`, the same on all devices, vary as `like` does: a loop's carry keeps its type."""
    return _vary(x, _varying(like))
