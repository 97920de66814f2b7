"""Mixer with Infini-attention."""

from typing import Any

import jax
import jax.numpy as jnp

from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class InfiniSelfAttention(SelfAttention):
    """Mixer with Infini-attention (Munkhdalai et al. 2024, "Leave No Context Behind").

        q, k, v = x Wq, x Wk, x Wv;   y = infini_attention(q, k, v, gate) Wo

    The gate is a learned number for each head. It starts at zero, so that both attentions have
    equal shares of the output. The rotary embedding rotates queries and keys of the attention
    within segments, and not those of the memory.

    Args:
      **options: as in `SelfAttention`, and options of `effattn.infini_attention`; `segment_size` is
        64 by default.
    """

    def __init__(self, in_features: int, num_heads: int, **options: SelfAttentionOptions):
        refuse(type(self), options, ("gate",), "it learns the gate of each head")
        super().__init__(in_features, num_heads, "infini", **options)
        self.gate = Layers(**options).constant(jnp.zeros(num_heads))

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "gate": self.gate[...], "rotary": self.rotary}

    def _rotated(
        self, query: jax.Array, key: jax.Array, positions: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        return query, key  # the function rotates them within segments
