"""Learned biases by buckets of relative positions, as a `score_mod`."""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from effattn.arrays import checks
from effattn.nn.layers import Layers
from effattn.nn.module import Module
from effattn.nn.options import Parameters


def relative_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
    """Bucket of each distance from 0 to `max_distance`, int32.

    The first half of the buckets is for one distance each, the others for ranges that grow by a
    constant factor up to `max_distance`, from which on all distances share the last bucket.
    """
    exact = num_buckets // 2
    distance = np.arange(max_distance + 1)
    # In float32, as in T5, because rounding decides at the borders of the ranges.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    ratio = ratio / np.float32(np.log(max_distance / exact)) * np.float32(num_buckets - exact)
    far = np.minimum(exact + ratio.astype(np.int32), num_buckets - 1)
    return np.where(distance < exact, distance, far).astype(np.int32)


class RelativePositionBias(Module):
    """Relative position biases of T5 as a `score_mod`: adds a learned number for each head.

    The number is that of the bucket of the distance between query and key (`relative_buckets`); in
    bidirectional attention, half of the buckets are for keys after the query. In T5, all layers
    share the biases of the first one, and logits are not divided by sqrt(H) (`scale=1.0`). Here
    each layer that is given the module learns a separate copy.

        mixer = nn.SelfAttention(64, 4, score_mod=nn.RelativePositionBias(4, rngs=rngs), rngs=rngs)

    Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer".

    Args:
      num_heads: N, number of query heads.
      num_buckets: number of buckets of a head, even; a multiple of 4 if bidirectional.
      max_distance: distance from which on all keys have one bucket.
      is_causal: as in the attention; True if no query attends to later keys.
      **options: see `effattn.nn.options.Parameters`.

    Raises:
      ValueError: numbers of buckets or distances that do not fit.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        is_causal: bool = True,
        **options: Unpack[Parameters],
    ):
        heads = checks.at_least("num_heads", num_heads, 1, "heads")
        self.num_heads, self.is_causal = heads, checks.flag("is_causal", is_causal)
        sides = 1 if is_causal else 2
        buckets = checks.at_least("num_buckets", num_buckets, 2 * sides, "buckets")
        if buckets % (2 * sides):
            raise ValueError(
                f"num_buckets must be a multiple of {2 * sides} with is_causal={is_causal}, got "
                f"{num_buckets}"
            )
        self.num_buckets, self.buckets_of_side = buckets, buckets // sides
        self.max_distance = checks.at_least(
            "max_distance", max_distance, self.buckets_of_side // 2 + 1, "tokens"
        )
        init = nnx.initializers.normal(0.02)
        self.bias = Layers(**options).drawn(init, heads, buckets)

    def __call__(self, logit, b, h, i, j) -> jax.Array:
        """The logit of query position i and key position j in head h, with its bias."""
        buckets = jnp.asarray(relative_buckets(self.buckets_of_side, self.max_distance))
        bucket = buckets[jnp.minimum(jnp.abs(i - j), self.max_distance)]
        if not self.is_causal:
            bucket = bucket + jnp.where(j > i, self.buckets_of_side, 0)
        return logit + jnp.asarray(self.bias[...])[h, bucket].astype(logit.dtype)
