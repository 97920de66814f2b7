"""Training schedule, equal for all models of a comparison."""

import dataclasses


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
