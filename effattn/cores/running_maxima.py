"""Running maxima of tokens, also within packed documents; without gradients."""

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes
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
    changes = ids[..., 1:] != ids[..., :-1]
    edge = jnp.ones_like(ids[..., :1], bool)
    so_far = _maxima_since(x, jnp.concatenate([edge, changes], -1)[..., : ids.shape[-1]])
    ends = jnp.concatenate([changes, edge], -1)[..., : ids.shape[-1]]
    return _maxima_since(so_far, ends, reverse=True)
