"""Comparison of adaptive mixtures of mechanisms with their mechanisms alone: quality and cost.

`python -m experiments.adaptive` trains mixtures of a short window and exact attention, with several
costs and capacities, on a task in which few tokens need long range; `--help` lists the options.

The costs of a mixture are added to the loss: with `costs=(0,0.01)`, 0.01 for each layer in which a
token uses exact attention, as a mean over the tokens. With `capacity=0.25`, at most a quarter of
the tokens use exact attention, and the others do not pay for it.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

if not __package__:  # run as `python experiments/adaptive.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness import task_options
from experiments.harness.options import Mechanisms
from experiments.tasks import mixed_range

MIXTURE = "mixture_of_mechanisms,gate='top1'"
COMPARED = (
    "sliding_window",
    "softmax",
    *(f"{MIXTURE},costs=(0,{cost})" for cost in (0.0, 0.001)),
    *(f"{MIXTURE},costs=(0,0.001),capacity={share}" for share in (0.125, 0.25, 0.5)),
)


@dataclasses.dataclass(frozen=True)
class Config(task_options.TaskOptions):
    """Trains small causal models in which tokens choose their mechanism, and compares them.

    A stopped run resumes when the same command is given again. A finished run prints its table.
    """

    mechanisms: Mechanisms = COMPARED

    tasks: ClassVar[task_options.Tasks] = mixed_range.TASKS
    with_costs: ClassVar[bool] = True


# The window of a layer is too short for the questions, also through two layers.
DEFAULTS: task_options.Defaults = {
    "mixed-range": {
        "small": {"window": 4, "steps": 600},
        "published": {"window": 32, "layers": 4, "width": 256},
    }
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    return task_options.main("adaptive", Config, DEFAULTS, argv)


if __name__ == "__main__":
    sys.exit(main())
