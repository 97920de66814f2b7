"""Common dtypes and limits of dtypes, for programs that JAX watches closely.

`jax_numpy_dtype_promotion` may forbid JAX to promote unasked, and `jax_debug_infs` stops at
infinities in any array that an operation by itself, or a compiled program, returns.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def common(*given: Any) -> jnp.dtype:
    """The dtype to which arrays, dtypes or Python numbers promote together."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*given)


def wide(*given: Any) -> jnp.dtype:
    """The same, but at least float32: for softmax, sums and states."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(jnp.result_type(*given), jnp.float32)


def alike(*arrays: Any) -> list[jax.Array]:
    """The arrays, or numbers, in their common dtype."""
    dtype = common(*arrays)
    return [jnp.asarray(array, dtype) for array in arrays]


def product(*factors: Any) -> jax.Array:
    """The product of arrays in their common dtype."""
    return functools.reduce(operator.mul, alike(*factors))


def lowest(dtype: Any) -> np.number[Any]:
    """Stands for -inf, as the logarithm of nothing: below all numbers, and finite.

    One above the least number of the dtype, which biases use to forbid pairs.
    """
    least: Any = jnp.finfo(dtype).min
    above: np.number[Any] = np.nextafter(least, np.zeros_like(least))[()]
    return above


def logarithms(x: jax.Array) -> jax.Array:
    """With -inf in place of `lowest`, for the caller."""
    return jnp.where(x == lowest(x.dtype), -jnp.inf, x)
