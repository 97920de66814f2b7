"""Contiguous KV cache: all keys and values so far, in order, up to a fixed capacity."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from effattn.decode.state import check_capacity, check_init, check_state, new_lengths
from effattn.decode.tokens import stored


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContiguousState:
    """KV cache with keys and values at slots `[0, length)` of each row.

    Attributes:
      key: `(B, S, K, H)`, S the capacity.
      value: `(B, S, K, Hv)`.
      length: `(B,)` int32, tokens seen.
    """

    key: jax.Array
    value: jax.Array
    length: jax.Array


def empty(
    batch: int, max_length: int, num_kv_heads: int, head_dim: int, value_dim: int, dtype: Any
) -> ContiguousState:
    """Returns an empty cache for `max_length` tokens a row."""
    return ContiguousState(
        key=jnp.zeros((batch, max_length, num_kv_heads, head_dim), dtype),
        value=jnp.zeros((batch, max_length, num_kv_heads, value_dim), dtype),
        length=jnp.zeros((batch,), jnp.int32),
    )


def append(
    state: ContiguousState, key: jax.Array, value: jax.Array, lengths: jax.Array
) -> ContiguousState:
    """Appends the first `lengths[b]` of T new keys `(B, T, K, H)` and values.

    Raises `ValueError` if a row outgrows the capacity and the lengths are concrete. With traced
    lengths, tokens past the capacity are dropped.
    """
    check_capacity(state.length, lengths, state.key.shape[1])
    return ContiguousState(
        key=stored(state.key, key, state.length, lengths),
        value=stored(state.value, value, state.length, lengths),
        length=state.length + lengths,
    )


@dataclasses.dataclass(frozen=True)
class ContiguousDecoder:
    """Decodes a causal attention function that takes `query_offset` and `query_seq_lengths`.

    A step costs O(S) time a row, and the state O(S) memory.

    Attributes:
      function: called as `function(query, key, value, is_causal=True, query_offset=...,
        query_seq_lengths=..., **options)`.
      options: other arguments of the function.
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
    ) -> ContiguousState:
        """Returns an empty cache for `max_length` tokens a row."""
        dtype = check_init(batch, max_length, dtype)
        return empty(batch, max_length, num_kv_heads, head_dim, value_dim, dtype)

    def extend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        state: ContiguousState,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, ContiguousState]:
        """Appends T tokens, and attends from the new tokens to all tokens so far.

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
            tokens past the capacity are not stored, and later outputs do not attend to these
            tokens. Earlier tokens are never overwritten.
        """
        batch, time = query.shape[:2]
        check_state(state, ContiguousState, batch)
        lengths = new_lengths(lengths, batch, time)
        new = append(state, key, value, lengths)
        # The causal mask hides unfilled slots: their positions are after every query.
        out = self.function(
            query,
            new.key.astype(key.dtype),
            new.value.astype(value.dtype),
            is_causal=True,
            query_offset=state.length,
            query_seq_lengths=lengths,
            **self.options,
        )
        return out, new
