"""Mixer with indexed attention, its index, and the loss that trains the index."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays import checks, dtypes
from effattn.arrays.gathers import pick
from effattn.arrays.segments import valid
from effattn.cores import chosen_keys, sequence_parts
from effattn.cores.folding import in_tiles_of_queries
from effattn.functional.indexed import indexed_attention
from effattn.nn.cached import CachedMixer
from effattn.nn.heads import head_size, key_heads
from effattn.nn.layers import Layers
from effattn.nn.options import Projected
from effattn.nn.rotary import RotaryEmbedding, check_rotary
from effattn.nn.tokens import padding_of, tokens_of, zero_padding

_NAME = "IndexedSelfAttention"


class IndexedSelfAttention(CachedMixer):
    """Mixer with indexed attention (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp").

        y = indexed_attention(rotary(x Wq), rotary(x Wk), x Wv,
                              index_query=rotary(x Vp), index_key=rotary(norm(x Vc)),
                              index_weights=x Vw, top_k=top_k) Wo

    See `effattn.indexed_attention`. The selection has no gradient, so the loss of a model does not
    train the index, Vp, Vc, Vw and its norm: add `index_loss`. The decode state caches keys, values
    and index keys of all S tokens; a step costs O(S J E + top_k (H + Hv)).

    Args:
      num_kv_heads: K, number of key and value heads, a divisor of N; default N.
      head_dim: H, head dimension of queries, keys and values; default D / N.
      top_k: keys of a query, 1 or more.
      index_heads: J, heads of the index.
      index_dim: E, features of the index; default H.
      rotary: rotary position embedding of queries, keys and the index; default None, no rotation.
      implementation: see `effattn.options.Implementation`.
      **options: see `effattn.nn.options.Projected`.
    """

    _mechanism = "indexed"
    _of_known_length = True

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        top_k: int = 64,
        index_heads: int = 4,
        index_dim: int | None = None,
        rotary: RotaryEmbedding | None = None,
        implementation: str | tuple[str, ...] | None = None,
        **options: Unpack[Projected],
    ):
        super().__init__(in_features, **options)
        self.head_dim = head_size(in_features, num_heads, head_dim)
        self.num_heads, self.num_kv_heads = num_heads, key_heads(num_heads, num_kv_heads)
        self.top_k = checks.at_least("top_k", top_k, 1, "keys of a query")
        self.index_heads = checks.at_least("index_heads", index_heads, 1)
        index_dim = self.head_dim if index_dim is None else index_dim
        self.index_dim = checks.at_least("index_dim", index_dim, 1, "features")
        check_rotary(rotary, head_dim=self.head_dim, index_dim=self.index_dim)
        self.rotary, self.implementation = rotary, implementation
        make = Layers(**options)
        self.query = make.heads(in_features, (num_heads, self.head_dim))
        self.key = make.heads(in_features, (self.num_kv_heads, self.head_dim))
        self.value = make.heads(in_features, (self.num_kv_heads, self.head_dim))
        self.out = make.out((num_heads, self.head_dim), in_features)
        self.index_query = make.linear(in_features, self.index_heads * self.index_dim)
        self.index_key = make.linear(in_features, self.index_dim)
        self.index_norm = make.layer_norm(self.index_dim)
        self.index_weights = make.linear(in_features, self.index_heads)

    def _index(self, x, positions) -> chosen_keys.Index:
        """The arrays of the index for tokens x."""
        query = self.index_query(x).reshape(*x.shape[:2], self.index_heads, self.index_dim)
        key = self.index_norm(self.index_key(x))
        if self.rotary is not None:
            query = self.rotary(query, positions)
            key = self.rotary(key[:, :, None], positions)[:, :, 0]
        return chosen_keys.Index(query, key, self.index_weights(x))

    def _prepare(self, x, positions):
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        index = self._index(x, positions)
        return (key, value, index.key), (query, index.query, index.weights)

    def _read(self, x, segment_ids):
        """The arrays of whole sequences x, zero in the padding."""
        positions = jnp.broadcast_to(sequence_parts.positions(x.shape[1], segment_ids), x.shape[:2])
        (key, value, index_key), (query, index_query, weights) = self._prepare(x, positions)
        return (query, key, value), chosen_keys.Index(index_query, index_key, weights)

    def _mix_all(self, x, lengths, segment_ids):
        ids = None if segment_ids is None else jnp.asarray(segment_ids)
        heads, index = self._read(x, ids)
        out = indexed_attention(
            *heads,
            index_query=index.query,
            index_key=index.key,
            index_weights=index.weights,
            top_k=self.top_k,
            implementation=self.implementation,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            segment_ids=ids,
        )
        return self.out(out)

    def _mix_at(self, tokens, own, positions):
        (key, value, index_key), (query, index_query, weights) = tokens, own
        checks.known_length("decoding indexed attention", query)
        limits = jnp.full(positions.shape[:1], key.shape[1], jnp.int32)
        index = chosen_keys.Index(index_query, index_key, weights)
        places, heads = chosen_keys.Places(positions, limits), (query, key, value)
        how = {"implementation": self.implementation}
        chosen = chosen_keys.choose(_NAME, index, places, self.top_k, **how)
        out, _ = chosen_keys.attend(_NAME, heads, chosen, self.head_dim**-0.5, **how)
        return self.out(out)

    def index_loss(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """The loss of the index: its divergence from the attention weights.

            KL(p_t || softmax(I_t)),   p_t = the mean of the attention weights of all heads,

        over the keys that the tokens have selected, averaged over the valid tokens. Only the index
        has a gradient. The first stage of the paper trains the index over all keys: call the loss
        of a mixer with `top_k` of T or more.

        Args:
          x: `(B, T, D)`.
          lengths: as in a call.
          segment_ids: as in a call.

        Returns:
          `()`, at least float32.

        Raises:
          ValueError: no tokens, or the errors of a call.
        """
        x = lax.stop_gradient(tokens_of("x", x, self.in_features))
        batch, time = x.shape[:2]
        if 0 in (batch, time):
            raise ValueError(f"x must have at least one token, got shape {x.shape}")
        padding, present = padding_of(self.binding, batch, time, lengths, segment_ids)
        ids = padding.get("segment_ids")
        x = zero_padding(x, present)
        (query, key, _), index = self._read(x, ids)
        query, key = lax.stop_gradient((query, key))
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(positions, x.shape[:2])
        limits = jnp.full(x.shape[:1], x.shape[1], jnp.int32) if lengths is None else lengths
        segments = None if ids is None else (ids, ids)
        places = chosen_keys.Places(positions, jnp.asarray(limits, jnp.int32), segments)
        chosen = chosen_keys.choose(_NAME, index, places, self.top_k, self.implementation)
        losses = _divergences(query, key, index, chosen, self.head_dim**-0.5)
        is_counted = valid(lengths, ids, x.shape[1])
        if is_counted is None:
            return losses.mean()
        return jnp.where(is_counted, losses, 0).sum() / jnp.maximum(is_counted.sum(), 1)


def _divergences(query, key, index, chosen, scale):
    """KL divergence of each token, `(B, T)`."""
    wide = dtypes.wide(query, key)
    scale = jnp.asarray(scale, wide)

    @jax.vmap
    def example(query, key, index, chosen):
        @jax.checkpoint
        def tile(x):
            query, of_query, weights, chosen = x
            seen = chosen_keys.weights_of(query, key, chosen, scale, None)[0].mean((1, 2))
            keys = pick(index.key, chosen.at).astype(wide)
            scores = chosen_keys.scored(of_query.astype(wide), weights.astype(wide), keys, "tse")
            scores = jnp.where(chosen.counts, scores, dtypes.lowest(wide))
            found = jax.nn.log_softmax(scores)
            is_read = chosen.counts & (seen > 0)
            logs = jnp.log(jnp.where(is_read, seen, 1)) - jnp.where(is_read, found, 0)
            return (seen * logs).sum(-1)

        arrays = query, index.query, index.weights, chosen
        return in_tiles_of_queries(tile, arrays, chosen_keys.tile_of(chosen))

    return example(query, key, index, chosen)
