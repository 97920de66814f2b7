"""Comparison of causal mechanisms in how well they recall what they have read.

`python -m experiments.recall` compares three mechanisms on multi-query associative recall in
minutes on two cores; `--help` lists the options.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

if not __package__:  # run as `python experiments/recall.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness import task_options
from experiments.tasks import copying, mad, recall

COMPARED = ("softmax", "linear", "based")


@dataclasses.dataclass(frozen=True)
class Config(task_options.TaskOptions):
    """Trains a small causal model for each mechanism on a task of recall, and compares them.

    A stopped run resumes when the same command is given again. A finished run prints its table.
    """

    # NAME; NAME,OPTION=8; A/B by layer; A+B by head; all for every mechanism that fits the task.
    mechanisms: tuple[str, ...] = COMPARED

    tasks: ClassVar[task_options.Tasks] = {**recall.TASKS, **copying.TASKS, **mad.TASKS}


# A convolution below the mechanism, as in Arora et al. 2024, shows each token the one before it.
SMALL = {
    "first_layer": "convolution,width=3",
    "steps": 400,
    "batch": 64,
    "sweep": (0.005, 0.02),
    "seeds": (0,),
}
# The rates are the four of Arora et al. 2023.
PUBLISHED = {
    "first_layer": "convolution,width=3",
    "steps": 20_000,
    "batch": 256,
    "optimiser": "adamw",
    "weight_decay": 0.1,
    "sweep": (1e-3, 10**-2.5, 1e-2, 10**-1.5),
}
DEFAULTS: task_options.Defaults = {
    task: {"small": SMALL, "published": PUBLISHED} for task in Config.tasks
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    return task_options.main("recall", Config, DEFAULTS, argv)


if __name__ == "__main__":
    sys.exit(main())
