"""The causal convolution with a filter as long as the sequence, by Fourier transforms."""

import jax
import jax.numpy as jnp

from effattn.arrays import dtypes
from effattn.arrays.axes import lead


def long_convolution(x: jax.Array, filter: jax.Array) -> jax.Array:
    """y_t = sum_(s <= t) filter_(t - s) * x_s, each feature by itself.

    Both are padded to a length without wrapping round. Time is O(T D log T), memory O(T D).
    Every output is rounded as all are, so that a later token moves an earlier output by rounding.
    Before JAX 0.12 the compiler gathers sharded batches for transforms; there, shard by
    `jax.shard_map`.

    Args:
      x: `(*B, T, D)`.
      filter: `(L, D)`; if L < T, the filter is zero beyond.

    Returns:
      `(*B, T, D)` in the promoted dtype of both, at least float32.
    """
    # Imported on use: it takes as long as all of the library.
    from scipy.fft import next_fast_len

    time = x.shape[-2]
    filter = filter[:time]
    dtype = dtypes.wide(x, filter)
    size = next_fast_len(max(1, time + filter.shape[0] - 1), real=True)
    of_x, of_filter = (jnp.fft.rfft(a.astype(dtype), size, axis=-2) for a in (x, filter))
    return jnp.fft.irfft(of_x * lead(of_filter, x.ndim), size, axis=-2)[..., :time, :]


def long_convolution_at(cached: jax.Array, filter: jax.Array, positions: jax.Array) -> jax.Array:
    """The outputs of `long_convolution` at some positions.

    One position costs O(S D), more of them the whole convolution.

    Args:
      cached: `(B, S, D)`, x, and zeros where no token is yet.
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
