"""Errors that a user can act on: their text is all that is shown."""


class UserError(Exception):
    """Something in the input or on the machine is wrong; the message is one clear sentence."""


class Stopped(Exception):
    """A run ended because another one beside it failed, or the user stopped them all."""


class Diverged(UserError):
    """The loss of a run is no longer finite."""

    def __init__(self, run: str, step: int, kept: int | None):
        last_good = (
            "no checkpoint had been written yet"
            if kept is None
            else f"the checkpoint of step {kept} is kept"
        )
        super().__init__(
            f"the loss of {run} became NaN or infinite at step {step}; {last_good}; "
            "try a lower --learning-rate, more --warmup or a lower --clip"
        )
        self.step = step
