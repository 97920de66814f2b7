"""Decoding of long-short attention: a window cache, segment sums and slots."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays import dtypes
from effattn.arrays.combine import combine
from effattn.arrays.segments import positions_from, within
from effattn.cores import attention
from effattn.decode import ring
from effattn.decode.ring import RingState
from effattn.decode.segments import extend_by_segment
from effattn.decode.state import (
    check_bound,
    check_capacity,
    check_init,
    check_state,
    new_lengths,
)
from effattn.functional.long_short import Settings, check_projection, normalise, score

_SHARED = ("scale", "logits_soft_cap", "precision", "tile", "implementation")
_OWN = ("window_size", "segment_size", "window_norm", "slot_norm")
_OPTIONS = frozenset((*_SHARED, *_OWN, "sink", "projection", "num_slots"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Online softmax sums of the present segment for each of r slots; at least float32.

    Attributes:
      largest: `(B, r, K)`, the largest score, -inf without tokens.
      weight: `(B, r, K)`, the sum of the weights exp(score - largest).
      key: `(B, r, K, H)`, the weighted sum of keys.
      value: `(B, r, K, Hv)`, the weighted sum of values.
    """

    largest: jax.Array
    weight: jax.Array
    key: jax.Array
    value: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LongShortState:
    """Decode state: a window cache, sums of the present segment, and slots of finished segments.

    Attributes:
      ring: KV cache of the last w - 1 tokens.
      sums: sums of the present segment.
      slot_key: `(B, M r, K, H)`, slots of up to M finished segments.
      slot_value: `(B, M r, K, Hv)`.
    """

    ring: RingState
    sums: Sums
    slot_key: jax.Array
    slot_value: jax.Array

    @property
    def length(self) -> jax.Array:
        """`(B,)` int32, tokens seen."""
        return self.ring.length


