"""Product of projections, with a backward pass that is fast on CPUs."""

from typing import Any

import jax
from jax import lax

from effattn.arrays.linear_map import linear_map


def dot_general(*arguments: Any, **options: Any) -> jax.Array:
    """`jax.lax.dot_general`, for the argument `dot_general` of `flax.nnx.Linear`.

    Both gradients read the cotangent of the product. Reverse mode stores it first. Otherwise XLA
    computes it once more for the gradient of the weights, on CPUs column by column: on one core a
    training step of a layer of Gated DeltaNet then takes 1.5 times as long.
    """
    product = lax.dot_general(*arguments, **options)
    (product,) = linear_map(_same, _stored, [], [product])
    return product


def _same(known, linear):
    return linear


def _stored(known, cotangents):
    return lax.optimization_barrier(cotangents)
