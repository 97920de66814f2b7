"""Checks of state spaces: rates of modes, step sizes and complex states."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays import checks, dtypes


def complex_numbers(name: str, value: Any, shape: Sequence[Any], wide: Any) -> jax.Array:
    """Checks complex numbers of a shape; returns them in the complex dtype of `wide`.

    A string in the shape, such as "D" in `("D", 4)`, allows any size of that axis.
    """
    array = checks.as_array(name, value)
    fits = array.ndim == len(shape) and all(
        isinstance(size, str) or size == given
        for size, given in zip(shape, array.shape, strict=True)
    )
    if not fits or not jnp.iscomplexobj(array):
        sizes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(
            f"{name} must be complex of shape ({sizes}), got {array.dtype} of shape {array.shape}"
        )
    return array.astype(dtypes.common(wide, jnp.complex64))


def rates(name: str, value: Any, shape: Sequence[Any], wide: Any) -> jax.Array:
    """Checks the rates of modes: `complex_numbers`; if concrete, nonzero, real parts 0 or less."""
    array, numbers = complex_numbers(name, value, shape, wide), checks.known(value)
    if numbers is not None and (numbers == 0).any():
        raise ValueError(f"{name} must be nonzero, because inputs are divided by it, got 0")
    if numbers is not None and (numbers.real > 0).any():
        raise ValueError(
            f"{name} must have real parts of 0 or less, got up to {numbers.real.max():.4g}; a mode "
            "with a rate above 0 grows without bound"
        )
    return array


def steps(value: Any, shape: tuple[int, ...]) -> jax.Array:
    """Checks the step sizes of a state space: of that shape and, if concrete, 0 or more."""
    checks.between("step_size", value, 0)
    return checks.shaped("step_size", value, shape)
