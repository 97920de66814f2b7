"""Decoding of streaming attention: the sinks, and the last tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from effattn.arrays.axes import lead
from effattn.arrays.combine import combine
from effattn.arrays.segments import positions_from, within
from effattn.cores import attention
from effattn.decode import ring
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.ring import RingState
from effattn.decode.tokens import stored
from effattn.functional.streaming import attend_far, checked_sizes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamingState:
    """KV cache of the first s tokens of each row and of the last w - 1 tokens.

    Attributes:
      key: `(B, s, K, H)`, keys of the sinks at slots `[0, length)`.
      value: `(B, s, K, Hv)`, their values.
      ring: KV cache of the last w - 1 tokens.
    """

    key: jax.Array
    value: jax.Array
    ring: RingState

    @property
    def length(self) -> jax.Array:
        """`(B,)` int32, tokens seen."""
        return self.ring.length


@dataclasses.dataclass(frozen=True)
class StreamingDecoder(Decoder):
    """Decodes `streaming_attention`; a step costs O(s + w) time a row for any prefix length."""

    _state = StreamingState

    def _needs(self):
        return ("num_sinks", "window_size")

    def _empty(self, sizes: Sizes, sink_query=None):
        count, window = checked_sizes(**self._given(self._needs()))
        kept = sizes.heads(min(count, sizes.max_length))
        return StreamingState(*kept, ring.empty(window - 1, sizes))

    def _extend(self, heads, state, lengths, sink_query=None):
        query, key, value = heads
        time, slots = query.shape[1], state.ring.key.shape[1]
        count, window = checked_sizes(**self._given(self._needs()))
        options = {n: x for n, x in self.options.items() if n not in (*self._needs(), "sink_query")}
        keys, values, filled, after = ring.append(state.ring, key, value, lengths, window - 1)
        is_valid = within(lengths, time).astype(jnp.int32)
        in_window = attention.check(
            "streaming_attention",
            query,
            keys,
            values,
            local_window_size=(window - 1, 0),
            is_causal=True,
            query_offset=slots,
            segment_ids=(is_valid, filled.astype(jnp.int32)),
            **ring.shift(options, state.length - slots),
        )
        near = attention.attend(query, keys, values, in_window)
        first_keys, first_values = (
            stored(kept, new, state.length, lengths)
            for kept, new in ((state.key, key), (state.value, value))
        )
        new_state = StreamingState(first_keys, first_values, after)
        if not count:
            return near[0], new_state
        places = lead(jnp.arange(first_keys.shape[1], dtype=jnp.int32), 2)
        places = jnp.broadcast_to(places, first_keys.shape[:2])
        sinks = first_keys.astype(key.dtype), first_values.astype(value.dtype)
        asking = query if sink_query is None else sink_query
        # Unfilled slots have positions after every query.
        far = attend_far(
            window,
            asking,
            *sinks,
            given=attention.check("streaming_attention", asking, *sinks, **options),
            positions=(positions_from(state.length, time), places),
            segments=(is_valid, jnp.ones_like(places)),
        )
        return combine(*zip(near, far, strict=True))[0], new_state
