"""Dropout and its random keys; modules store no random state.

A call applies dropout if it gets `rngs`, and only then. The methods `train()` and `eval()` of Flax
have no effect on modules of this library.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks


def dropout_key(rngs: nnx.Rngs | nnx.RngStream | jax.Array | None) -> jax.Array | None:
    """Dropout key from the argument `rngs`: an `nnx.Rngs`, a stream, a key, or None."""
    if isinstance(rngs, nnx.Rngs):
        return rngs.dropout()
    if isinstance(rngs, nnx.RngStream):
        return rngs()
    return None if rngs is None else checks.key("rngs", rngs)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability `rate` and scales the rest; returns x if key is None."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(kept, x / (1.0 - rate), 0)


def check_dropout_rate(rate: float) -> None:
    """Raises `ValueError` unless the rate is in [0, 1)."""
    checks.share("dropout_rate", rate)
