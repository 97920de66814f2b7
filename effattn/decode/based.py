"""Decoding of Based: the recurrent state and, with a window, a KV cache of the window."""

import dataclasses
from typing import Any

import jax

from effattn.arrays import checks
from effattn.decode.recurrent import RecurrentDecoder, RecurrentState
from effattn.decode.state import bounded, check_bound, check_init, check_state, new_lengths
from effattn.functional.based import BasedState


@dataclasses.dataclass(frozen=True)
class BasedDecoder(RecurrentDecoder):
    """Decodes `effattn.based_attention`.

    With a window, the state also holds the last tokens: the window or `max_length`, if fewer.
    """

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
        """Returns the zero state. `max_length` matters only for a window of more tokens."""
        dtype = check_init(batch, max_length, dtype)
        slots, bound = (None, None) if self._window is None else bounded(self._window, max_length)
        sizes = num_kv_heads, head_dim, value_dim, dtype
        state = self._of_window(slots).init(batch, max_length, *sizes, **per_token)
        return dataclasses.replace(state, max_length=bound)

    def extend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        state: RecurrentState,
        lengths: jax.Array | None = None,
        **per_token: jax.Array,
    ) -> tuple[jax.Array, RecurrentState]:
        """Extends the state by T tokens: see `RecurrentDecoder.extend`.

        Raises `ValueError` if the window is longer than `max_length`, a row outgrows `max_length`,
        and the lengths are concrete. With traced lengths, the window is then the last `max_length`
        tokens.
        """
        batch, time = query.shape[:2]
        check_state(state, RecurrentState, batch)
        slots = self._window
        if slots is not None and isinstance(state.state, BasedState):
            lengths = new_lengths(lengths, batch, time)
            kept = state.state.key.shape[1]
            check_bound(state, lengths, kept, slots)
            slots = kept
        inside = self._of_window(slots)
        return RecurrentDecoder.extend(inside, query, key, value, state, lengths, **per_token)

    @property
    def _window(self) -> int | None:
        window = self.options.get("local_window_size")
        return None if window is None else checks.window(window)[0]

    def _of_window(self, slots: int | None) -> RecurrentDecoder:
        """Returns the decoder with a window of `slots` past tokens."""
        options = dict(self.options)
        if slots != self._window:
            given = options["local_window_size"]
            options["local_window_size"] = slots if checks.is_integer(given) else (slots, given[1])
        return RecurrentDecoder(self.function, options)
