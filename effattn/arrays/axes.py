"""Axes of length 1, written out where `jax_numpy_rank_promotion` may forbid NumPy to add them."""

import jax
from jax import lax


def lead(array: jax.Array, ndim: int) -> jax.Array:
    """With as many axes before its own as make `ndim` of them."""
    return lax.expand_dims(array, range(ndim - array.ndim))
