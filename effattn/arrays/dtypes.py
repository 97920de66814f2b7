"""Dtype promotion, and finite stand-ins for -inf, that also work in JAX's strict modes.

`jax_numpy_dtype_promotion="strict"` forbids implicit promotion. `jax_debug_infs` raises an error
for infinities in any result of an eager operation or a compiled program.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def common(*given: Any) -> jnp.dtype:
    """The promoted dtype of arrays, dtypes or Python numbers."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*given)


def wide(*given: Any) -> jnp.dtype:
    """The promoted dtype, at least float32: for softmax, sums and states."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(jnp.result_type(*given), jnp.float32)


def widen(x: jax.Array) -> jax.Array:
    """x in at least float32."""
    return x.astype(wide(x.dtype))


def alike(*arrays: Any) -> list[jax.Array]:
    """Converts arrays or numbers to their common dtype."""
    dtype = common(*arrays)
    return [jnp.asarray(array, dtype) for array in arrays]


def product(*factors: Any) -> jax.Array:
    """The product of arrays in their common dtype."""
    return functools.reduce(operator.mul, alike(*factors))


def added(total: jax.Array, term: jax.Array) -> jax.Array:
    """The sum in the dtype of `total`, for sums of many terms."""
    return total + term.astype(total.dtype)


def lowest(dtype: Any) -> np.number[Any]:
    """Finite stand-in for -inf, the log-sum-exp of a row without keys.

    It is the second-lowest number of the dtype. The lowest number is left for biases that forbid
    pairs.
    """
    least: Any = jnp.finfo(dtype).min
    above: np.number[Any] = np.nextafter(least, np.zeros_like(least))[()]
    return above


def logarithms(x: jax.Array) -> jax.Array:
    """Replaces `lowest` by -inf, for results that the caller receives."""
    return jnp.where(x == lowest(x.dtype), -jnp.inf, x)
