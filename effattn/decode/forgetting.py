"""Decoding of forgetting attention: a KV cache with the forget gates."""

import dataclasses

import jax
import jax.numpy as jnp

from effattn.arrays import dtypes
from effattn.decode.decoder import Decoder, Sizes
from effattn.decode.tokens import append_to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForgettingState:
    """KV cache with keys, values and log forget gates at slots `[0, length)` of each row.

    Attributes:
      key: `(B, S, K, H)`, S the capacity.
      value: `(B, S, K, Hv)`.
      log_forget: `(B, S, N)`, at least float32.
      length: `(B,)` int32, tokens seen.
    """

    key: jax.Array
    value: jax.Array
    log_forget: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True)
class ForgettingDecoder(Decoder):
    """Decodes `forgetting_attention`; a step costs O(S) time a row, and the state O(S) memory."""

    _state = ForgettingState

    def _empty(self, sizes: Sizes, log_forget):
        key, value = sizes.heads(sizes.max_length)
        shape = sizes.batch, sizes.max_length, log_forget.shape[-1]
        gates = jnp.zeros(shape, dtypes.wide(sizes.dtype, log_forget.dtype))
        return ForgettingState(key, value, gates, sizes.length())

    def _extend(self, heads, state, lengths, log_forget):
        query, key, value = heads
        new = append_to(state, lengths, key=key, value=value, log_forget=log_forget)
        # The causal mask hides unfilled slots: their positions are after every query.
        out = self.function(
            query,
            new.key.astype(key.dtype),
            new.value.astype(value.dtype),
            log_forget=new.log_forget,
            query_offset=state.length,
            query_seq_lengths=lengths,
            **self.options,
        )
        return out, new
