"""Mixer with streaming attention."""

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks, mesh_axes
from effattn.cores import sequence_parts
from effattn.functional.streaming import checked_sizes
from effattn.nn.attention import refuse
from effattn.nn.options import SelfAttentionOptions
from effattn.nn.self_attention import SelfAttention


class StreamingSelfAttention(SelfAttention):
    """Mixer with a window and attention sinks (Xiao et al. 2023, StreamingLLM).

        q, k, v = x Wq, x Wk, x Wv;   y = streaming_attention(q, k, v) Wo

    The decode state holds the s sinks and the last w - 1 tokens, for sequences of any length. With
    `positions_in_cache`, rotary positions are those in the cache of s + w tokens, as in the paper:
    sink j is at position j, the newest token, i, at min(i, s + w - 1), and the rest of the window
    just before the newest token. So window tokens have their true distances, and a sink outside the
    window has the distance min(i, s + w - 1) - j. No distance exceeds those in s + w tokens.

    Args:
      num_sinks: s, first tokens of each row or packed document.
      window_size: w, tokens in the window, the own token included.
      positions_in_cache: whether rotary positions are those in the cache; needs `rotary`.
      **options: as in `SelfAttention`, and options of `effattn.streaming_attention`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_sinks: int = 4,
        window_size: int = 128,
        positions_in_cache: bool = False,
        **options: SelfAttentionOptions,
    ):
        advice = "positions_in_cache=True makes the queries for sinks"
        refuse(type(self), options, ("sink_query",), advice)
        num_sinks, window_size = checked_sizes(num_sinks, window_size)
        options = {**options, "num_sinks": num_sinks, "window_size": window_size}
        super().__init__(in_features, num_heads, "streaming", **options)
        self.positions_in_cache = checks.flag("positions_in_cache", positions_in_cache)
        if positions_in_cache and self.rotary is None:
            raise ValueError(
                "positions_in_cache=True needs a rotary embedding, whose positions it counts, got "
                "rotary=None; give rotary=nn.RotaryEmbedding() or leave positions_in_cache out"
            )
        self._last = num_sinks + window_size - 1

    @mesh_axes.on_mesh_of_input
    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Mixes whole sequences; arguments as in `SelfAttention`."""
        sequence_parts.check_mixer(self)
        x, positions, keywords = self._whole(x, lengths, segment_ids)
        heads, of_sinks = self._heads_and_sinks(x, positions)
        return self.out(self._attend(heads, **keywords, **of_sinks, **self._dropout(rngs)))

    def _extend(self, x, state, lengths):
        heads, of_sinks = self._heads_and_sinks(x, self._positions(x, state))
        out, state = self._decoder().extend(*heads, state, lengths, **of_sinks)
        return self.out(out), state

    def _heads_and_sinks(self, x, positions):
        """Query, key and value, and the argument `sink_query` if it differs from the query."""
        query = self._project_queries(x)
        key, value = self._project_keys(x)
        heads = *self._rotated(query, key, positions), value
        if not self.positions_in_cache:
            return heads, {}
        last = jnp.minimum(positions, self._last)
        return heads, {"sink_query": self._rotated(query, key, last)[0]}
