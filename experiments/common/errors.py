"""Errors that a user can act on: their text is all that is shown."""


class UserError(Exception):
    """Something in the input or on the machine is wrong; the message is one clear sentence."""


class Stopped(Exception):
    """A run ended because another one beside it failed, or the user stopped them all."""


class Diverged(UserError):
    """The loss of a run is no longer finite; `advice` says what is left of it and what to try."""

    def __init__(self, run: str, step: int, advice: str):
        super().__init__(f"the loss of {run} became NaN or infinite at step {step}; {advice}")
