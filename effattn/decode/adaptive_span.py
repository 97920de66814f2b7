"""Decoding of attention with an adaptive span: a cache of the longest span."""

import dataclasses

import jax.numpy as jnp

from effattn.decode import ring
from effattn.decode.ring import RingDecoder


@dataclasses.dataclass(frozen=True)
class AdaptiveSpanDecoder(RingDecoder):
    """Decodes `adaptive_span_attention`; a step costs O(max_span) a row for any prefix length."""

    def _needs(self):
        return ("span", "max_span")

    @property
    def span(self) -> int:
        """Distance from a query to the oldest key that it may see, in tokens."""
        return int(self.options["max_span"]) - 1

    def _extend(self, heads, state, lengths):
        query, key, value = heads
        keys, values, filled, after = ring.append(state, key, value, lengths, self.span)
        slots, key_ids = state.key.shape[1], filled.astype(jnp.int32)
        out = self.function(
            query,
            keys,
            values,
            query_offset=slots,
            segment_ids=(key_ids[:, slots:], key_ids),
            **ring.shift(self.options, state.length - slots),
        )
        return out, after
