"""Long-short self-attention module, with the slot projection and the two layer norms."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks
from effattn.nn import initializers
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class LongShortSelfAttention(SelfAttention):
    """Mixer with a window and dynamic projections (Zhu et al. 2021, "Long-Short Transformer").

        q, k, v, z = x Wq, x Wk, x Wv, x Wp;   y = long_short_attention(q, k, v, slot_scores=z) Wo

    z has r = `num_projected` scores per token and key head. DualLN of the paper is one layer norm
    for keys and values in windows, and one for keys and values in slots, here over the features of
    each head. For the formula and the cost see `effattn.long_short_attention`. `rotary` is applied
    to keys before the norms.

    Args:
      num_projected: r, number of slots per sequence, or per segment in a causal mixer.
      dual_norm: whether the two layer norms are present.
      **options: as in `SelfAttention`, and options of `effattn.long_short_attention`:
        `window_size`, default 64, and `segment_size`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_projected: int = 8,
        dual_norm: bool = True,
        **options: SelfAttentionOptions,
    ):
        made = "projection", "slot_scores", "window_norm", "slot_norm"
        advice = "it makes the scores and the norms from num_projected and dual_norm"
        refuse(type(self), options, made, advice)
        super().__init__(in_features, num_heads, "long_short", **options)
        self.num_projected = checks.at_least("num_projected", num_projected, 1, "slots")
        # No bias: the softmax over tokens cancels a constant added to all scores.
        make, shape = Layers(**options), (self.num_kv_heads, self.head_dim)
        sizes = self.num_kv_heads, self.num_projected
        self.projection = make.heads(in_features, sizes, kernel_init=initializers.kernel_init)

        def norm() -> nnx.Dict | None:
            if not dual_norm:
                return None
            scale, bias = make.constant(jnp.ones(shape)), make.constant(jnp.zeros(shape))
            return nnx.Dict({"scale": scale, "bias": bias})

        self.window_norm = norm()
        self.slot_norm = norm()

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        return {"slot_scores": self.projection(x)}

    def _options(self) -> dict[str, Any]:
        norms = {
            name: (norm["scale"][...], norm["bias"][...])
            for name, norm in (("window_norm", self.window_norm), ("slot_norm", self.slot_norm))
            if norm is not None
        }
        return {**super()._options(), **norms}
