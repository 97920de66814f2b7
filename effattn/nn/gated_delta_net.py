"""Gated DeltaNet mixer."""

import jax
import jax.numpy as jnp

from effattn.arrays.axes import lead
from effattn.arrays.dtypes import widen
from effattn.nn import initializers
from effattn.nn.delta_net import DeltaNet
from effattn.nn.gated_output import GatedOutput
from effattn.nn.heads import head_size
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions


class GatedDeltaNet(GatedOutput, DeltaNet):
    """Mixer with the gated delta rule (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks").

    DeltaNet with decays as in Mamba-2, and an output gate:

        log alpha = -exp(log_rate) * softplus(x Wa + step_bias)
        y = (silu(x Wg) * norm(delta_rule_attention(q / |q|, k / |k|, v, beta, log alpha))) Wo

    Args:
      head_dim: H, head dimension of queries and keys; default D / N.
      value_dim: Hv, head dimension of values; default 2 H. With H = 0.75 D / N the layer has 6 D^2
        parameters, as in the paper.
      convolution_width: as in `DeltaNet`.
      allow_negative_eigenvalues: as in `DeltaNet`.
      **options: as in `DeltaNet`; `use_bias` is also for Wg.
    """

    _mechanism = "gated_delta_net"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        convolution_width: int = 4,
        allow_negative_eigenvalues: bool = False,
        **options: SelfAttentionOptions,
    ):
        if value_dim is None:
            value_dim = 2 * head_size(in_features, num_heads, head_dim)
        options.update(head_dim=head_dim, value_dim=value_dim)
        super().__init__(
            in_features,
            num_heads,
            convolution_width=convolution_width,
            allow_negative_eigenvalues=allow_negative_eigenvalues,
            **options,
        )
        make, of_keys = Layers(**options), self.num_kv_heads
        self.step_size = make.linear(in_features, of_keys)
        self.log_rate = make.drawn(initializers.log_rate_init, of_keys)
        self.step_bias = make.drawn(initializers.step_bias_init, of_keys)
        sizes = num_heads, self.value_dim
        self.gate = make.heads(in_features, sizes, use_bias=options.get("use_bias", False))

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        steps = jax.nn.softplus(widen(self.step_size(x)) + lead(widen(self.step_bias[...]), 3))
        log_decay = -jnp.exp(lead(widen(self.log_rate[...]), 3)) * steps
        return {**super()._per_token(x), "log_decay": log_decay}
