"""Products of low-precision arrays that accumulate in a wider dtype."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def widened(
    product: Callable[..., jax.Array], left: jax.Array, right: jax.Array, dtype: Any
) -> jax.Array:
    """Computes `product(left, right, preferred_element_type=dtype)` on every device.

    XLA's CPU runtime supports bfloat16 products with float32 results for some shapes only. On CPUs
    the operands are therefore converted to `dtype` first, which is exact.
    """

    def narrow(left, right):
        return product(left, right, preferred_element_type=dtype)

    def wide(left, right):
        return narrow(left.astype(dtype), right.astype(dtype))

    if left.dtype == right.dtype == dtype:
        return narrow(left, right)
    return lax.platform_dependent(left, right, cpu=wide, default=narrow)
