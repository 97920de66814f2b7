"""Gated DeltaNet-2 mixer."""

import jax

from effattn.arrays.dtypes import widen
from effattn.nn.kimi_delta import DecayingFeatures
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions


class GatedDeltaNet2(DecayingFeatures):
    """Mixer with separate gates for erasing and writing (Hatamizadeh, Choi and Kautz 2026).

    Kimi delta attention with two gates in place of the strength beta:

        b = sigmoid(x Wb);   w = sigmoid(x Ww)
        o = gated_delta_rule_2_attention(q / |q|, k / |k|, v, log alpha, b, w)
        y = (sigmoid((x W3) W4 + c) * norm(o)) Wo

    The decays log alpha are those of `KimiDeltaAttention`.

    Args:
      gate_rank: as in `KimiDeltaAttention`.
      convolution_width: as in `DeltaNet`.
      allow_negative_eigenvalues: b = 2 sigmoid(x Wb), up to 2 instead of 1 (see `DeltaNet`).
      **options: as in `DeltaNet`.
    """

    _mechanism = "gated_delta_net_2"
    _gates = ("log_decay", "erase", "write")

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        gate_rank: int | None = None,
        convolution_width: int = 4,
        allow_negative_eigenvalues: bool = False,
        **options: SelfAttentionOptions,
    ):
        super().__init__(
            in_features,
            num_heads,
            gate_rank=gate_rank,
            convolution_width=convolution_width,
            **options,
        )
        make, of_keys = Layers(**options), self.num_kv_heads
        self.erase = make.heads(in_features, (of_keys, self.head_dim))
        self.write = make.heads(in_features, (of_keys, self.value_dim))
        self.max_erase = 2 if allow_negative_eigenvalues else 1

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        return {
            "log_decay": self._log_decay(x),
            "erase": self.max_erase * jax.nn.sigmoid(widen(self.erase(x))),
            "write": jax.nn.sigmoid(widen(self.write(x))),
        }
