"""Training schedule, equal for all models of a comparison."""

import dataclasses
import math
from collections.abc import Iterator

# Longer runs log the loss of evenly spaced steps.
MAX_LOGGED_LOSSES = 1000


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Number and size of the training steps.

    Attributes:
      steps: number of training steps.
      batch: windows per step.
      accumulate: number of microbatches per step.
      evaluate_every: steps between evaluations, which also write checkpoints.
    """

    steps: int
    batch: int
    accumulate: int
    evaluate_every: int

    def logs_at(self, step: int) -> bool:
        """Returns whether the loss of this step is recorded."""
        return step % math.ceil(self.steps / MAX_LOGGED_LOSSES) == 0

    def evaluates_at(self, step: int) -> bool:
        """Returns whether this step ends with an evaluation and a checkpoint."""
        return step % self.evaluate_every == 0 or step == self.steps

    def records(self, step: int) -> Iterator[tuple[int, bool]]:
        """Yields the step of each record until `step`, and whether it is that of an evaluation."""
        for at in range(1, step + 1):
            if self.logs_at(at):
                yield at, False
            if self.evaluates_at(at):
                yield at, True
