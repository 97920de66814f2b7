"""Explicit axes of length 1, for users who forbid rank promotion (`jax_numpy_rank_promotion`)."""

import jax
from jax import lax


def lead(array: jax.Array, ndim: int) -> jax.Array:
    """Adds leading axes of length 1, up to `ndim` axes."""
    return lax.expand_dims(array, range(ndim - array.ndim))
