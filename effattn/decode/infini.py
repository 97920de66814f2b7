"""Decoding of Infini-attention: the keys of the present segment, and the compressive memory."""

import dataclasses

import jax
import jax.numpy as jnp

from effattn.arrays import checks, dtypes
from effattn.arrays.segments import positions_from, within
from effattn.cores import attention, compressive_memory
from effattn.cores.compressive_memory import Memory, Segments
from effattn.decode import ring
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.ring import RingState
from effattn.functional.infini import check_options, mixed

_LOCAL = ("scale", "precision", "implementation")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InfiniState:
    """Decode state of constant size.

    Attributes:
      tokens: the last L - 1 keys and values, rotated where the function rotates them.
      memory: the compressive memory, in at least float32.
    """

    tokens: RingState
    memory: Memory

    @property
    def length(self) -> jax.Array:
        """`(B,)` int32, tokens seen."""
        return self.tokens.length


@dataclasses.dataclass(frozen=True)
class InfiniDecoder(Decoder):
    """Decodes `effattn.infini_attention`; `segment_size` and `gate` are required.

    A step costs O((L + H) Hv) a row and head, and the state O(L (H + Hv) + H Hv) memory.
    """

    _state = InfiniState

    def _needs(self):
        return ("segment_size", "gate")

    def _takes(self):
        return (*self._needs(), "delta_rule", "rotary", *_LOCAL)

    @property
    def _segment(self) -> int:
        return checks.at_least("segment_size", self.options["segment_size"], 1, "tokens")

    def _empty(self, sizes: Sizes):
        memory = compressive_memory.empty(
            (sizes.batch,),
            sizes.key_heads,
            sizes.head_dim,
            sizes.value_dim,
            dtypes.wide(sizes.dtype),
        )
        return InfiniState(ring.empty(self._segment - 1, sizes), memory)

    def _extend(self, heads, state, lengths):
        query, key, value = heads
        checks.known_length("decoding infini_attention", query)
        time, kept = query.shape[1], state.tokens.key.shape[1]
        size, gate = check_options(self._segment, self.options["gate"], query.shape[-2])
        present = within(lengths, time)
        query, key, value = (jnp.where(present[..., None, None], x, 0) for x in heads)
        place = positions_from(state.length, time)
        turned, rotary = (query, key), self.options.get("rotary")
        if rotary is not None:
            turned = rotary(query, place), rotary(key, place)
        keys, values, filled, tokens = ring.append(
            state.tokens, turned[1], value, lengths, size - 1
        )
        segment_of_keys = positions_from(state.length - kept, kept + time) // size + 1
        segment_of_keys = jnp.where(filled, segment_of_keys, 0)
        given = attention.check(
            "infini_attention",
            turned[0],
            keys,
            values,
            is_causal=True,
            query_offset=kept,
            local_window_size=(size - 1, 0),
            segment_ids=(segment_of_keys[:, kept:], segment_of_keys),
            **self._given(_LOCAL),
        )
        local, _ = attention.attend(turned[0], keys, values, given)
        # The padding is in the segment of the last token.
        last = (state.length + lengths - 1)[:, None]
        segments = Segments(jnp.minimum(place, last) // size, place < size, present)
        found, memory = compressive_memory.read(
            query,
            key,
            value,
            segments,
            state.memory,
            (state.length - 1) // size,
            segment_size=size,
            delta_rule=self.options.get("delta_rule", False),
            precision=self.options.get("precision"),
        )
        out = jnp.where(present[..., None, None], mixed(gate, found, local), 0)
        return out, InfiniState(tokens, memory)
