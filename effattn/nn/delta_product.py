"""Gated DeltaProduct mixer."""

import jax

from effattn.arrays import checks
from effattn.nn.delta_rule import unit
from effattn.nn.gated_delta_net import GatedDeltaNet
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions


class GatedDeltaProduct(GatedDeltaNet):
    """Mixer with several steps of the delta rule for each token (Siems et al. 2025).

    Gated DeltaNet in which each token has M keys k_m, values v_m and strengths beta_m, each with
    its own projection and, for keys and values, its own short convolution:

        y = (silu(x Wg) * norm(delta_product_attention(q / |q|, k / |k|, v, beta, log alpha))) Wo

    "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products".

    Args:
      num_steps: M, steps of the delta rule for each token.
      convolution_width: as in `DeltaNet`.
      allow_negative_eigenvalues: as in `DeltaNet`; True by default here, as in the paper.
      value_dim: Hv, head dimension of values; default 2 H.
      **options: as in `GatedDeltaNet`.
    """

    _mechanism = "delta_product"
    _gates = ("beta", "log_decay", "later_keys", "later_values")

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_steps: int = 2,
        convolution_width: int = 4,
        allow_negative_eigenvalues: bool = True,
        **options: SelfAttentionOptions,
    ):
        self.num_steps = checks.at_least("num_steps", num_steps, 2, "steps")
        super().__init__(
            in_features,
            num_heads,
            convolution_width=convolution_width,
            allow_negative_eigenvalues=allow_negative_eigenvalues,
            **options,
        )
        make, of_keys = Layers(**options), self.num_kv_heads
        later, bias = self.num_steps - 1, {"use_bias": options.get("use_bias", False)}
        sizes = later * self.head_dim, later * self.value_dim
        self.later_key, self.later_value = (
            make.heads(in_features, (of_keys, size), **bias) for size in sizes
        )
        self.later_key_convolution, self.later_value_convolution = (
            make.convolution(of_keys * size, convolution_width) for size in sizes
        )

    def _strengths(self, make):
        return make.heads(self.in_features, (self.num_kv_heads, self.num_steps))

    def _paths(self):
        return [
            *super()._paths(),
            (self.later_key, self.later_key_convolution),
            (self.later_value, self.later_value_convolution),
        ]

    def _unit_heads(self, convolved, positions):
        """As for one step, and the later keys `(B, T, K, M - 1, H)` and values."""
        *first, key, value = convolved
        batch, time, _ = key.shape
        # Every later key is rotated and normalised as a key head of its own.
        key = key.reshape(batch, time, self.num_kv_heads * (self.num_steps - 1), self.head_dim)
        if self.key_norm is not None:
            key = self.key_norm(key)
        if self.rotary is not None and positions is not None:
            key = self.rotary(key, positions)
        of_steps = batch, time, self.num_kv_heads, self.num_steps - 1
        later = (
            unit(key).reshape(*of_steps, self.head_dim),
            value.reshape(*of_steps, self.value_dim),
        )
        return *super()._unit_heads(first, positions), *later

    def _split(self, heads):
        return heads[:3], {"later_keys": heads[3], "later_values": heads[4]}

    def _arguments_of_token(self, batch, dtype):
        shape = batch, 1, self.num_kv_heads, self.num_steps - 1
        return {
            **super()._arguments_of_token(batch, dtype),
            "later_keys": jax.ShapeDtypeStruct((*shape, self.head_dim), dtype),
            "later_values": jax.ShapeDtypeStruct((*shape, self.value_dim), dtype),
        }
