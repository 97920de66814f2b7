"""Activations that modules keep: plain functions, which copies and pickles of a module share.

JAX's own are compiled functions, of which each copy is another and no pickle can be made.
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
    """The hyperbolic tangent."""
    return jnp.tanh(x)
