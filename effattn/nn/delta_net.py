"""DeltaNet mixer."""

from typing import Any

import jax

from effattn.arrays.dtypes import widen
from effattn.nn.delta_rule import DeltaRule
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions


class DeltaNet(DeltaRule):
    """Mixer with the delta rule (Yang et al. 2024, "Parallelizing Linear Transformers with ...").

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv));   beta = sigmoid(x Wb)
        y = norm(delta_rule_attention(q / |q|, k / |k|, v, beta)) Wo

    `conv` is a short causal convolution of each feature. `norm` is an RMS norm of each head's
    output, with a learned scale.

    Args:
      convolution_width: width of the short convolutions, in tokens.
      allow_negative_eigenvalues: beta = 2 sigmoid(x Wb), up to 2 instead of 1. The transition
        I - beta k k^T then has eigenvalues down to -1, with which the mixer can track states such
        as parity (Grazzi et al. 2025, "Unlocking State-Tracking in Linear RNNs Through Negative
        Eigenvalues").
      **options: as in `SelfAttention` (Wb has no bias), and options of
        `effattn.delta_rule_attention`. `rotary` and `qk_norm` (not in the paper) are applied after
        the convolutions and before queries and keys get unit length.
    """

    _mechanism = "delta_net"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        convolution_width: int = 4,
        allow_negative_eigenvalues: bool = False,
        **options: SelfAttentionOptions,
    ):
        super().__init__(in_features, num_heads, convolution_width=convolution_width, **options)
        self.strength = self._strengths(Layers(**options))
        self.max_strength = 2 if allow_negative_eigenvalues else 1

    def _strengths(self, make: Layers) -> Any:
        """The projection to the strengths of a token."""
        return make.linear(self.in_features, self.num_kv_heads)

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        return {"beta": self.max_strength * jax.nn.sigmoid(widen(self.strength(x)))}