@dataclasses.dataclass(frozen=True)
class LongShortDecoder:
    """Decodes causal `effattn.long_short_attention`.

    A step costs O(w + r M) time a row, and the state O(w + r M) memory, for a sequence of M + 1
    segments.

    Attributes:
      function: `effattn.long_short_attention`.
      options: arguments of the function; `window_size` is required, and either `projection` or, if
        `extend` gets `slot_scores`, the number of slots as `num_slots`.
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
    ) -> LongShortState:
        """Returns an empty state for `max_length` tokens a row, rounded up to whole segments."""
        dtype = check_init(batch, max_length, dtype)
        key = jax.ShapeDtypeStruct((batch, 1, num_kv_heads, head_dim), dtype)
        value = jax.ShapeDtypeStruct((batch, 1, num_kv_heads, value_dim), dtype)
        options, slots = self._read(key, value)
        segments = max(-(-max_length // options.segment) - 1, 0)
        wide = dtypes.wide(dtype)

        def zeros(tokens, *features, dtype=dtype):
            return jnp.zeros((batch, tokens, num_kv_heads, *features), dtype)

        return LongShortState(
            ring=ring.empty(
                options.window - 1, batch, max_length, num_kv_heads, head_dim, value_dim, dtype
            ),
            sums=Sums(
                largest=zeros(slots, dtype=wide) + dtypes.lowest(wide),
                weight=zeros(slots, dtype=wide),
                key=zeros(slots, head_dim, dtype=wide),
                value=zeros(slots, value_dim, dtype=wide),
            ),
            slot_key=zeros(segments * slots, head_dim),
            slot_value=zeros(segments * slots, value_dim),
        )

    def extend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        state: LongShortState,
        lengths: jax.Array | None = None,
        slot_scores: jax.Array | None = None,
    ) -> tuple[jax.Array, LongShortState]:
        """Attends from T new tokens to the window and the slots, segment by segment.

        Args:
          query: `(B, T, N, H)`.
          key: `(B, T, K, H)`.
          value: `(B, T, K, Hv)`.
          state: from `init` or an earlier `extend`.
          lengths: `(B,)` int, valid tokens of each row, right padded; default all T.
          slot_scores: `(B, T, K, r)`, scores of the slots, instead of the option `projection`.

        Returns:
          `(out (B, T, N, Hv), state)`; rows of `out` in the padding are zeros.

        Raises:
          ValueError: a row outgrows the capacity and the lengths are concrete. With traced lengths,
            slots past the capacity are not stored, and later outputs do not attend to these slots.
            Earlier slots are never overwritten.
        """
        batch, time = query.shape[:2]
        check_state(state, LongShortState, batch)
        lengths = new_lengths(lengths, batch, time)
        options, slots = self._read(key, value)
        capacity = (state.slot_key.shape[1] // slots + 1) * options.segment
        check_capacity(state.length, lengths, capacity)
        check_bound(state.ring, lengths, state.ring.key.shape[1], options.window - 1)
        if slot_scores is None:
            projection = check_projection(self.options["projection"], key)
            slot_scores = score(projection, key, self.options.get("precision"))

        def extend_inside(arrays, state, lengths):
            return self._extend_inside(options, arrays, state, lengths)

        arrays = (query, key, value, slot_scores)
        out = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), value.dtype)
        return extend_by_segment(extend_inside, options.segment, arrays, out, state, lengths)

    def _read(self, key, value) -> tuple[Settings, int]:
        """Returns the checked options and the number of slots."""
        unknown = self.options.keys() - _OPTIONS
        if unknown:
            raise ValueError(
                f"decoding long-short attention takes the options {', '.join(sorted(_OPTIONS))}; "
                f"got also {', '.join(sorted(unknown))}"
            )
        if "window_size" not in self.options or not {"projection", "num_slots"} & set(self.options):
            raise ValueError(
                "decoding long-short attention needs window_size and projection among the options, "
                f"got {sorted(self.options)}"
            )
        window, segment, window_norm, slot_norm = (self.options.get(name) for name in _OWN)
        segment = window if segment is None else segment
        options = Settings.of(window, segment, window_norm, slot_norm, key, value)
        if "num_slots" in self.options:
            return options, self.options["num_slots"]
        return options, check_projection(self.options["projection"], key).shape[-1]

    def _extend_inside(self, options: Settings, arrays, state: LongShortState, lengths):
        """Extends by tokens that lie in one segment of each row."""
        query, key, value, scores = arrays
        present = within(lengths, key.shape[1])[..., None, None]
        key, value, scores = (jnp.where(present, x, 0) for x in (key, value, scores))
        keys, values = (normalise(x, options.window_norm) for x in (key, value))
        keys, values, filled, after = ring.append(
            state.ring, keys, values, lengths, options.window - 1
        )
        out = self._attend(options, (query, keys, values), filled, state, lengths)

        sums = _add(state.sums, key, value, jnp.where(present, scores, dtypes.lowest(scores.dtype)))
        is_finished = (lengths > 0) & (after.length % options.segment == 0)
        slots, stored = sums.weight.shape[1], state.slot_key.shape[1]
        at = positions_from((after.length // options.segment - 1) * slots, slots)
        # Unfinished segments go to a slot that does not exist, so `mode="drop"` drops them.
        at, rows = jnp.where(is_finished[:, None], at, stored), jnp.arange(at.shape[0])[:, None]
        weight = jnp.where(sums.weight == 0, 1, sums.weight)[..., None]

        def put(table, total):
            mean = normalise((total / weight).astype(table.dtype), options.slot_norm)
            return table.at[rows, at].set(mean, mode="drop")

        return out, LongShortState(
            ring=after,
            sums=_clear(sums, is_finished),
            slot_key=put(state.slot_key, sums.key),
            slot_value=put(state.slot_value, sums.value),
        )

    def _attend(self, options: Settings, heads, filled, state: LongShortState, lengths):
        """Attends to the window and to the slots in one softmax."""
        query, keys, values = heads
        shared = {name: self.options[name] for name in _SHARED if name in self.options}
        kept, slots = state.ring.key.shape[1], state.sums.weight.shape[1]
        ids = filled.astype(jnp.int32)
        windows = attention.check(
            "long_short_attention",
            query,
            keys,
            values,
            is_causal=True,
            local_window_size=(options.window - 1, 0),
            query_offset=kept,
            segment_ids=(ids[:, kept:], ids),
            sink=self.options.get("sink"),
            **shared,
        )
        parts = [attention.attend(query, keys, values, windows)]
        if state.slot_key.shape[1]:
            slot_key = state.slot_key.astype(keys.dtype)
            slot_value = state.slot_value.astype(values.dtype)
            to_slots = attention.check(
                "long_short_attention",
                query,
                slot_key,
                slot_value,
                query_seq_lengths=lengths,
                key_value_seq_lengths=slots * (state.length // options.segment),
                **shared,
            )
            parts.append(attention.attend(query, slot_key, slot_value, to_slots))
        out, _ = combine(*zip(*parts, strict=True))
        return out


def _add(sums: Sums, key, value, scores) -> Sums:
    """Adds T tokens to the sums; scores `(B, T, K, r)` are `dtypes.lowest` in the padding."""
    scores = jnp.moveaxis(scores.astype(sums.weight.dtype), 1, -1)  # (B, K, r, T)
    before = jnp.swapaxes(sums.largest, 1, 2)
    largest = jnp.maximum(before, scores.max(-1))
    finite = jnp.where(largest == dtypes.lowest(largest.dtype), 0, largest)
    kept = jnp.swapaxes(jnp.exp(before - finite), 1, 2)
    weights = jnp.exp(scores - finite[..., None])

    def added(total, x):
        more = jnp.einsum("bkrt,btkh->brkh", weights, x, precision="highest")
        return total * kept[..., None] + more

    return Sums(
        largest=jnp.swapaxes(largest, 1, 2),
        weight=sums.weight * kept + jnp.swapaxes(weights.sum(-1), 1, 2),
        key=added(sums.key, key.astype(weights.dtype)),
        value=added(sums.value, value.astype(weights.dtype)),
    )


def _clear(sums: Sums, rows) -> Sums:
    """Resets the sums to empty where `rows (B,)` is True."""

    def where(empty, x):
        return jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), empty, x)

    return Sums(
        where(dtypes.lowest(sums.largest.dtype), sums.largest),
        where(0, sums.weight),
        where(0, sums.key),
        where(0, sums.value),
    )
