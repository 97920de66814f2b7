"""Rotary angles position * frequency, accurate at any integer position."""

import jax
import jax.numpy as jnp
import numpy as np


def angles(positions: jax.Array, frequencies: np.ndarray, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Angles `position * frequency`, modulo 2 pi.

    A float32 product is wrong by a whole radian at position 2**24. For float32, the frequency is
    therefore a 64-bit fixed-point number of turns, and the product is computed in integers, whose
    overflow drops whole turns. The error is below 1e-6 at every int32 position, and compilers
    cannot change it.

    Args:
      positions: integers `(*#L)`, up to 2**31.
      frequencies: float64 `(*#L)`, radians per position; concrete, not traced.
      dtype: float32 or float64. In float64 the plain product is exact to 1e-9 at 2**24.

    Returns:
      Angles in radians, of the broadcast shape; in float32 between -pi and pi.
    """
    if jnp.dtype(dtype).itemsize > 4:
        return positions.astype(dtype) * jnp.asarray(frequencies, dtype)
    high, low = _words(frequencies)
    place = positions.astype(jnp.int32)
    unsigned = place.astype(jnp.uint32)
    # As uint32 a negative position is too large by 2**32.
    turns = unsigned * high + _upper(unsigned, low) - jnp.where(place < 0, low, np.uint32(0))
    return turns.astype(jnp.int32).astype(dtype) * np.asarray(2 * np.pi / 2**32, dtype)


def _words(frequencies):
    """Frequencies in turns, as 64-bit fixed-point fractions: their upper and lower 32 bits."""
    scaled = np.mod(np.asarray(frequencies, np.float64) / (2 * np.pi), 1) * 2.0**32
    high = np.floor(scaled)
    low = np.floor((scaled - high) * 2.0**32)
    return high.astype(np.uint32), low.astype(np.uint32)


def _upper(a, b):
    """Upper 32 bits of the 64-bit product of two uint32, from products of 16-bit halves."""
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    first = a_high * b_low + (a_low * b_low >> half)
    second = a_low * b_high + (first & mask)
    return a_high * b_high + (first >> half) + (second >> half)
