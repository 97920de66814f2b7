"""Inside `jax.shard_map`: over which mesh axes an array varies from device to device."""

from typing import TypeVar

import jax
from jax import lax

Arrays = TypeVar("Arrays")


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
