"""Activations that modules store as attributes, as plain Python functions.

The activations of JAX are jit-compiled functions, which cannot be pickled and do not compare equal
after a copy of the module.
"""

import math

import jax
import jax.numpy as jnp

from effattn.arrays import dtypes


def silu(x: jax.Array) -> jax.Array:
    """x sigmoid(x)."""
    return jax.nn.silu(x)


def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x), with the distribution function Phi of the normal distribution."""
    return x * _distribution(x)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """gelu by its tanh approximation, x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    return jax.nn.gelu(x, approximate=True)


@jax.custom_jvp
def _distribution(x):
    """Phi(x). Its own derivative, as that of `erfc` fails in `jax.shard_map` with jax 0.12."""
    return jax.lax.erfc(-x * jnp.sqrt(0.5).astype(x.dtype)) / 2


@_distribution.defjvp
def _density(primals, tangents):
    (x,), (d_x,) = primals, tangents
    wide = dtypes.widen(x)
    density = jnp.exp(-(wide**2) / 2) / math.sqrt(2 * math.pi)
    return _distribution(x), density.astype(x.dtype) * d_x


def relu(x: jax.Array) -> jax.Array:
    """max(x, 0)."""
    return jnp.maximum(x, 0)


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x))."""
    return jax.nn.sigmoid(x)


def tanh(x: jax.Array) -> jax.Array:
    """Hyperbolic tangent."""
    return jnp.tanh(x)
