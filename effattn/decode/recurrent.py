"""Decoding of recurrent functions: a state of constant size."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from effattn.decode.decoder import Decoder, Sizes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentState:
    """Decode state of a recurrent function.

    Attributes:
      state: the pytree that the function takes as `initial_state`, batch first; at least float32.
      length: `(B,)` int32, tokens seen.
      max_length: static; maximum tokens of a row, if that is less than the window of a state that
        keeps the last tokens; else None.
      mechanism: static; name of the mechanism of the mixer that made the state, or None.
    """

    state: Any
    length: jax.Array
    max_length: int | None = dataclasses.field(default=None, metadata={"static": True})
    mechanism: str | None = dataclasses.field(default=None, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class RecurrentDecoder(Decoder):
    """Decodes a function with the arguments `initial_state` and `return_state`.

    Time of a step and memory of the state are O(1) in the length of the prefix. The function is
    called as `function(query, key, value, initial_state=..., return_state=True,
    query_seq_lengths=..., key_value_seq_lengths=..., **options, **per_token)`, with
    `is_causal=True` if the function has that argument. Arrays of the tokens `(B, T, ...)`, such as
    decays and gates, are no options: `extend` takes them as `per_token`.
    """

    _state = RecurrentState

    def _empty(self, sizes: Sizes, **per_token):
        key, value = jax.eval_shape(lambda: sizes.heads(1))
        _, state = jax.eval_shape(self._attend, key, key, value, **per_token)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)
        return RecurrentState(state=zeros, length=sizes.length())

    def _extend(self, heads, state, lengths, **per_token):
        out, carried = self._attend(
            *heads,
            initial_state=state.state,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            **per_token,
        )
        return out, dataclasses.replace(state, state=carried, length=state.length + lengths)

    def _attend(self, query, key, value, **kwargs):
        if "is_causal" in inspect.signature(self.function).parameters:
            kwargs["is_causal"] = True
        return self.function(query, key, value, return_state=True, **self.options, **kwargs)
