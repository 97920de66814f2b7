"""Activations that modules store as attributes, as plain Python functions.

The activations of JAX are jit-compiled functions, which cannot be pickled and do not compare equal
after a copy of the module.
"""

import jax
import jax.numpy as jnp


def silu(x: jax.Array) -> jax.Array:
    """x sigmoid(x)."""
    return jax.nn.silu(x)


def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x), with the distribution function Phi of the normal distribution."""
    return jax.nn.gelu(x, approximate=False)


def relu(x: jax.Array) -> jax.Array:
    """max(x, 0)."""
    return jnp.maximum(x, 0)


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x))."""
    return jax.nn.sigmoid(x)


def tanh(x: jax.Array) -> jax.Array:
    """Hyperbolic tangent."""
    return jnp.tanh(x)
