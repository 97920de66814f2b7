"""Sliding-window KV cache: the last W keys and values, which a causal window can reach."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from effattn.arrays import checks, mesh_axes
from effattn.arrays.segments import within
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.state import bounded, check_bound


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingState:
    """KV cache of the last W tokens of each row, oldest first; the newest token is at slot W - 1.

    W is the span of the window or the maximum number of tokens of a row, whichever is less.

    Attributes:
      key: `(B, W, K, H)`; a row with fewer than W tokens fills the last `length` slots.
      value: `(B, W, K, Hv)`.
      length: `(B,)` int32, tokens seen.
      max_length: static; maximum tokens of a row if that is less than the span, else None.
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array
    max_length: int | None = dataclasses.field(default=None, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class RingDecoder(Decoder):
    """Decodes causal sliding-window attention; a step costs O(W) a row for any prefix length.

    The options `local_window_size` and `dilation` give W. The function is called as
    `function(query, key, value, is_causal=True, query_offset=W, segment_ids=(...), **options)`.
    """

    _state = RingState

    def _needs(self):
        return ("local_window_size",)

    @property
    def span(self) -> int:
        """Distance from a query to the oldest key in its window, in tokens."""
        left, _ = checks.window(self.options["local_window_size"])
        return left * int(np.max(self.options.get("dilation", 1)))

    def _empty(self, sizes: Sizes):
        return empty(self.span, sizes)

    def _extend(self, heads, state, lengths):
        query, key, value = heads
        keys, values, filled, after = append(state, key, value, lengths, self.span)
        kept = state.key.shape[1]
        key_ids = filled.astype(jnp.int32)
        query_ids, options, step, first = key_ids[:, kept:], self.options, 1, 0
        dilation = options.get("dilation", 1)
        if query.shape[1] == 1 and checks.is_integer(dilation) and dilation > 1:
            # One query reads every `dilation`-th slot: a window without dilation over these slots.
            step, options = int(dilation), {**options, "dilation": 1}
            first = kept % step
            keys, values, key_ids = (x[:, first::step] for x in (keys, values, key_ids))
        out = self.function(
            query,
            keys,
            values,
            is_causal=True,
            query_offset=kept // step,
            segment_ids=(query_ids, key_ids),
            **shift(options, state.length - kept + first, step),
        )
        return out, after


def empty(span: int, sizes: Sizes) -> RingState:
    """Returns an empty cache for a window that reaches `span` tokens back."""
    slots, bound = bounded(span, sizes.max_length)
    return RingState(*sizes.heads(slots), sizes.length(), max_length=bound)


def append(
    state: RingState, key: jax.Array, value: jax.Array, lengths: jax.Array, span: int
) -> tuple[jax.Array, jax.Array, jax.Array, RingState]:
    """Concatenates the cache and T new tokens, `(B, W + T, ...)`, and updates the cache.

    Returns:
      Keys; values; bool `(B, W + T)`, True at slots that hold a token; and the updated cache.
    """
    time, kept_slots = key.shape[1], state.key.shape[1]
    check_bound(state, lengths, kept_slots, span)
    keys, values = (
        jnp.concatenate([mesh_axes.beside(new, kept).astype(new.dtype), new], axis=1)
        for new, kept in ((key, state.key), (value, state.value))
    )
    # Slots [0, W) are the cache, filled from its end; slots from W on are the new tokens.
    slots = kept_slots + time
    filled = ~within(kept_slots - state.length, slots) & within(kept_slots + lengths, slots)

    def kept(arrays, taken):
        """Keeps slots [n, n + W) of a row with n new tokens."""
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=kept_slots)
        return tuple(jax.vmap(cut)(array, taken) for array in arrays)

    specs = (PartitionSpec(*mesh_axes.spec(array)) for array in (keys, values))
    new_key, new_value = mesh_axes.placed(kept, keys, *specs)((keys, values), lengths)
    after = dataclasses.replace(
        state,
        key=new_key.astype(state.key.dtype),
        value=new_value.astype(state.value.dtype),
        length=state.length + lengths,
    )
    return keys, values, filled, after


def shift(options: Mapping[str, Any], start: jax.Array, step: int = 1) -> Mapping[str, Any]:
    """Moves the positions of `score_mod`: slot n of row b is position `start[b] + step * n`."""
    score_mod = options.get("score_mod")
    if score_mod is None:
        return options

    def shifted(logit, b, h, i, j):
        return score_mod(logit, b, h, start[b] + step * i, start[b] + step * j)

    return {**options, "score_mod": shifted}
