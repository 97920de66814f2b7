"""Long causal convolution by fast Fourier transform (FFT)."""

import jax
import jax.numpy as jnp

from effattn.arrays import dtypes
from effattn.arrays.axes import lead


def long_convolution(x: jax.Array, filter: jax.Array) -> jax.Array:
    """Causal convolution of each feature: y_t = sum_(s <= t) filter_(t - s) * x_s.

    Both inputs are zero-padded, so that the convolution does not wrap around. Time is O(T D log T),
    memory O(T D). The FFT mixes all tokens, so a later token changes earlier outputs by rounding
    errors. Before JAX 0.12 the compiler gathers sharded batches for the FFT; shard by
    `jax.shard_map` there.

    Args:
      x: `(*B, T, D)`.
      filter: `(L, D)`; if L < T, the filter is zero from L on.

    Returns:
      `(*B, T, D)` in the promoted dtype of both, at least float32.
    """
    # Imported on first use: the import takes as long as that of all of effattn.
    from scipy.fft import next_fast_len

    time = x.shape[-2]
    filter = filter[:time]
    dtype = dtypes.wide(x, filter)
    size = next_fast_len(max(1, time + filter.shape[0] - 1), real=True)
    of_x, of_filter = (jnp.fft.rfft(a.astype(dtype), size, axis=-2) for a in (x, filter))
    return jnp.fft.irfft(of_x * lead(of_filter, x.ndim), size, axis=-2)[..., :time, :]


def long_convolution_at(cached: jax.Array, filter: jax.Array, positions: jax.Array) -> jax.Array:
    """Outputs of `long_convolution` at the given positions, for decoding.

    One position costs O(S D). Several positions cost a convolution of length S.

    Args:
      cached: `(B, S, D)`, the inputs x so far, and zeros after them.
      filter: `(L, D)`, with L >= S.
      positions: int `(B, P)`.

    Returns:
      `(B, P, D)`.
    """
    capacity = cached.shape[1]
    if positions.shape[1] != 1:
        y = long_convolution(cached, filter)
        return jnp.take_along_axis(y, positions[..., None], 1, mode="clip")
    dtype = dtypes.wide(cached, filter)
    age = positions - jnp.arange(capacity)[None]
    taps = jnp.take(filter.astype(dtype), age, 0, mode="clip")
    taps = jnp.where((age >= 0)[..., None], taps, 0)
    return (taps * cached.astype(dtype)).sum(1, keepdims=True)
