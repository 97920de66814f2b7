"""Base class of recurrent mixers: one function for whole sequences and decoding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from effattn.decode.recurrent import RecurrentState
from effattn.decode.state import new_lengths
from effattn.nn.mixer import CausalMixer


class RecurrentMixer(CausalMixer):
    """Base class of causal mixers with a state of constant size; subclasses implement `_mix`."""

    def _mix(
        self,
        x: jax.Array,
        state: Any,
        lengths: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        """Mixes x `(B, T, D)`, zero in the padding; returns `(y (B, T, D), state)`.

        `state` is the state of an earlier call, or None before the first token. `segment_ids`
        require `state=None`, and then the returned state has no meaning.
        """
        raise NotImplementedError

    def _mix_all(self, x, lengths, segment_ids):
        return self._mix(x, None, lengths, segment_ids)[0]

    def _empty(self, batch, max_length, dtype):
        token = jax.ShapeDtypeStruct((batch, 1, self.in_features), dtype)
        _, state = jax.eval_shape(lambda x: self._mix(x, None, None, None), token)
        return RecurrentState(
            state=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def _extend(self, x, state, lengths):
        more = new_lengths(lengths, *x.shape[:2])
        y, carried = self._mix(x, state.state, lengths, None)
        return y, dataclasses.replace(state, state=carried, length=state.length + more)


class FunctionMixer(RecurrentMixer):
    """Base class of recurrent mixers around one recurrent function of `effattn`."""

    def __init__(
        self,
        in_features: int,
        *,
        chunk_size: int | None = None,
        implementation: str | tuple[str, ...] | None = None,
        **options: Any,
    ):
        super().__init__(in_features, **options)
        self.chunk_size = chunk_size
        self.implementation = implementation

    def _options(
        self, state: Any, lengths: jax.Array | None, segment_ids: jax.Array | None
    ) -> dict[str, Any]:
        """Keyword arguments of the function, which then returns `(out, state)`."""
        return {
            "query_seq_lengths": lengths,
            "key_value_seq_lengths": lengths,
            "segment_ids": segment_ids,
            "initial_state": state,
            "return_state": True,
            "chunk_size": self.chunk_size,
            "implementation": self.implementation,
        }
