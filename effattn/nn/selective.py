"""Mixer with selective attention."""

from typing import Any

import jax

from effattn.nn.attention import refuse
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class SelectiveSelfAttention(SelfAttention):
    """Mixer with selective attention (Leviathan et al. 2024, "Selective Attention ...").

        q, k, v = rotary(x Wq), rotary(x Wk), x Wv;   p, r = q, k of the first head
        y = selective_attention(q, k, v, selection_query=p, selection_key=r) Wo

    It has the parameters of `SelfAttention` and no others. The decode state is a KV cache with the
    keys of the selection, and for each key a number: by how much later tokens mask it.

    Args:
      **options: as in `SelfAttention`, and options of `effattn.selective_attention`.
    """

    def __init__(self, in_features: int, num_heads: int, **options: SelfAttentionOptions):
        names = "selection_query", "selection_key"
        refuse(type(self), options, names, "it selects by the first head")
        super().__init__(in_features, num_heads, "selective", **options)

    def _attend(self, heads: tuple[jax.Array, ...], **keywords: Any) -> jax.Array:
        return super()._attend(heads, **keywords, **_selection(heads))

    def _arguments_of_token(self, batch: int, dtype: Any) -> dict[str, Any]:
        one = jax.ShapeDtypeStruct((batch, 1, 1, self.head_dim), dtype)
        return {"selection_query": one, "selection_key": one}

    def _extend(self, x, state, lengths):
        heads = self._heads(x, self._positions(x, state))
        out, state = self._decoder().extend(*heads, state, lengths, **_selection(heads))
        return self._finish(out, x), state


def _selection(heads):
    query, key, _ = heads
    return {"selection_query": query[..., :1, :], "selection_key": key[..., :1, :]}
