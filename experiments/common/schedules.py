"""How long and in what portions to train: the same for every model of a comparison."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How long and in what portions to train.

    Attributes:
      steps: updates of the parameters.
      batch: windows a step.
      accumulate: parts that a batch is split into, one after the other.
      evaluate_every: steps from one evaluation and checkpoint to the next.
    """

    steps: int
    batch: int
    accumulate: int
    evaluate_every: int
