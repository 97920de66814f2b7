"""Decoding of block Linformer attention: the present block and slots of finished blocks."""

import dataclasses

import jax
import jax.numpy as jnp

from effattn.arrays.segments import within
from effattn.cores import attention
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.segments import extend_by_segment
from effattn.decode.state import bounded, check_bound, check_capacity
from effattn.decode.tokens import stored
from effattn.functional.block_linformer import check_projections, project_blocks

_SHARED = ("scale", "logits_soft_cap", "sink", "precision", "tile", "implementation")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockLinformerState:
    """Decode state: keys and values of the present block, and slots of finished blocks.

    Attributes:
      key: `(B, b, K, H)`, the present block, at places `[0, length % b)`; `max_length` places if
        that is less than b.
      value: `(B, b, K, Hv)`.
      slot_key: `(B, M r, K, H)`, slots of up to M finished blocks.
      slot_value: `(B, M r, K, Hv)`.
      length: `(B,)` int32, tokens seen.
      max_length: static; maximum tokens of a row if that is less than b, else None.
    """

    key: jax.Array
    value: jax.Array
    slot_key: jax.Array
    slot_value: jax.Array
    length: jax.Array
    max_length: int | None = dataclasses.field(default=None, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class BlockLinformerDecoder(Decoder):
    """Decodes `effattn.block_linformer_attention`, whose projections are required options.

    A step costs O(b + r M) time a row, and the state O(b + r M) memory, for a sequence of M + 1
    blocks. The state has room for `max_length` tokens a row, rounded up to whole blocks.
    """

    _state = BlockLinformerState

    def _needs(self):
        return ("key_projection", "value_projection")

    def _takes(self):
        return (*_SHARED, *self._needs())

    def _empty(self, sizes: Sizes):
        slots, size = self._projections(sizes.key_heads)[0].shape[-2:]
        places, bound = bounded(size, sizes.max_length)
        finished = max(-(-sizes.max_length // size) - 1, 0)
        return BlockLinformerState(
            *sizes.heads(places), *sizes.heads(finished * slots), sizes.length(), max_length=bound
        )

    def _extend(self, heads, state, lengths):
        slots, size = self._projections(heads[1].shape[-2])[0].shape[-2:]
        check_bound(state, lengths, state.key.shape[1], size)
        check_capacity(state.length, lengths, (state.slot_key.shape[1] // slots + 1) * size)
        return extend_by_segment(self._extend_inside, size, heads, state, lengths)

    def _projections(self, heads: int):
        of_keys, of_values = (self.options[name] for name in self._needs())
        return check_projections(of_keys, of_values, heads)

    def _extend_inside(self, heads, state: BlockLinformerState, lengths):
        """Extends by tokens that lie in one block of each row."""
        query, key, value = heads
        of_keys, of_values = self._projections(key.shape[-2])
        slots, size = of_keys.shape[-2:]
        state = dataclasses.replace(
            state,
            key=stored(state.key, key, state.length % size, lengths),
            value=stored(state.value, value, state.length % size, lengths),
        )
        out = self._attend(query, key.dtype, value.dtype, slots, size, state, lengths)

        state = dataclasses.replace(state, length=state.length + lengths)
        if state.max_length is not None:
            return out, state  # The row is shorter than a block, so no block ends.
        is_finished = (lengths > 0) & (state.length % size == 0)
        at, new = (state.length // size - 1) * slots, jnp.where(is_finished, slots, 0)

        def put(table, projection, block):
            precision = self.options.get("precision")
            return stored(table, project_blocks(projection, block, None, precision), at, new)

        return out, dataclasses.replace(
            state,
            slot_key=put(state.slot_key, of_keys, state.key),
            slot_value=put(state.slot_value, of_values, state.value),
        )

    def _attend(self, query, key_dtype, value_dtype, slots, size, state, lengths):
        """Attends to the slots of finished blocks and, causally, to the present block."""
        keys, values = (
            jnp.concatenate([x.astype(dtype) for x in both], 1)
            for dtype, *both in (
                (key_dtype, state.slot_key, state.key),
                (value_dtype, state.slot_value, state.value),
            )
        )
        before = state.slot_key.shape[1]
        is_finished = within(slots * (state.length // size), before)
        seen = jnp.concatenate([is_finished, jnp.ones(state.key.shape[:2], bool)], 1)
        given = attention.check(
            "block_linformer_attention",
            query,
            keys,
            values,
            mask=seen[:, None, None, :],
            is_causal=True,
            query_offset=before + state.length % size,
            query_seq_lengths=lengths,
            **self._given(_SHARED),
        )
        return attention.attend(query, keys, values, given)[0]
