"""What the layers around a recurrence share: whole sequences and decoding through one function."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from effattn.decode.recurrent import RecurrentState
from effattn.decode.state import new_lengths
from effattn.nn.mixer import CausalMixer


class RecurrentMixer(CausalMixer):
    """A causal mixer whose state does not grow; a subclass says how it mixes."""

    _state = RecurrentState

    def _mix(
        self,
        x: jax.Array,
        state: Any,
        lengths: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        """`(y (B, T, D), state)` of x `(B, T, D)`, zero in the padding.

        `state` is what an earlier call returned, or None before the first token; only without it
        may there be `segment_ids`, and then the state returned means nothing.
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
