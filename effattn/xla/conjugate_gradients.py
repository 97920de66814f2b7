"""Conjugate gradients for many vectors at once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import mesh_axes


def conjugate_gradients(
    product: Callable[[jax.Array], jax.Array], right: jax.Array, num_steps: int
) -> jax.Array:
    """The solution x of `product(x) = right`, for each vector along the last axis.

    `product` is a symmetric positive definite map of each vector.
    """

    def dot(a, b):
        return jnp.sum(a * b, -1, keepdims=True)

    def ratio(a, b):
        """a / b, and 0 for a residual of zero, or one that has underflowed."""
        return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)

    def step(carry, _):
        x, residual, direction, square = carry
        image = product(direction)
        length = ratio(square, dot(direction, image))
        x, residual = x + length * direction, residual - length * image
        after = dot(residual, residual)
        return (x, residual, residual + ratio(after, square) * direction, after), None

    start = mesh_axes.vary_like(right, jnp.zeros_like(right)), right, right, dot(right, right)
    return lax.scan(step, start, None, num_steps)[0][0]
