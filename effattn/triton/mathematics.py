"""Functions in the Triton language that Triton itself lacks."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh(x): by exponentials that never overflow, and near 0, where they cancel, by a series."""
    small = tl.exp(-2 * tl.abs(x))
    size = (1 - small) / (1 + small)
    square = x * x
    series = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(tl.abs(x) < 0.15, series, tl.where(x < 0, -size, size))


@triton.jit
def log1p(x):
    """log(1 + x), exact to rounding also for small x, of which the sum u = 1 + x loses digits.

    The factor x / (u - 1) corrects the logarithm of u for them.
    """
    u = 1 + x
    rounded = tl.where(u == 1, 1.0, u - 1)
    return tl.where(u == 1, x, tl.where(tl.abs(x) < 0.5, tl.log(u) * (x / rounded), tl.log(u)))
