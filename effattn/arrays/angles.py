"""Angles in proportion to integer positions, exact to rounding at any position."""

import jax
import jax.numpy as jnp
import numpy as np


def angles(positions: jax.Array, frequencies: np.ndarray, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`position * frequency`, modulo 2 pi.

    A product in float32 is wrong by a whole radian at position 2**24. In 32 bits the frequency is
    thus a fixed-point number of turns, of 64 bits, and its product with the position is one of
    integers, whose overflow drops the whole turns: the error is below 1e-6 at every position of
    int32, and no compiler can change it.

    Args:
      positions: integers `(*#L)`, up to 2**31.
      frequencies: float64 `(*#L)`, radians a position, known before running.
      dtype: float32, or float64, in which the plain product is exact to 1e-9 at 2**24.

    Returns:
      Radians of the broadcast shape: within half a turn of 0 in float32.
    """
    if jnp.dtype(dtype).itemsize > 4:
        return positions.astype(dtype) * jnp.asarray(frequencies, dtype)
    high, low = _words(frequencies)
    place = positions.astype(jnp.int32)
    unsigned = place.astype(jnp.uint32)
    # A negative position is 2**32 too large there.
    turns = unsigned * high + _upper(unsigned, low) - jnp.where(place < 0, low, np.uint32(0))
    return turns.astype(jnp.int32).astype(dtype) * np.asarray(2 * np.pi / 2**32, dtype)


def _words(frequencies):
    """The upper and the lower 32 bits of the fraction of a turn in 64."""
    scaled = np.mod(np.asarray(frequencies, np.float64) / (2 * np.pi), 1) * 2.0**32
    high = np.floor(scaled)
    low = np.floor((scaled - high) * 2.0**32)
    return high.astype(np.uint32), low.astype(np.uint32)


def _upper(a, b):
    """The upper 32 of the 64 bits of products of uint32, from those of 16 bits."""
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & mask, b >> half, b & mask
    first = a_high * b_low + (a_low * b_low >> half)
    second = a_low * b_high + (first & mask)
    return a_high * b_high + (first >> half) + (second >> half)
