"""Decoding of Based: the recurrent state and, with a window, a KV cache of the window."""

import dataclasses

from effattn.arrays import checks
from effattn.decode.decoder import Sizes
from effattn.decode.recurrent import RecurrentDecoder
from effattn.decode.state import bounded, check_bound
from effattn.functional.based import BasedState


@dataclasses.dataclass(frozen=True)
class BasedDecoder(RecurrentDecoder):
    """Decodes `effattn.based_attention`.

    With a window, the state also holds the last tokens: the window or `max_length`, if fewer.
    """

    def _empty(self, sizes: Sizes, **per_token):
        window = self._window
        slots, bound = (None, None) if window is None else bounded(window, sizes.max_length)
        state = self._of_window(slots)._empty(sizes, **per_token)
        return dataclasses.replace(state, max_length=bound)

    def _extend(self, heads, state, lengths, **per_token):
        slots = self._window
        if slots is not None and isinstance(state.state, BasedState):
            kept = state.state.key.shape[1]
            check_bound(state, lengths, kept, slots)
            slots = kept
        return self._of_window(slots)._extend(heads, state, lengths, **per_token)

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
