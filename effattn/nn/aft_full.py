"""AFT-full mixer."""

from typing import Unpack

import jax.numpy as jnp

from effattn.arrays import checks
from effattn.nn.attention_free import BiasedAFT, bias_init
from effattn.nn.layers import Layers
from effattn.nn.options import Projected


class AFTFull(BiasedAFT):
    """AFT with a bias per pair of positions (Zhai et al. 2021, sections 3.1 and 4).

        y = attention_free(x W_q, x W_k, x W_v, w) W_o,   w_ts = u_t . c_s

    The biases are factorised, as in the paper. Time is O(T^2 D), memory O(T D).

    Args:
      max_length: number of positions with factors; maximum number of tokens per row. Positions
        count from the start of each packed document.
      rank: R, size of the factors u_t and c_s.
      **options: see `effattn.nn.options.Projected`.

    Raises:
      ValueError: in calls, more tokens than `max_length`.
    """

    _mechanism = "aft_full"
    _limited = True

    def __init__(
        self,
        in_features: int,
        *,
        max_length: int,
        rank: int = 128,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        self.max_length = checks.at_least("max_length", max_length, 1, "tokens")
        make, rank = Layers(**options), checks.at_least("rank", rank, 1, "features")
        self.row_bias, self.column_bias = (
            make.drawn(bias_init, max_length, rank) for _ in range(2)
        )

    def _bias(self):
        return self.row_bias[...], self.column_bias[...]

    def _bias_at(self, position, capacity):
        row, column = self._bias()
        slots = jnp.arange(capacity)
        bias = jnp.take(row, position, 0, mode="clip") @ jnp.take(column, slots, 0, mode="clip").T
        if self.window is not None:
            bias = jnp.where(position[:, None] - slots[None] <= self.window, bias, 0)
        return bias[..., None]
