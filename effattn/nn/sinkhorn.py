"""Self-attention with blocks that a learned network sorts."""

import math
from typing import Any

from flax import nnx

from effattn.arrays import checks
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.placement import axes
from effattn.nn.self_attention import SelfAttention


class SinkhornSelfAttention(SelfAttention):
    """Bidirectional mixer with sorted blocks (Tay et al. 2020, "Sparse Sinkhorn Attention").

        q, k, v = x Wq, x Wk, x Wv;   y = sinkhorn_attention(q, k, v, sort_projection=w) Wo

    w, `(K, L / b, H)`, is learned, for up to L = `max_length` tokens in blocks of b = `block_size`.

    Args:
      max_length: L, maximum number of input tokens.
      block_size: b, tokens in a block.
      is_causal: must be False.
      **options: as in `SelfAttention`, and options of `effattn.sinkhorn_attention`:
        `num_iterations` and `temperature`.

    Raises:
      ValueError: as `SelfAttention`; also for `is_causal=True`; in calls, for
        more than ceil(L / b) blocks of tokens.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        max_length: int = 512,
        block_size: int = 64,
        is_causal: bool = False,
        **options: SelfAttentionOptions,
    ):
        advice = "it learns a projection for the blocks of max_length tokens"
        refuse(type(self), options, ("sort_projection",), advice)
        options["block_size"] = checks.at_least("block_size", block_size, 1, "tokens")
        super().__init__(in_features, num_heads, "sinkhorn", is_causal=is_causal, **options)
        self.max_length = checks.at_least("max_length", max_length, 1, "tokens")
        shape = self.num_kv_heads, math.ceil(max_length / block_size), self.head_dim
        # Initially the logits of a block of independent keys have variance 1.
        init = nnx.initializers.normal((self.head_dim * block_size) ** -0.5)
        placed = axes("heads", None, None)
        self.sort_projection = Layers(**options).drawn(init, *shape, **placed)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "sort_projection": self.sort_projection[...]}
