"""Self-attention of Luna, with learned queries that pack the tokens."""

from typing import Any

import jax
from flax import nnx

from effattn.arrays import checks
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.placement import axes
from effattn.nn.self_attention import SelfAttention


class LunaSelfAttention(SelfAttention):
    """Mixer with pack and unpack attention (Ma et al. 2021, "Luna: Linear Unified Nested ...").

        q, k, v, u = x Wq, x Wk, x Wv, x Wu;   y = luna_attention(q, k, v, P, pack_key=u) Wo

    P, `(K, l, H)`, is learned. A rotary embedding turns queries and keys, not the pack keys.

    Args:
      num_packed: l, number of packed vectors of each key head.
      activation: see `effattn.luna_attention`. Default, as in the paper: "elu" if causal,
        otherwise "softmax".
      **options: as in `SelfAttention`, and options of `effattn.luna_attention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_packed: int = 16,
        activation: str | None = None,
        is_causal: bool = True,
        **options: SelfAttentionOptions,
    ):
        advice = "it learns the pack queries, and computes the pack keys from the tokens"
        refuse(type(self), options, ("pack_query", "pack_key"), advice)
        self.num_packed = checks.at_least("num_packed", num_packed, 1, "vectors")
        if activation is None:
            activation = "elu" if is_causal else "softmax"
        super().__init__(
            in_features, num_heads, "luna", activation=activation, is_causal=is_causal, **options
        )
        make, heads = Layers(**options), (self.num_kv_heads, self.head_dim)
        self.pack_key = make.heads(in_features, heads)
        init, placed = nnx.initializers.normal(1.0), axes("heads", None, None)
        self.pack_query = make.drawn(init, heads[0], num_packed, heads[1], **placed)

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        return {"pack_key": self.pack_key(x)}

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "pack_query": self.pack_query[...]}
