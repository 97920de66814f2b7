"""Base class of causal mixers whose decode state is a cache with features of every token."""

from typing import Any

import jax
import jax.numpy as jnp

from effattn.arrays.segments import positions_from
from effattn.decode.state import new_lengths
from effattn.decode.tokens import TokenState, append
from effattn.nn.mixer import CausalMixer


class CachedMixer(CausalMixer):
    """Base class of mixers that cache features of each token and mix the cached features.

    A subclass implements the features of a token (`_prepare`), mixing in whole sequences
    (`_mix_all`), and mixing at some positions over cached features (`_mix_at`).
    """

    def _prepare(self, x: jax.Array, positions: jax.Array) -> tuple[Any, Any]:
        """Features of the tokens x `(B, T, D)`.

        Args:
          x: `(B, T, D)`.
          positions: `(B, T)` int, counted from the document's start.

        Returns:
          Two pytrees of `(B, T, ...)`: the cached features, which later tokens read, and the
          features that only the token's output depends on.
        """
        raise NotImplementedError

    def _mix_at(self, tokens: Any, own: Any, positions: jax.Array) -> jax.Array:
        """Outputs `(B, T, D)` at `positions (B, T)`, from cached features `tokens (B, S, ...)`.

        Cache slots at or after the row's length hold zeros and must not affect the outputs.
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

    def _extend(self, x, state, lengths):
        batch, time = x.shape[:2]
        positions = positions_from(state.length, time)
        tokens, own = self._prepare(x, positions)
        new = append(state, tokens, new_lengths(lengths, batch, time))
        cached = jax.tree.map(lambda kept, x: kept.astype(x.dtype), new.tokens, tokens)
        return self._mix_at(cached, own, positions), new
