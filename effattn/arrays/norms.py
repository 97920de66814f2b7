"""Layer norm without parameters."""

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes


def layer_norm(x: jax.Array, epsilon: float) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) over the last axis, in at least float32."""
    x = dtypes.widen(x)
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
