"""Decoding of recurrent functions: a state of constant size."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from effattn.decode.state import check_init, check_state, new_lengths


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentState:
    """Decode state of a recurrent function.

    Attributes:
      state: the pytree that the function takes as `initial_state`, batch first; at least float32.
      length: `(B,)` int32, tokens seen.
      max_length: static; maximum tokens of a row, if that is less than the window of a state that
        keeps the last tokens; else None.
    """

    state: Any
    length: jax.Array
    max_length: int | None = dataclasses.field(default=None, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class RecurrentDecoder:
    """Decodes a function with the arguments `initial_state` and `return_state`.

    Time of a step and memory of the state are O(1) in the length of the prefix.

    Attributes:
      function: called as `function(query, key, value, initial_state=..., return_state=True,
        query_seq_lengths=..., key_value_seq_lengths=..., **options, **per_token)`, with
        `is_causal=True` if the function has that argument.
      options: arguments of the function, except arrays of the tokens `(B, T, ...)` such as decays
        and gates; `extend` takes those as `per_token`.
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
        **per_token: Any,
    ) -> RecurrentState:
        """Returns the zero state. It does not grow, so `max_length` is only checked.

        `per_token` holds the other arrays of one token, `(B, 1, ...)`, or their
        `jax.ShapeDtypeStruct`.
        """
        dtype = check_init(batch, max_length, dtype)
        key = jax.ShapeDtypeStruct((batch, 1, num_kv_heads, head_dim), dtype)
        value = jax.ShapeDtypeStruct((batch, 1, num_kv_heads, value_dim), dtype)
        _, state = jax.eval_shape(self._attend, key, key, value, **per_token)
        return RecurrentState(
            state=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def extend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        state: RecurrentState,
        lengths: jax.Array | None = None,
        **per_token: jax.Array,
    ) -> tuple[jax.Array, RecurrentState]:
        """Runs the recurrence over T more tokens.

        Args:
          query: `(B, T, N, H)`.
          key: `(B, T, K, H)`.
          value: `(B, T, K, Hv)`.
          state: from `init` or an earlier `extend`.
          lengths: `(B,)` int, valid tokens of each row, right padded; default all T.
          **per_token: other arrays of the T tokens, `(B, T, ...)`, by argument name.

        Returns:
          `(out (B, T, N, Hv), state)`; padding does not change the state.
        """
        batch, time = query.shape[:2]
        check_state(state, RecurrentState, batch)
        lengths = new_lengths(lengths, batch, time)
        out, carried = self._attend(
            query,
            key,
            value,
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
