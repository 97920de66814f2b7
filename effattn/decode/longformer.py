"""Decoding of Longformer attention: a window cache and caches of the global tokens."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays.combine import combine
from effattn.arrays.gathers import rows_at
from effattn.arrays.segments import positions_from, within
from effattn.cores import attention
from effattn.decode import contiguous, ring
from effattn.decode.contiguous import ContiguousState
from effattn.decode.decoder import Sizes, without_naive
from effattn.decode.ring import RingDecoder, RingState
from effattn.decode.state import bounded, check_init, check_state, new_lengths
from effattn.decode.tokens import append_to
from effattn.functional.longformer import locate
from effattn.functional.sliding_window import sliding_window_attention

Heads = tuple[jax.Array, jax.Array, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LongformerState:
    """Decode state: a window cache, the global tokens, and a cache of all tokens.

    Attributes:
      ring: KV cache of the last W tokens, for the window.
      key: `(B, G, K, H)`, keys of the global tokens so far; every query attends to these keys.
      value: `(B, G, K, Hv)`, values of the global tokens so far.
      position: `(B, G)` int32, positions of the global tokens; -1 in unfilled slots.
      prefix: KV cache for queries of global tokens: all tokens, or the leading global tokens.
      max_length: static; maximum tokens of a row if that is less than `max_global`, else None.
    """

    ring: RingState
    key: jax.Array
    value: jax.Array
    position: jax.Array
    prefix: ContiguousState
    max_length: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def length(self) -> jax.Array:
        """`(B,)` int32, tokens seen."""
        return self.ring.length


@dataclasses.dataclass(frozen=True)
class LongformerDecoder:
    """Decodes causal Longformer attention with up to G global tokens a row.

    A local token costs O(W + G) time; a global token reads the whole prefix, O(S). The state takes
    O(S) memory a row, and O(W + G) if the global tokens are leading.

    Attributes:
      options: arguments of `effattn.longformer_attention`; `max_global` (G) is required.
      leading: whether the global tokens of each row are its first G tokens.
    """

    options: Mapping[str, Any]
    leading: bool = False

    def __post_init__(self):
        object.__setattr__(self, "options", without_naive(self.options))

    def init(
        self,
        batch: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: Any,
    ) -> LongformerState:
        """Returns an empty state for `max_length` tokens a row."""
        dtype = check_init(batch, max_length, dtype)
        sizes = Sizes(batch, max_length, num_kv_heads, head_dim, value_dim, dtype)
        most, bound = bounded(self.options["max_global"], max_length)
        return LongformerState(
            ring.empty(self._window.span, sizes),
            *sizes.heads(most),
            position=jnp.full((batch, most), -1, jnp.int32),
            prefix=contiguous.empty(sizes._replace(max_length=most) if self.leading else sizes),
            max_length=bound,
        )

    def extend(
        self,
        heads: Heads,
        global_heads: Heads,
        state: LongformerState,
        lengths: jax.Array | None = None,
        global_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, LongformerState]:
        """Attends from T new tokens to the window, the global tokens and, if global, the prefix.

        Args:
          heads: query `(B, T, N, H)`, key `(B, T, K, H)` and value `(B, T, K, Hv)`.
          global_heads: query, key and value by the projections of global attention, same shapes.
          state: from `init` or an earlier `extend`.
          lengths: `(B,)` int, valid tokens of each row, right padded; default all T.
          global_mask: bool `(B, T)`, True for global tokens; default none. Only the first G global
            tokens of a row count.

        Returns:
          `(out (B, T, N, Hv), state)`; rows of `out` in the padding are zeros.
        """
        query, key, value = heads
        batch, time = query.shape[:2]
        check_state(state, LongformerState, batch)
        lengths = new_lengths(lengths, batch, time)
        positions = positions_from(state.length, time)
        global_query, global_key, global_value = global_heads
        is_valid = within(lengths, time)
        is_global = None if global_mask is None else global_mask & is_valid
        if is_global is not None:
            state, is_global = _with_new_global_tokens(state, key, value, positions, is_global)
        keys, values, filled, after = ring.append(
            state.ring, key, value, lengths, self._window.span
        )
        kept = lengths
        if self.leading and state.max_length is None:
            # Queries of global tokens read no later tokens.
            kept = jnp.minimum(lengths, state.position.shape[1] - state.prefix.length)
        prefix = append_to(state.prefix, kept, key=global_key, value=global_value)

        span = state.ring.key.shape[1]
        start = state.length - span
        is_local = filled & ~_slots_of_global_tokens(state.position, start, filled.shape)
        local = {name: o for name, o in self.options.items() if name != "max_global"}
        local_part = sliding_window_attention(
            query,
            keys,
            values,
            is_causal=True,
            query_offset=span,
            segment_ids=(is_valid.astype(jnp.int32), is_local.astype(jnp.int32)),
            return_residual=True,
            **ring.shift(local, start),
        )
        seen = state.position[:, None, :]
        global_part = self._attend(
            (query, state.key.astype(key.dtype), state.value.astype(value.dtype)),
            (positions, state.position),
            is_valid[..., None] & (seen >= 0) & (seen <= positions[..., None]),
        )
        out, _ = combine(*zip(local_part, global_part, strict=True))

        if is_global is not None:
            is_global, slot, where = locate(is_global, min(time, state.position.shape[1]))

            def attend_globally():
                asking = rows_at(positions, where)
                everywhere = jnp.arange(prefix.key.shape[1], dtype=jnp.int32)
                of_global, _ = self._attend(
                    (
                        rows_at(global_query, where),
                        prefix.key.astype(key.dtype),
                        prefix.value.astype(value.dtype),
                    ),
                    (asking, jnp.broadcast_to(everywhere, prefix.key.shape[:2])),
                    rows_at(is_global, where)[..., None] & (everywhere <= asking[..., None]),
                )
                return jnp.where(is_global[..., None, None], rows_at(of_global, slot), out)

            # Only steps with a global token read the whole prefix.
            out = jax.lax.cond(jnp.any(is_global), attend_globally, lambda: out)
        return out, dataclasses.replace(state, ring=after, prefix=prefix)

    @property
    def _window(self) -> RingDecoder:
        return RingDecoder(sliding_window_attention, self.options)

    def _attend(self, heads: Heads, positions: tuple[jax.Array, jax.Array], mask: jax.Array):
        """Returns output and log-sum-exp of softmax attention under the mask `(B, T, S)`."""
        windows = ("local_window_size", "dilation", "tile", "max_global")
        options = {name: o for name, o in self.options.items() if name not in windows}
        given = attention.check("longformer_attention", *heads, mask=mask[:, None], **options)
        return attention.attend(*heads, dataclasses.replace(given, positions=positions))


def _with_new_global_tokens(state, key, value, positions, is_global):
    """Stores the new global tokens that fit; returns the state and the mask of stored tokens."""
    most = state.position.shape[1]
    taken = jnp.sum(state.position >= 0, axis=-1, keepdims=True)
    slot = taken + jnp.cumsum(is_global, axis=-1) - 1
    is_global = is_global & (slot < most)
    # Local tokens go to a slot that does not exist, so `mode="drop"` drops them.
    slot = jnp.where(is_global, slot, most)

    @jax.vmap
    def stored(held, slot, new):
        return held.at[slot].set(new.astype(held.dtype), mode="drop")

    state = dataclasses.replace(
        state,
        key=stored(state.key, slot, key),
        value=stored(state.value, slot, value),
        position=stored(state.position, slot, positions),
    )
    return state, is_global


def _slots_of_global_tokens(position, start, shape):
    """Returns bool `(B, W + T)`, True at global tokens; slot 0 of row b is position `start[b]`."""
    slot = position - start[:, None]
    slot = jnp.where((position >= 0) & (slot >= 0), slot, shape[1])
    return jax.vmap(lambda empty, slot: empty.at[slot].set(True, mode="drop"))(
        jnp.zeros(shape, bool), slot
    )


def decoder(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Returns the decoder without global tokens: that of causal sliding-window attention."""
    given = {name: option for name, option in options.items() if option is not None}
    # `max_global` bounds `global_mask`, which is not given here.
    given.pop("max_global", None)
    named = sorted(name for name in given if name.startswith("global_"))
    if named:
        raise NotImplementedError(
            f"decoding {function.__name__} takes no global tokens, got {', '.join(named)}; "
            "effattn.nn.LongformerSelfAttention with max_global decodes them"
        )
    return RingDecoder(sliding_window_attention, given)
