"""Transposed chunks of keys, whose rows kernels read as vectors of keys."""

import jax
import jax.numpy as jnp

CHUNK = 64  # keys


def whole(x: jax.Array, axis: int, size: int, fill: int = 0) -> jax.Array:
    """The array, filled up after the end of an axis to a multiple of the size."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, padding, constant_values=fill)


def chunks_of(x: jax.Array) -> jax.Array:
    """Keys `(*B, S, H)`, S a multiple of `CHUNK`, as `(*B, S / CHUNK, H, CHUNK)`."""
    *batch, keys, size = x.shape
    return jnp.swapaxes(x.reshape(*batch, keys // CHUNK, CHUNK, size), -1, -2)
