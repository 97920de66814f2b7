"""Axes of arrays: maps over leading axes, axes of length 1, and shifts along an axis.

Explicit axes of length 1 are for users who forbid the promotion of ranks.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def over_batch(function: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """The function of one example, mapped over the first `axes` axes of all arrays."""
    for _ in range(axes):
        function = jax.vmap(function)
    return function


def lead(array: jax.Array, ndim: int) -> jax.Array:
    """Adds leading axes of length 1, up to `ndim` axes."""
    return lax.expand_dims(array, range(ndim - array.ndim))


def shifted(array: jax.Array, by: int, axis: int) -> jax.Array:
    """Moves entries `by` places to the right along an axis, or to the left; zeros come in."""
    padding = [(0, 0, 0)] * array.ndim
    padding[axis] = (by, -by, 0)
    return lax.pad(array, jnp.zeros((), array.dtype), padding)
