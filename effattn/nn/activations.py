"""Activations that modules store as attributes, as plain Python functions.

The activations of JAX are jit-compiled functions, which cannot be pickled and do not compare equal
after a copy of the module.
"""

import jax
import jax.numpy as jnp


def silu(x: jax.Array) -> jax.Array:
    """x sigmoid(x)."""
    return jax.nn.silu(x)


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x))."""
    return jax.nn.sigmoid(x)


def tanh(x: jax.Array) -> jax.Array:
    """Hyperbolic tangent."""
    return jnp.tanh(x)
