"""What the layers around a recurrence share: whole sequences and decoding through one function."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from effattn.decode.recurrent import RecurrentState
from effattn.decode.state import check_state, new_lengths
from effattn.nn.attention import check_tokens, padding_of, zero_padding
from effattn.nn.binding import Binding, bind


class RecurrentMixer(nnx.Module):
    """A causal mixer whose state does not grow; a subclass says how it mixes.

    Args:
      in_features: D.
      mechanism: the registered name.
      is_causal: only True.
      dropout_rate: only 0, as there are no attention weights to drop.
      dtype: of the computation; default that of the input and the parameters together.
      param_dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        mechanism: str,
        *,
        is_causal: bool = True,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        _, binding, _ = bind(mechanism, {})
        if not is_causal:
            binding.require("bidirectional", "is_causal=False")
        if dropout_rate:
            binding.require("dropout", f"dropout_rate={dropout_rate}")
        self.in_features = in_features
        self.binding: Binding = binding
        self.is_causal = True
        self.dtype = dtype
        self.param_dtype = param_dtype

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

    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Mixes whole sequences.

        Args:
          x: `(B, T, D)`.
          lengths: `(B,)` int, valid tokens of each right-padded row.
          segment_ids: `(B, T)` int; tokens are mixed within equal ids, 0 is padding.
          rngs: as other mixers take; nothing here is random.

        Returns:
          `(B, T, D)`. Nothing in the padding reaches the other tokens.
        """
        check_tokens("x", x, self.in_features)
        batch, time = x.shape[:2]
        _, valid = padding_of(self.binding, batch, time, lengths, segment_ids)
        return self._mix(zero_padding(x, valid), None, lengths, segment_ids)[0]

    def init_state(self, batch: int, max_length: int, dtype: Any = None) -> RecurrentState:
        """The state of `batch` rows that have seen nothing.

        Args:
          batch: B.
          max_length: has no bearing, as the state does not grow.
          dtype: of what is kept of tokens themselves; default the module's.
        """
        if dtype is None:
            dtype = self.param_dtype if self.dtype is None else self.dtype
        token = jax.ShapeDtypeStruct((batch, 1, self.in_features), dtype)
        _, state = jax.eval_shape(lambda x: self._mix(x, None, None, None), token)
        return RecurrentState(
            state=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def extend(
        self, x: jax.Array, state: RecurrentState, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, RecurrentState]:
        """Mixes T >= 1 more tokens, given all before them.

        Args:
          x: `(B, T, D)`.
          state: from `init_state` or an earlier call.
          lengths: `(B,)` int, how many of the T tokens each row has, right padded; default all.

        Returns:
          `(y (B, T, D), state)`.
        """
        check_tokens("x", x, self.in_features)
        batch, time = x.shape[:2]
        check_state(state, RecurrentState, batch)
        more = new_lengths(lengths, batch, time)
        if lengths is not None:
            x = zero_padding(x, jnp.arange(time) < more[:, None])
        y, carried = self._mix(x, state.state, None if lengths is None else more, None)
        return y, RecurrentState(state=carried, length=state.length + more)

    def step(self, x: jax.Array, state: RecurrentState) -> tuple[jax.Array, RecurrentState]:
        """`extend` by one token, x `(B, 1, D)`."""
        if x.shape[1] != 1:
            raise ValueError(f"step takes one token, x (B, 1, D), got x of shape {x.shape}")
        return self.extend(x, state)
