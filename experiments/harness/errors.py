"""Errors for the user of a command, who sees only their message."""


class UserError(Exception):
    """Error in the input or on the machine; the message is one sentence that says what to do."""


class Stopped(Exception):
    """Signal that a run ended because another run failed or the user stopped all runs."""


class Diverged(UserError):
    """Error of a run whose loss is not finite; `advice` says what is kept and what to try."""

    def __init__(self, run: str, step: int, advice: str):
        super().__init__(f"the loss of {run} became NaN or infinite at step {step}; {advice}")
