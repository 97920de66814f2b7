"""Explicit axes of length 1, for users who forbid rank promotion, and shifts along an axis."""

import jax
import jax.numpy as jnp
from jax import lax


def lead(array: jax.Array, ndim: int) -> jax.Array:
    """Adds leading axes of length 1, up to `ndim` axes."""
    return lax.expand_dims(array, range(ndim - array.ndim))


def shifted(array: jax.Array, by: int, axis: int) -> jax.Array:
    """Moves entries `by` places to the right along an axis, or to the left; zeros come in."""
    padding = [(0, 0, 0)] * array.ndim
    padding[axis] = (by, -by, 0)
    return lax.pad(array, jnp.zeros((), array.dtype), padding)
