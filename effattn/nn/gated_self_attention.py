"""Self-attention whose heads pass a sigmoid gate before the output projection."""

from collections.abc import Callable
from typing import Any

import jax

from effattn.nn.layers import Layers
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class GatedSelfAttention(SelfAttention):
    """Self-attention with a gate on its output (Qiu et al. 2025, "Gated Attention").

        y = (sigmoid(x Wg) * attention(q, k, v)) Wo

    The gate is computed from the token itself, so a token can set the output of a head to zero. It
    need not attend to a sink token for that.

    Args:
      attention: mechanism of the heads, by default "softmax"; one that needs no further arrays.
      by_head: one gate for each head, in place of one for each feature of a head. Default False,
        which is better in the paper.
      **options: as in `SelfAttention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        attention: str | Callable[..., Any] = "softmax",
        *,
        by_head: bool = False,
        **options: SelfAttentionOptions,
    ):
        super().__init__(in_features, num_heads, attention, **options)
        gates = 1 if by_head else self.value_dim
        self.gate = Layers(**options).heads(in_features, (num_heads, gates))

    def _finish(self, out: jax.Array, x: jax.Array) -> jax.Array:
        return self.out(jax.nn.sigmoid(self.gate(x)) * out)
