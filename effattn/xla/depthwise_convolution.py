"""Depthwise convolution over tokens with a short kernel."""

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays.axes import lead
from effattn.arrays.linear_map import with_derivatives


def convolve(value: jax.Array, kernel: jax.Array) -> jax.Array:
    """Depthwise convolution of `value (*B, L, N, Hv)` by `kernel (N, width)`, zero padded."""
    return _convolved(None, value, kernel)


def _convolve(_, value, kernel):
    taps = _taps(value, kernel.shape[-1])
    return sum(lead(kernel[:, w, None], value.ndim) * taps(w) for w in range(kernel.shape[-1]))


def _convolve_bwd(_, residuals, cotangent):
    """A convolution and a loop; JAX's own derivative would store the values once a tap."""
    value, kernel = residuals
    width = kernel.shape[-1]
    taps, axes = _taps(value, width), (*range(value.ndim - 2), value.ndim - 1)
    d_kernel = lax.map(lambda w: (cotangent * taps(w)).sum(axes), jnp.arange(width))
    return convolve(cotangent, jnp.flip(kernel, -1)), d_kernel.T


_convolved = with_derivatives(
    _convolve, lambda _, *operands: (_convolve(_, *operands), operands), _convolve_bwd
)


def _taps(x, width):
    """A function of w: `x (*B, L, N, Hv)` shifted to tokens t + w - (width - 1) / 2."""
    axis, length = x.ndim - 3, x.shape[-3]
    padding = [(0, 0)] * x.ndim
    padding[axis] = (width // 2, width // 2)
    padded = jnp.pad(x, padding)
    return lambda w: lax.dynamic_slice_in_dim(padded, w, length, axis)
