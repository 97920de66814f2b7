"""Decoding of long-short attention: a window cache, segment sums and slots."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from effattn.arrays import dtypes
from effattn.arrays.combine import combine
from effattn.arrays.segments import within
from effattn.cores import attention
from effattn.decode import ring
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.ring import RingState
from effattn.decode.segments import extend_by_segment
from effattn.decode.state import check_bound, check_capacity
from effattn.decode.tokens import choose_rows, stored
from effattn.functional.long_short import Settings, normalise, scores_of

_SHARED = ("scale", "logits_soft_cap", "precision", "tile", "implementation")
_OWN = ("window_size", "segment_size", "window_norm", "slot_norm")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Online softmax sums of the present segment for each of r slots; at least float32.

    Attributes:
      largest: `(B, r, K)`, the largest score; `dtypes.lowest` without tokens.
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
class LongShortDecoder(Decoder):
    """Decodes causal `effattn.long_short_attention`.

    A step costs O(w + r M) time a row, and the state O(w + r M) memory, for a sequence of M + 1
    segments. The state has room for `max_length` tokens a row, rounded up to whole segments.

    `window_size` is a required option, and so is `projection`, unless `init` and `extend` are given
    the scores of the slots, `slot_scores (B, T, K, r)`.
    """

    _state = LongShortState

    def _needs(self):
        return ("window_size",)

    def _takes(self):
        return (*_SHARED, *_OWN, "sink", "projection")

    def _empty(self, sizes: Sizes, slot_scores=None):
        key, value = jax.eval_shape(lambda: sizes.heads(1))
        options, scores = self._read(key, value), jax.eval_shape(self._scores, key, slot_scores)
        slots = scores.shape[-1]
        segments = max(-(-sizes.max_length // options.segment) - 1, 0)
        wide = dtypes.wide(sizes.dtype)
        weight = jnp.zeros((sizes.batch, slots, sizes.key_heads), wide)
        return LongShortState(
            ring.empty(options.window - 1, sizes),
            _empty_sums(weight, *sizes.heads(slots, wide)),
            *sizes.heads(segments * slots),
        )

    def _extend(self, heads, state, lengths, slot_scores=None):
        _, key, value = heads
        options, slot_scores = self._read(key, value), self._scores(key, slot_scores)
        slots = state.sums.weight.shape[1]
        if slot_scores.shape[-1] != slots:
            raise ValueError(f"the state has {slots} slots, got {slot_scores.shape[-1]}")
        capacity = (state.slot_key.shape[1] // slots + 1) * options.segment
        check_capacity(state.length, lengths, capacity)
        check_bound(state.ring, lengths, state.ring.key.shape[1], options.window - 1)
        extend_inside = functools.partial(self._extend_inside, options)
        arrays = (*heads, slot_scores)
        return extend_by_segment(extend_inside, options.segment, arrays, state, lengths)

    def _read(self, key, value) -> Settings:
        window, segment, window_norm, slot_norm = (self.options.get(name) for name in _OWN)
        segment = window if segment is None else segment
        return Settings.of(window, segment, window_norm, slot_norm, key, value)

    def _scores(self, key, given):
        """The scores of the slots `(B, T, K, r)`."""
        projection, precision = (self.options.get(name) for name in ("projection", "precision"))
        return scores_of(projection, given, key, precision)

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
        slots = sums.weight.shape[1]
        at = (after.length // options.segment - 1) * slots
        weight = jnp.where(sums.weight == 0, 1, sums.weight)[..., None]

        def put(table, total):
            mean = normalise((total / weight).astype(table.dtype), options.slot_norm)
            return stored(table, mean, at, jnp.where(is_finished, slots, 0))

        return out, LongShortState(
            ring=after,
            sums=choose_rows(is_finished, _empty_sums(sums.weight, sums.key, sums.value), sums),
            slot_key=put(state.slot_key, sums.key),
            slot_value=put(state.slot_value, sums.value),
        )

    def _attend(self, options: Settings, heads, filled, state: LongShortState, lengths):
        """Attends to the window and to the slots in one softmax."""
        query, keys, values = heads
        shared = self._given(_SHARED)
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


def _empty_sums(weight, key, value) -> Sums:
    """Returns sums without tokens, in the shapes of the arguments."""
    largest = jnp.full_like(weight, dtypes.lowest(weight.dtype))
    return Sums(largest, *map(jnp.zeros_like, (weight, key, value)))


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
