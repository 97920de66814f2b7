"""Dropout, and the random keys for it: modules keep no random state of their own.

A call has dropout where it is given `rngs`, and none without. `train()` and `eval()` of Flax set
attributes that no module here has, and so change nothing.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks


def dropout_key(rngs: nnx.Rngs | nnx.RngStream | jax.Array | None) -> jax.Array | None:
    """One key from what a caller passes as `rngs`: `nnx.Rngs`, a stream, a key, or nothing."""
    if isinstance(rngs, nnx.Rngs):
        return rngs.dropout()
    if isinstance(rngs, nnx.RngStream):
        return rngs()
    return None if rngs is None else checks.key("rngs", rngs)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes each element with probability `rate` and scales the rest; nothing without a key."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0)


def check_dropout_rate(rate: float) -> None:
    """`ValueError` unless the rate is in [0, 1)."""
    checks.share("dropout_rate", rate)
