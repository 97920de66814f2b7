"""Running maxima of tokens, also decaying or within packed documents; without gradients."""

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes
from effattn.arrays.segments import first_of_runs, last_of_runs
from effattn.cores import passed_states, sequence_parts
from effattn.xla.linear_scan import max_plus_scan


def running_maxima(
    first: jax.Array, x: jax.Array, starts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The running maximum of `first` and `x (*B, S, K)`, before and after each token.

    The maximum restarts at `starts (*B, S)`.
    """
    first = first[..., None, :]
    x = jnp.concatenate([jnp.maximum(first, x[..., :1, :]), x[..., 1:, :]], -2)
    if starts is None:
        after = lax.cummax(x, axis=x.ndim - 2)
    else:
        after = _maxima_since(x, starts)
    return jnp.concatenate([first, after], -2)[..., :-1, :], after


def units_of_keys(
    first: jax.Array,
    x: jax.Array,
    starts: jax.Array | None,
    *,
    is_causal: bool,
    ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Maxima M of exponents `x (*B, S, K)`: features of keys are divided by exp(M).

    Args:
      first: `(*B, K)`, the maximum before the first key; the lowest number if there is none.
      x: exponents, the lowest number for keys that are padding.
      starts: bool `(*B, S)`, keys at which a causal maximum restarts; None for none.
      is_causal: whether the maximum of a key leaves out later keys.
      ids: segment ids `(*B, S)` of a bidirectional call; None for one document.

    Returns:
      M of each key, `(*B, S, K)`; the log decay of the sums at each key, of the same shape, zeros
      if not causal; and M after all keys, `(*B, K)`.
    """
    if is_causal:
        before, after = running_maxima(first, x, starts)
        last = first if after.shape[-2] == 0 else after[..., -1, :]
        log_decay = log_ratio(before, after)
        if starts is not None:  # the recurrence resets the sums there, and reads no decay
            log_decay = jnp.where(starts[..., None], 0, log_decay)
        return after, log_decay, last
    if ids is not None:
        return maxima_of_documents(x, ids), jnp.zeros_like(x), first
    last = jnp.maximum(first, jnp.max(x, -2, initial=dtypes.lowest(x.dtype)))
    return jnp.broadcast_to(last[..., None, :], x.shape), jnp.zeros_like(x), last


def log_ratio(before: jax.Array, after: jax.Array) -> jax.Array:
    """The difference of two maxima; 0 where there is no maximum before."""
    nothing = before == dtypes.lowest(before.dtype)
    return jnp.where(nothing, 0, before) - jnp.where(nothing, 0, after)


def decaying_maxima(
    first: jax.Array, change: jax.Array, x: jax.Array, starts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The maxima m_t = max(change_t + m_(t-1), x_t), before and after each token `(*B, S, K)`.

    m_0 is `first (*B, K)`. At `starts (*B, S)`, m_t is x_t.
    """
    if starts is not None:
        change = jnp.where(starts[..., None], dtypes.lowest(change.dtype), change)
    change, x = (jnp.moveaxis(a, -2, 0)[None] for a in (change, x))
    (after,) = max_plus_scan(change, x, first[None])
    after = jnp.moveaxis(after, 0, -2)
    return jnp.concatenate([first[..., None, :], after], -2)[..., :-1, :], after


def maximum_of_parts(
    name: str, first: jax.Array, change: jax.Array, x: jax.Array, starts: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The decaying maximum before this device's part of the sequence, and after the whole sequence.

    The arguments after `name`, that of the function for messages, are those of `decaying_maxima`.
    Outside of `sequence_parts.along`, the results are `first` and None.
    """
    parts = sequence_parts.parts_for(name, "pass_states")
    if parts is None:
        return first, None
    lowest = dtypes.lowest(x.dtype)
    _, own = decaying_maxima(jnp.full_like(first, lowest), change, x, starts)
    total = change.sum(-2)
    if starts is not None:
        total = jnp.where(starts.any(-1)[..., None], lowest, total)
    pair = total, own[..., -1, :]
    return passed_states.chained(parts, pair, first, lambda m, p: jnp.maximum(p[0] + m, p[1]))


def _maxima_since(x, starts, reverse=False):
    """The running maximum of `x (*B, S, K)` since the last of `starts (*B, S)`."""
    x, starts = (jnp.moveaxis(a, axis, 0) for a, axis in ((x, -2), (starts, -1)))
    if reverse:
        x, starts = x[::-1], starts[::-1]
    lowest = dtypes.lowest(x.dtype)
    change = jnp.broadcast_to(jnp.where(starts, lowest, 0).astype(x.dtype)[..., None], x.shape)
    initial = jnp.full(x.shape[1:], lowest, x.dtype)
    (largest,) = max_plus_scan(change[None], x[None], initial[None])
    return jnp.moveaxis(largest[::-1] if reverse else largest, 0, -2)


def maxima_of_documents(x: jax.Array, ids: jax.Array) -> jax.Array:
    """The maximum of `x (*B, S, K)` over each contiguous run of equal ids."""
    so_far = _maxima_since(x, first_of_runs(ids))
    return _maxima_since(so_far, last_of_runs(ids), reverse=True)
