"""Axes of arrays: maps over leading axes, axes of length 1, shifts along an axis, and blocks.

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


def fold(array: jax.Array, size: int, axis: int, mode: str = "constant") -> jax.Array:
    """Splits `(*B, L, ...)` at `axis` into `(*B, ceil(L / size), size, ...)`, padded with zeros.

    With `mode="edge"`, the last entry is repeated instead.
    """
    padding = [(0, 0)] * array.ndim
    padding[axis] = (0, -array.shape[axis] % size)
    array = jnp.pad(array, padding, mode=mode)
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :])


def unfold(array: jax.Array, length: int, axis: int) -> jax.Array:
    """Inverse of `fold`: `(*B, blocks, size, ...)` to its first `length` tokens."""
    shape = array.shape
    array = array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    return jax.lax.slice_in_dim(array, 0, length, axis=axis)
