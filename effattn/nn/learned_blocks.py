"""Mixer with learned blocks, and its selector."""

import jax

from effattn.arrays import checks
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class LearnedBlockSelfAttention(SelfAttention):
    """Mixer that attends to blocks of a learned selector (Gao et al. 2024, "SeerAttention").

        q, k, v = x Wq, x Wk, x Wv;   p, r = x Wp, x Wr
        y = learned_block_attention(q, k, v, selection_query=p, selection_key=r) Wo

    Each key head has its own p and r. The selector is trained with the model, by the
    straight-through estimator of `effattn.learned_block_attention`.

    Args:
      selection_features: Hs, features of p and r; default H.
      **options: as in `SelfAttention`, and options of `effattn.learned_block_attention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        selection_features: int | None = None,
        **options: SelfAttentionOptions,
    ):
        names = "selection_query", "selection_key"
        refuse(type(self), options, names, "it projects both from the tokens")
        super().__init__(in_features, num_heads, "learned_blocks", **options)
        size = self.head_dim if selection_features is None else selection_features
        size = checks.at_least("selection_features", size, 1, "features, or None")
        make = Layers(**options)
        self.selection_query = make.heads(in_features, (self.num_kv_heads, size))
        self.selection_key = make.heads(in_features, (self.num_kv_heads, size))

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        return {
            "selection_query": self.selection_query(x),
            "selection_key": self.selection_key(x),
        }
