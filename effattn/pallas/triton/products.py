"""Matrix products of the Triton kernels."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton


def dot(left: jax.Array, right: jax.Array, precision: Any, *, interpreted: Any) -> jax.Array:
    """Returns a matrix product with float32 sums, on tensor cores.

    In precision HIGHEST a float32 product is three products of TensorFloat-32: each operand is
    split into its TensorFloat-32 part and the rest. The result is exact to about 2**-22. The
    interpreter uses float32 directly.

    Args:
      left: `(m, k)`.
      right: `(k, n)`, of the same dtype.
      precision: precision of the product.
      interpreted: whether the kernel is interpreted.
    """
    exact = precision == lax.Precision.HIGHEST and left.dtype == jnp.float32
    if exact and not interpreted:
        precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return triton.dot(left, right, precision=precision)
