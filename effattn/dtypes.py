"""Common dtypes, explicitly: `jax_numpy_dtype_promotion` may forbid JAX to promote unasked."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp


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
