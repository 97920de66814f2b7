"""Mixer with forgetting attention."""

import jax

from effattn.arrays import dtypes
from effattn.nn.attention import refuse
from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class ForgettingAttention(SelfAttention):
    """Mixer with forgetting attention (Lin et al. 2025, "Forgetting Transformer").

        q, k, v = x Wq, x Wk, x Wv;   log f = log sigmoid(x Wf + bf)
        y = forgetting_attention(q, k, v, log f) Wo

    The gates give the order of tokens, so the paper uses no position embeddings.

    Args:
      **options: as in `SelfAttention`, and options of `effattn.forgetting_attention`.
    """

    def __init__(self, in_features: int, num_heads: int, **options: SelfAttentionOptions):
        refuse(type(self), options, ("log_forget",), "it computes the gates from the tokens")
        super().__init__(in_features, num_heads, "forgetting", **options)
        self.forget = Layers(**options).linear(in_features, num_heads, use_bias=True)

    def _per_token(self, x: jax.Array) -> dict[str, jax.Array]:
        logits = self.forget(x)
        # At least float32, since log gates are summed over many tokens.
        return {"log_forget": jax.nn.log_sigmoid(dtypes.widen(logits))}
