"""Mixer with lightning attention, as in MiniMax-01."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax

from effattn.functional.retention import retention
from effattn.nn.alibi import alibi_slopes
from effattn.nn.heads import head_size, key_heads
from effattn.nn.layers import Layers
from effattn.nn.options import Recurrent
from effattn.nn.recurrent import FunctionMixer
from effattn.nn.token_shift import check_depth


class LightningAttention(FunctionMixer):
    """Mixer with lightning attention, as in MiniMax-01 (MiniMax 2025).

    Qin et al. 2024, "Various Lengths, Constant Speed: Efficient Language Modeling with Lightning
    Attention":

        q, k, v = silu(x Wq), silu(x Wk), silu(x Wv)
        y = (sigmoid(x Wg) * norm(retention(q, k, v, log decay, scale=1))) Wo

    `norm` is an RMS norm of the outputs of all heads together, with a learned scale. The log decay
    of a head is its slope in ALiBi times -(1 - depth + 1e-5).

    Args:
      head_dim: H, head dimension; default D / N.
      num_kv_heads: K, number of key and value heads, a divisor of N; default N (paper).
      depth: relative depth of the layer, 0 (first) to 1 (last), which remembers for longest; models
        set it by the layer.
      **options: see `effattn.nn.options.Recurrent`.
    """

    _mechanism = "lightning"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        depth: float = 0.5,
        **options: Unpack[Recurrent],
    ):
        super().__init__(in_features, **options)
        check_depth(depth)
        self.depth = float(depth)
        self.head_dim = head_size(in_features, num_heads, head_dim)
        self.num_heads, self.num_kv_heads = num_heads, key_heads(num_heads, num_kv_heads)
        make, inner = Layers(**options), num_heads * self.head_dim
        of_keys = self.num_kv_heads, self.head_dim
        self.query = make.heads(in_features, (num_heads, self.head_dim))
        self.key, self.value = (make.heads(in_features, of_keys) for _ in range(2))
        self.gate = make.linear(in_features, inner)
        self.norm = make.rms_norm(inner)
        self.out = make.out(inner, in_features)

    def _mix(self, x, state, lengths, segment_ids):
        slopes = jnp.asarray(alibi_slopes(self.num_kv_heads))
        out, state = retention(
            *(jax.nn.silu(project(x)) for project in (self.query, self.key, self.value)),
            log_decay=-(1 - self.depth + 1e-5) * slopes,
            scale=1.0,
            **self._options(state, lengths, segment_ids),
        )
        gate = jax.nn.sigmoid(self.gate(x))
        return self.out(gate * self.norm(lax.collapse(out, 2))), state
