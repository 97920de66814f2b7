"""What causal mixers share whose state is one cache of what every token left."""

from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays.segments import positions_from
from effattn.decode.state import new_lengths
from effattn.decode.tokens import TokenState, append
from effattn.nn.mixer import CausalMixer


class CachedMixer(CausalMixer):
    """A mixer that makes some features of each token, and mixes those of all tokens up to it.

    A subclass says what a token leaves (`_prepare`), and how whole sequences (`_mix_all`) and the
    tokens at some positions (`_mix_at`) mix it.
    """

    _state = TokenState

    def _prepare(self, x: jax.Array, positions: jax.Array) -> tuple[Any, Any]:
        """Of x `(B, T, D)`, what later tokens see of each, and what it keeps for its own output.

        Both are pytrees of `(B, T, ...)`. Positions `(B, T)` count from a document's start.
        """
        raise NotImplementedError

    def _mix_at(self, tokens: Any, own: Any, positions: jax.Array) -> jax.Array:
        """`(B, T, D)`, the outputs at `positions (B, T)` of the cached tokens `(B, S, ...)`.

        What a slot at or after the row's length holds may not bear on it; there are zeros.
        """
        raise NotImplementedError

    def _empty(self, batch, max_length, dtype):
        token = jax.ShapeDtypeStruct((batch, 1, self.in_features), dtype)
        place = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
        tokens, _ = jax.eval_shape(self._prepare, token, place)

        def empty(x):
            kept = x.dtype if jnp.issubdtype(x.dtype, jnp.integer) else dtype
            return jnp.zeros((batch, max_length, *x.shape[2:]), kept)

        return TokenState(tokens=jax.tree.map(empty, tokens), length=jnp.zeros((batch,), jnp.int32))

    def _capacity(self, state):
        return jax.tree.leaves(state.tokens)[0].shape[1]

    def _extend(self, x, state, lengths):
        batch, time = x.shape[:2]
        positions = positions_from(state.length, time)
        tokens, own = self._prepare(x, positions)
        new = append(state, tokens, new_lengths(lengths, batch, time))
        cached = jax.tree.map(lambda kept, x: kept.astype(x.dtype), new.tokens, tokens)
        return self._mix_at(cached, own, positions), new
