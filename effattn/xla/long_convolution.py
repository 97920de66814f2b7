"""Long convolution by fast Fourier transform (FFT), causal or in both directions."""

import jax
import jax.numpy as jnp

from effattn.arrays import dtypes
from effattn.arrays.axes import lead


def long_convolution(x: jax.Array, filter: jax.Array, later: jax.Array | None = None) -> jax.Array:
    """Convolution of each feature: y_t = sum_(s <= t) filter_(t - s) * x_s, causal without `later`.

    With `later`, tokens after t add sum_(s > t) later_(s - t - 1) * x_s. All inputs are
    zero-padded, so that the convolution does not wrap around. Time is O(T D log T), memory O(T D).
    The FFT mixes all tokens, so a later token changes earlier outputs by rounding errors. Before
    JAX 0.12 the compiler gathers sharded batches for the FFT; shard by `jax.shard_map` there.

    Args:
      x: `(*B, T, D)`.
      filter: `(L, D)`; if L < T, the filter is zero from L on.
      later: `(L', D)`, taps of later tokens, of the dtype of `filter`; or None.

    Returns:
      `(*B, T, D)` in the promoted dtype of both, at least float32.
    """
    # Imported on first use: the import takes as long as that of all of effattn.
    from scipy.fft import next_fast_len

    time = x.shape[-2]
    filter = filter[:time]
    dtype = dtypes.wide(x, filter)
    before = 0 if later is None else min(len(later), max(time - 1, 0))
    size = next_fast_len(max(1, time + max(len(filter) - 1, before)), real=True)
    taps = filter.astype(dtype)
    if later is not None:
        # The tap of distance -n is n places before the end, as the transform is of a ring.
        ends = ((0, size - before - len(filter)), (0, 0))
        taps = jnp.concatenate([jnp.pad(taps, ends), jnp.flip(later[:before], 0).astype(dtype)])
    of_x, of_filter = (jnp.fft.rfft(a.astype(dtype), size, axis=-2) for a in (x, taps))
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
