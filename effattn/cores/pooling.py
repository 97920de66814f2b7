"""Weighted means of keys and values over runs of tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import dtypes
from effattn.arrays.axes import fold


class Runs(NamedTuple):
    """Weighted means of keys and values over runs of tokens; at first, a run is one token.

    Attributes:
      logit: `(*B, P, K)`, log of the sum of the weights in each run.
      key: `(*B, P, K, H)`, mean keys, at least float32.
      value: `(*B, P, K, Hv)`, mean values, at least float32.
      present: int `(*B, P)`, valid tokens in each run; if 0, the other arrays are undefined.
    """

    logit: jax.Array
    key: jax.Array
    value: jax.Array
    present: jax.Array


def tokens(key, value, present, summary_query, scale) -> Runs:
    """Runs of single tokens; `present` is bool `(*B, S)`."""
    dtype = dtypes.wide(key, value)
    key, value = (jnp.where(present[..., None, None], x, 0).astype(dtype) for x in (key, value))
    logit = jnp.zeros_like(key[..., 0])
    if summary_query is not None:
        logit = jnp.asarray(scale, dtype) * (key * summary_query.astype(dtype)).sum(-1)
    return Runs(logit, key, value, present.astype(jnp.int32))


def pool(runs: Runs, size: int) -> Runs:
    """Merges every `size` consecutive runs, with weights softmax(logit)."""
    axis = runs.present.ndim
    runs = Runs(*(fold(x, size, axis - 1) for x in runs))
    lowest = dtypes.lowest(runs.logit.dtype)
    logit = jnp.where(runs.present[..., None] > 0, runs.logit, lowest)
    largest = lax.stop_gradient(logit.max(axis, keepdims=True))
    largest = jnp.where(largest == lowest, 0, largest)
    weights = jnp.exp(logit - largest)
    total = weights.sum(axis, keepdims=True)
    total = jnp.where(total == 0, 1, total)
    weights = weights / total

    def mean(array):
        # XLA's CPU backend is forty times slower at sums of products than at matrix products.
        return jnp.einsum("...sk,...skh->...kh", weights, array, precision="highest")

    return Runs(
        (largest + jnp.log(total)).squeeze(axis),
        mean(runs.key),
        mean(runs.value),
        runs.present.sum(axis, dtype=jnp.int32),
    )
