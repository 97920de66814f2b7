"""AFT-conv mixer."""

from typing import Unpack

import jax.numpy as jnp

from effattn.arrays import checks
from effattn.nn.attention_free import BiasedAFT, bias_init
from effattn.nn.layers import Layers
from effattn.nn.options import Projected


class AFTConv(BiasedAFT):
    """AFT with biases that depend on the distance (Zhai et al. 2021, section 3.3).

    As `AFTLocal`, with w_ts = taps_(t - s). Each head (a group of features) has its own taps. Time
    is O(T W D); the length is not limited.

    Args:
      num_heads: G, number of feature groups, a divisor of D.
      local_window_size: W, number of taps on each side of the token.
      **options: see `effattn.nn.options.Projected`.
    """

    _mechanism = "aft_conv"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        local_window_size: int = 31,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        checks.at_least("num_heads", num_heads, 1, "heads")
        if in_features % num_heads:
            raise ValueError(
                f"in_features ({in_features}) must be a multiple of num_heads ({num_heads})"
            )
        self.window = checks.at_least("local_window_size", local_window_size, 0, "tokens")
        taps = (1 if self.is_causal else 2) * self.window + 1
        self.taps = Layers(**options).drawn(bias_init, num_heads, taps)

    def _bias(self):
        return self.taps[...]

    def _bias_at(self, position, capacity):
        distance = position[:, None] - jnp.arange(capacity)[None]
        taps = jnp.take(self.taps[...], distance, 1, mode="clip")
        taps = jnp.where(distance <= self.window, taps, 0)
        return jnp.repeat(jnp.moveaxis(taps, 0, -1), self.in_features // len(self.taps[...]), -1)
