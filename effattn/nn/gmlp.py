"""gMLP mixer."""

from typing import Unpack

import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks
from effattn.arrays.segments import within
from effattn.functional.gmlp import gated, spatial_gating
from effattn.nn import activations
from effattn.nn.cached import CachedMixer
from effattn.nn.layers import Layers
from effattn.nn.options import Projected


class GatedMLP(CachedMixer):
    """gMLP block without the residual (Liu et al. 2021, "Pay Attention to MLPs", section 2).

        z_1, z_2 = gelu_tanh(x U);   y = spatial_gating(z_1, layer_norm(z_2), W, b) V

    Initially W is near 0 and b is 1, so tokens hardly mix. Time is O(T^2 F), and W has L^2
    parameters. The decode state caches layer_norm(z_2) of all tokens; a step costs O(S F).

    Args:
      max_length: L, number of positions with weights; maximum number of tokens per row. Positions
        count from the start of each packed document.
      hidden_features: 2 F, size of z_1 and z_2 together; default 4 D.
      **options: see `effattn.nn.options.Projected`.

    Raises:
      ValueError: in calls, more tokens than `max_length`.
    """

    _mechanism = "gmlp"
    _of_known_length = True
    _limited = True

    def __init__(
        self,
        in_features: int,
        *,
        max_length: int,
        hidden_features: int | None = None,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        hidden = 4 * in_features if hidden_features is None else hidden_features
        if checks.at_least("hidden_features", hidden, 2, "features") % 2:
            raise ValueError(f"hidden_features must be even, for two equal parts, got {hidden}")
        self.max_length = checks.at_least("max_length", max_length, 1, "tokens")
        make = Layers(**options)
        self.project = make.linear(in_features, hidden)
        self.norm = make.layer_norm(hidden // 2)
        small = nnx.initializers.normal(1e-3 / max_length)
        self.weights = make.drawn(small, max_length, max_length)
        self.bias = make.constant(jnp.ones(max_length))
        self.out = make.out(hidden // 2, in_features)

    def _prepare(self, x, positions):
        gate, value = jnp.split(activations.gelu_tanh(self.project(x)), 2, -1)
        return self.norm(value), gate

    def _mix_all(self, x, lengths, segment_ids):
        value, gate = self._prepare(x, None)
        y = spatial_gating(
            gate,
            value,
            self.weights[...],
            self.bias[...],
            is_causal=self.is_causal,
            lengths=lengths,
            segment_ids=segment_ids,
        )
        return self.out(y)

    def _mix_at(self, tokens, own, positions):
        slots = tokens.shape[1]
        weights = jnp.take(self.weights[...], positions, 0, mode="clip")[..., :slots]
        weights = jnp.where(within(positions + 1, slots), weights, 0)
        bias = jnp.take(self.bias[...], positions, 0, mode="clip")
        return self.out(gated(own, tokens, weights, bias))
