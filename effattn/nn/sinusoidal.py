"""Sinusoidal position vectors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import checks, dtypes
from effattn.arrays.angles import angles
from effattn.arrays.axes import lead


def sinusoidal_positions(
    positions: jax.Array, features: int, dtype: Any = jnp.float32
) -> jax.Array:
    """Sinusoidal position vectors (Vaswani et al. 2017, "Attention Is All You Need").

        entry 2m = sin(position / 10000**(2m / D)),   entry 2m + 1 = cos(the same angle)

    Args:
      positions: `(*B, T)`, int.
      features: D, even.
      dtype: dtype of the result; angles are computed in at least float32.

    Returns:
      `(*B, T, D)`.

    Raises:
      ValueError: an odd number of features, or positions that are not integers.
    """
    checks.at_least("features", features, 2)
    if features % 2:
        raise ValueError(f"sinusoidal positions need an even number of features, got {features}")
    positions = checks.as_array("positions", positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"positions must be integers, got dtype {positions.dtype}")
    frequency = 10000.0 ** (-np.arange(0, features, 2) / features)
    frequency = frequency.reshape((1,) * positions.ndim + (-1,))
    angle = angles(lead(positions[..., None], positions.ndim + 1), frequency, dtypes.wide(dtype))
    waves = jnp.stack([jnp.sin(angle), jnp.cos(angle)], -1)
    return waves.reshape(*positions.shape, features).astype(dtype)
