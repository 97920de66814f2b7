"""Mixer with talking-heads attention and its mixing matrices."""

from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks
from effattn.cores import sequence_parts
from effattn.functional.talking_heads import talking_heads_attention
from effattn.nn.cached import CachedMixer
from effattn.nn.heads import head_size, key_heads
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.rotary import RotaryEmbedding, check_rotary
from effattn.nn.tokens import padding_of


class TalkingHeadsAttention(CachedMixer):
    """Mixer with talking-heads attention (Shazeer et al. 2020).

        q, k, v = rotary(x Wq), rotary(x Wk), x Wv
        y = talking_heads_attention(q, k, v, logits_mix=P, weights_mix=U) Wo

    The decode state caches keys and values; a step costs O(S).

    Args:
      num_kv_heads: K, number of key and value heads, a divisor of N; default N.
      head_dim: H, head dimension of queries, keys and values; default D / N.
      num_softmaxes: M, number of softmaxes; default N, as in the paper's main models.
      rotary: rotary position embedding of queries and keys; default None, no rotation.
      **options: see `effattn.nn.options.Projected`.
    """

    _mechanism = "talking_heads"

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        num_softmaxes: int | None = None,
        rotary: RotaryEmbedding | None = None,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        self.head_dim = head_size(in_features, num_heads, head_dim)
        self.num_heads, self.num_kv_heads = num_heads, key_heads(num_heads, num_kv_heads)
        count = num_heads if num_softmaxes is None else num_softmaxes
        self.num_softmaxes = checks.at_least("num_softmaxes", count, 1, "softmaxes, or None")
        check_rotary(rotary, head_dim=self.head_dim)
        self.rotary = rotary
        make, of_keys = Layers(**options), (self.num_kv_heads, self.head_dim)
        self.query = make.heads(in_features, (num_heads, self.head_dim))
        self.key = make.heads(in_features, of_keys)
        self.value = make.heads(in_features, of_keys)
        self.out = make.out((num_heads, self.head_dim), in_features)
        init = nnx.initializers.lecun_normal()
        self.logits_mix = make.drawn(init, num_heads, self.num_softmaxes)
        self.weights_mix = make.drawn(init, self.num_softmaxes, num_heads)

    def _prepare(self, x, positions):
        query, key = self.query(x), self.key(x)
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        return (key, self.value(x)), query

    def _attend(self, query, tokens, **options) -> jax.Array:
        out = talking_heads_attention(
            query,
            *tokens,
            logits_mix=self.logits_mix[...],
            weights_mix=self.weights_mix[...],
            **options,
        )
        return self.out(out)

    def _mix_all(self, x, lengths, segment_ids):
        batch, time = x.shape[:2]
        padding, _ = padding_of(self.binding, batch, time, lengths, segment_ids)
        positions = sequence_parts.positions(time, padding.get("segment_ids"))
        tokens, query = self._prepare(x, jnp.broadcast_to(positions, (batch, time)))
        return self._attend(query, tokens, is_causal=self.is_causal, **padding)

    def _mix_at(self, tokens, own, positions):
        return self._attend(own, tokens, is_causal=True, query_offset=positions[:, 0])
