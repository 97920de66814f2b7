"""Contiguous KV cache: all keys and values so far, in order, up to a fixed capacity."""

import dataclasses
import inspect

import jax

from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.tokens import append_to, cleared


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

    def forget(self, n: jax.Array, most: int) -> "ContiguousState":
        """The state without the last n tokens of each row, at most `most`."""
        length = self.length - n
        key, value = (cleared(kept, length, n, most) for kept in (self.key, self.value))
        return ContiguousState(key, value, length)


def empty(sizes: Sizes) -> ContiguousState:
    """Returns an empty cache for `max_length` tokens a row."""
    return ContiguousState(*sizes.heads(sizes.max_length), sizes.length())


@dataclasses.dataclass(frozen=True)
class ContiguousDecoder(Decoder):
    """Decodes a causal attention function that takes `query_offset` and `query_seq_lengths`.

    A step costs O(S) time a row, and the state O(S) memory. The function is called as
    `function(query, key, value, is_causal=True, query_offset=..., query_seq_lengths=...,
    **options)`, without `is_causal` if the function is always causal.
    """

    _state = ContiguousState

    def _empty(self, sizes: Sizes):
        return empty(sizes)

    def _extend(self, heads, state, lengths):
        query, key, value = heads
        new = append_to(state, lengths, key=key, value=value)
        keys, values = new.key.astype(key.dtype), new.value.astype(value.dtype)
        return self.attend(query, keys, values, state.length, lengths), new

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        length: jax.Array,
        lengths: jax.Array,
    ) -> jax.Array:
        """Attends from new tokens to a cache that has their keys and values.

        Args:
          query: `(B, T, N, H)`.
          key: `(B, S, K, H)`, of the cache.
          value: `(B, S, K, Hv)`, of the cache.
          length: `(B,)` int32, tokens before the new ones.
          lengths: `(B,)` int32, valid tokens among the T.

        Returns:
          `(B, T, N, Hv)`, zeros in the padding.
        """
        has_direction = "is_causal" in inspect.signature(self.function).parameters
        direction = {"is_causal": True} if has_direction else {}
        # The causal mask hides unfilled slots: their positions are after every query.
        return self.function(
            query,
            key,
            value,
            query_offset=length,
            query_seq_lengths=lengths,
            **direction,
            **self.options,
        )
