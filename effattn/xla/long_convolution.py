"""Long convolution by fast Fourier transform (FFT), causal or in both directions."""

import jax
import jax.numpy as jnp
import numpy as np

from effattn.arrays import dtypes
from effattn.arrays.axes import lead

# The largest half of a block of packed tokens that is convolved by a matrix product.
_BY_PRODUCT = 16


def long_convolution(
    x: jax.Array,
    filter: jax.Array,
    later: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Convolution of each feature: y_t = sum_(s <= t) filter_(t - s) * x_s, causal without `later`.

    With `later`, tokens after t add sum_(s > t) later_(s - t - 1) * x_s. All inputs are
    zero-padded, so that the convolution does not wrap around. Time is O(T D log T), memory O(T D).
    The FFT mixes all tokens, so a later token changes earlier outputs by rounding errors. Before
    JAX 0.12 the compiler gathers sharded batches for the FFT; shard by `jax.shard_map` there.

    With `segment_ids`, a token reads its own document only, and time is O(T D log^2 T).

    Args:
      x: `(*B, T, D)`.
      filter: `(L, D)`; if L < T, the filter is zero from L on.
      later: `(L', D)`, taps of later tokens, of the dtype of `filter`; or None.
      segment_ids: int `(*B, T)`, or None; equal ids are one contiguous run.

    Returns:
      `(*B, T, D)` in the promoted dtype of both, at least float32.
    """
    if segment_ids is not None:
        y = _within_documents(x, filter, segment_ids)
        if later is None:
            return y
        backward, ids = jnp.flip(x, -2), jnp.flip(segment_ids, -1)
        of_later = _within_documents(backward, jnp.pad(later, ((1, 0), (0, 0))), ids)
        return y + jnp.flip(of_later, -2)
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


def _within_documents(x, filter, segment_ids):
    """Convolves each document by itself, in blocks that double in size.

    The outputs in a block of 2 n tokens are those in its halves, and for the second half those by
    tokens of the first half. At most one document is in both halves.
    """
    time, dtype = x.shape[-2], dtypes.wide(x, filter)
    blocks = 2 ** max(time - 1, 0).bit_length()
    spare = blocks - time
    x = jnp.pad(x.astype(dtype), [*[(0, 0)] * (x.ndim - 2), (0, spare), (0, 0)])[..., None, :]
    ids = jnp.pad(segment_ids, [*[(0, 0)] * (segment_ids.ndim - 1), (0, spare)])[..., None]
    taps = filter[:time].astype(dtype)
    taps = jnp.pad(taps, ((0, blocks - taps.shape[0]), (0, 0)))
    y, size = x * lead(taps[:1], x.ndim), 1  # (*B, blocks, size, D)
    while size < blocks:
        (first, second), (of_first, of_second) = _halves(x, -3), _halves(ids, -2)
        border = of_first[..., -1:]
        read, reads = border == of_first, border == of_second
        later = _later(jnp.where(read[..., None], first, 0), taps[: 2 * size])
        one, other = _halves(y, -3)
        y = jnp.concatenate([one, other + jnp.where(reads[..., None], later, 0)], -2)
        x = jnp.concatenate([first, second], -2)
        ids = jnp.concatenate([of_first, of_second], -1)
        size *= 2
    return y[..., 0, :time, :]


def _halves(array, axis):
    """The even and the odd blocks of an array with blocks along `axis`."""
    axis %= array.ndim
    shape = array.shape
    pairs = array.reshape(*shape[:axis], shape[axis] // 2, 2, *shape[axis + 1 :])
    return (jax.lax.index_in_dim(pairs, n, axis + 1, keepdims=False) for n in (0, 1))


def _later(x, taps):
    """The outputs of the n tokens after x `(..., n, D)` by x alone; `taps (2 n, D)`."""
    size = x.shape[-2]
    if size <= _BY_PRODUCT:
        ages = size + np.arange(size)[:, None] - np.arange(size)
        return jnp.einsum("...jd,ijd->...id", x, taps[ages], precision="highest")
    of_x, of_taps = (jnp.fft.rfft(a, 2 * size, axis=-2) for a in (x, taps))
    return jnp.fft.irfft(of_x * lead(of_taps, x.ndim), 2 * size, axis=-2)[..., size:, :]


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
