"""Mixer with TTT-Linear."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from effattn.arrays import checks
from effattn.arrays.dtypes import widen
from effattn.nn.attention import refuse
from effattn.nn.delta_rule import unit
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class TTTLinear(SelfAttention):
    """Mixer with TTT-Linear (Sun et al. 2024, "Learning to (Learn at Test Time)").

        q, k, v = x Wq, x Wk, x Wv;   learning_rate = base_rate * sigmoid(x Wr + br) / H
        o = q / |q| + ttt_linear_attention(q / |q|, k / |k|, v - k / |k|, learning_rate, ...)
        y = norm(o) Wo

    The inner model x + layer_norm(x W + b) starts from learned W, b and norm in each sequence.
    `norm` is a layer norm of each head with a learned scale and bias.

    Args:
      mini_batch_size: tokens in a mini-batch of the inner model.
      base_rate: largest learning rate, times H.
      **options: as in `SelfAttention`, and options of `effattn.ttt_linear_attention`. Values
        have as many features as keys, because the inner model adds its input.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        mini_batch_size: int = 16,
        base_rate: float = 1.0,
        **options: SelfAttentionOptions,
    ):
        made = "learning_rate", "initial_weights", "initial_bias", "norm_scale", "norm_bias"
        refuse(type(self), options, made, "it learns the inner model and its norm")
        self.base_rate = float(checks.positive("base_rate", base_rate))
        super().__init__(
            in_features, num_heads, "ttt_linear", mini_batch_size=mini_batch_size, **options
        )
        size, of_keys = self.head_dim, self.num_kv_heads
        if self.value_dim != size:
            raise ValueError(
                f"value_dim must be the head dimension, {size}, because the inner model adds its "
                f"input, got {self.value_dim}"
            )
        make = Layers(**options)
        self.learning_rate = make.linear(in_features, of_keys, use_bias=True)
        self.initial_weights = make.drawn(nnx.initializers.normal(0.02), of_keys, size, size)
        self.initial_bias = make.constant(np.zeros((of_keys, size)))
        self.norm_scale = make.constant(np.ones((of_keys, size)))
        self.norm_bias = make.constant(np.zeros((of_keys, size)))
        self.norm = make.layer_norm(size)

    def _options(self) -> dict[str, Any]:
        names = "initial_weights", "initial_bias", "norm_scale", "norm_bias"
        return {**super()._options(), **{name: getattr(self, name)[...] for name in names}}

    def _heads(self, x, positions, *, lengths=None, segment_ids=None):
        query, key, value = super()._heads(x, positions, lengths=lengths, segment_ids=segment_ids)
        key = unit(key)
        return unit(query), key, value - key

    def _attend(self, heads, **keywords):
        return heads[0] + super()._attend(heads, **keywords)

    def _extend(self, x, state, lengths):
        heads = self._heads(x, self._positions(x, state))
        out, state = self._decoder().extend(*heads, state, lengths, **self._per_token(x))
        return self._finish(heads[0] + out, x), state

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        return {
            "learning_rate": self.base_rate
            / self.head_dim
            * jax.nn.sigmoid(widen(self.learning_rate(x)))
        }

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        return self.out(self.norm(out))
