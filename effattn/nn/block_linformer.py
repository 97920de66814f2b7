"""Causal self-attention to the current block and to projections of complete blocks."""

from typing import Any

from flax import nnx

from effattn.arrays import checks
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention

SHARING = ("none", "heads", "key_value")


class BlockLinformerSelfAttention(SelfAttention):
    """Causal variant of Linformer: attention to the current block and to projected earlier blocks.

        q, k, v = x Wq, x Wk, x Wv;   y = block_linformer_attention(q, k, v, E, F) Wo

    E and F, `(r, b)`, project each complete block of b = `block_size` tokens to r = `num_projected`
    slots. `sharing` selects how heads share these parameters:

        none          E and F for each key head
        heads         E and F for all heads
        key_value     E = F for all heads

    Args:
      block_size: b, tokens per block.
      num_projected: r, slots per block, at most b.
      sharing: see above.
      **options: as in `SelfAttention`, and options of `effattn.block_linformer_attention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        block_size: int = 64,
        num_projected: int = 8,
        sharing: str = "heads",
        **options: SelfAttentionOptions,
    ):
        made = "key_projection", "value_projection"
        advice = "it makes the projections from block_size, num_projected and sharing"
        refuse(type(self), options, made, advice)
        super().__init__(in_features, num_heads, "block_linformer", **options)
        self.block_size = checks.at_least("block_size", block_size, 1, "tokens")
        self.num_projected = checks.at_least("num_projected", num_projected, 1, "slots")
        if num_projected > block_size:
            raise ValueError(
                f"num_projected must be at most block_size {block_size}, got {num_projected}"
            )
        checks.one_of("sharing", sharing, SHARING)
        heads = (self.num_kv_heads,) if sharing == "none" else ()
        shape = (*heads, self.num_projected, self.block_size)
        # Initially a slot has the variance of a token.
        init, make = nnx.initializers.normal(self.block_size**-0.5), Layers(**options)
        self.key_projection = make.drawn(init, *shape)
        self.value_projection = None if sharing == "key_value" else make.drawn(init, *shape)

    def _options(self) -> dict[str, Any]:
        of_keys = of_values = self.key_projection[...]
        if self.value_projection is not None:
            of_values = self.value_projection[...]
        dtype = self._kept_in(None)
        return {
            **super()._options(),
            "key_projection": of_keys.astype(dtype),
            "value_projection": of_values.astype(dtype),
        }
