"""Decoding of block Linformer attention: the present block and slots of finished blocks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays.segments import positions_from, within
from effattn.cores import attention
from effattn.decode.segments import extend_by_segment
from effattn.decode.state import (
    bounded,
    check_bound,
    check_capacity,
    check_init,
    check_state,
    new_lengths,
)
from effattn.functional.block_linformer import check_projections, project_blocks

_SHARED = ("scale", "logits_soft_cap", "sink", "precision", "tile", "implementation")
_OPTIONS = frozenset((*_SHARED, "key_projection", "value_projection"))


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
class BlockLinformerDecoder:
    """Decodes `effattn.block_linformer_attention`.

    A step costs O(b + r M) time a row, and the state O(b + r M) memory, for a sequence of M + 1
    blocks.

    Attributes:
      function: `effattn.block_linformer_attention`.
      options: arguments of the function; both projections are required.
    """

    function: Callable[..., Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def init(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: Any,
    ) -> BlockLinformerState:
        """Returns an empty state for `max_length` tokens a row, rounded up to whole blocks."""
        dtype = check_init(batch, max_length, dtype)
        of_keys, _ = self._projections(num_kv_heads)
        slots, size = of_keys.shape[-2:]
        finished = max(-(-max_length // size) - 1, 0)
        places, bound = bounded(size, max_length)

        def zeros(tokens, features):
            return jnp.zeros((batch, tokens, num_kv_heads, features), dtype)

        return BlockLinformerState(
            key=zeros(places, head_dim),
            value=zeros(places, value_dim),
            slot_key=zeros(finished * slots, head_dim),
            slot_value=zeros(finished * slots, value_dim),
            length=jnp.zeros((batch,), jnp.int32),
            max_length=bound,
        )

    def extend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        state: BlockLinformerState,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, BlockLinformerState]:
        """Attends from T new tokens to earlier blocks and the present block, block by block.

        Args:
          query: `(B, T, N, H)`.
          key: `(B, T, K, H)`.
          value: `(B, T, K, Hv)`.
          state: from `init` or an earlier `extend`.
          lengths: `(B,)` int, valid tokens of each row, right padded; default all T.

        Returns:
          `(out (B, T, N, Hv), state)`; rows of `out` in the padding are zeros.

        Raises:
          ValueError: a row outgrows the capacity and the lengths are concrete. With traced lengths,
            slots past the capacity are not stored, and later outputs do not attend to these slots.
            Earlier slots are never overwritten.
        """
        batch, time = query.shape[:2]
        check_state(state, BlockLinformerState, batch)
        lengths = new_lengths(lengths, batch, time)
        slots, size = self._projections(key.shape[-2])[0].shape[-2:]
        check_bound(state, lengths, state.key.shape[1], size)
        check_capacity(state.length, lengths, (state.slot_key.shape[1] // slots + 1) * size)
        out = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), value.dtype)
        return extend_by_segment(
            self._extend_inside, size, (query, key, value), out, state, lengths
        )

    def _projections(self, heads: int):
        unknown = self.options.keys() - _OPTIONS
        if unknown:
            raise ValueError(
                "decoding block Linformer attention takes the options "
                f"{', '.join(sorted(_OPTIONS))}; got also {', '.join(sorted(unknown))}"
            )
        names = ("key_projection", "value_projection")
        missing = [name for name in names if name not in self.options]
        if missing:
            raise ValueError(
                f"decoding block Linformer attention needs {' and '.join(missing)} among the "
                f"options, got {sorted(self.options)}"
            )
        of_keys, of_values = (self.options[name] for name in names)
        return check_projections(of_keys, of_values, heads)

    def _extend_inside(self, arrays, state: BlockLinformerState, lengths):
        """Extends by tokens that lie in one block of each row."""
        query, key, value = arrays
        batch, time = query.shape[:2]
        projections = self._projections(key.shape[-2])
        slots, size = projections[0].shape[-2:]
        rows = jnp.arange(batch)[:, None]
        # Padding goes to a place that does not exist, so `mode="drop"` drops it.
        places = positions_from(state.length % size, time)
        places = jnp.where(within(lengths, time), places, size)
        present_key, present_value = (
            old.at[rows, places].set(new.astype(old.dtype), mode="drop")
            for old, new in ((state.key, key), (state.value, value))
        )
        present, of_slots = (present_key, present_value), (state.slot_key, state.slot_value)
        out = self._attend(query, key, value, of_slots, present, state.length, projections, lengths)

        length = state.length + lengths
        if state.max_length is not None:
            # The row is shorter than a block, so no block ends.
            return out, dataclasses.replace(
                state, key=present_key, value=present_value, length=length
            )
        is_finished = (lengths > 0) & (length % size == 0)
        at = positions_from((length // size - 1) * slots, slots)
        at = jnp.where(is_finished[:, None], at, state.slot_key.shape[1])
        precision = self.options.get("precision")
        slot_key, slot_value = (
            old.at[rows, at].set(project_blocks(projection, x, None, precision), mode="drop")
            for old, projection, x in zip(of_slots, projections, present, strict=True)
        )
        return out, BlockLinformerState(present_key, present_value, slot_key, slot_value, length)

    def _attend(self, query, key, value, of_slots, present, length, projections, lengths):
        """Attends to the slots of finished blocks and, causally, to the present block."""
        slots, size = projections[0].shape[-2:]
        batch, places = query.shape[0], present[0].shape[1]
        keys, values = (
            jnp.concatenate([x.astype(new.dtype) for x in both], 1)
            for both, new in zip(zip(of_slots, present, strict=True), (key, value), strict=True)
        )
        stored = of_slots[0].shape[1]
        is_before = within(slots * (length // size), stored)
        seen = jnp.concatenate([is_before, jnp.ones((batch, places), bool)], 1)
        given = attention.check(
            "block_linformer_attention",
            query,
            keys,
            values,
            mask=seen[:, None, None, :],
            is_causal=True,
            query_offset=stored + length % size,
            query_seq_lengths=lengths,
            **{name: self.options[name] for name in _SHARED if name in self.options},
        )
        out, _ = attention.attend(query, keys, values, given)
        return out
