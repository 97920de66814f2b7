"""Comparison of causal mechanisms in how well they recall what they have read.

`python -m experiments.recall` compares three mechanisms on multi-query associative recall in
minutes on two cores; `--help` lists the options.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

if not __package__:  # run as `python experiments/recall.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness import task_options
from experiments.harness.options import Mechanisms
from experiments.tasks import copying, mad, recall

COMPARED = ("softmax", "linear", "based")


@dataclasses.dataclass(frozen=True)
class Config(task_options.TaskOptions):
    """Trains a small causal model for each mechanism on a task of recall, and compares them.

    A stopped run resumes when the same command is given again. A finished run prints its table.
    """

    mechanisms: Mechanisms = COMPARED

    tasks: ClassVar[task_options.Tasks] = {**recall.TASKS, **copying.TASKS, **mad.TASKS}


# A convolution below the mechanism, as in Arora et al. 2024, shows each token the one before it.
SMALL = {
    "first_layer": "convolution,width=3",
    "steps": 400,
    "batch": 64,
    "sweep": (0.005, 0.02),
    "seeds": (0,),
}

# Sizes, batches, steps and rates of the publications. Differs: the rates of selective copying and
# induction rise and decay, and are constant in the publication.
ADAMW: dict[str, Any] = {"optimiser": "adamw"}
# 32 epochs of 180,000 examples, in models that alternate convolution and mechanism.
MULTI_QUERY = ADAMW | {
    "first_layer": "convolution,width=3",
    "heads": 1,
    "steps": 22_500,
    "batch": 256,
    "weight_decay": 0.1,
    "sweep": (1e-3, 10**-2.5, 1e-2, 10**-1.5),
}
# 16 and 32 epochs of 100,000 examples.
ASSOCIATIVE = ADAMW | {
    "heads": 1,
    "steps": 50_000,
    "batch": 32,
    "sweep": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
}
TREE = ASSOCIATIVE | {"steps": 100_000}
SELECTIVE_COPYING = ADAMW | {"steps": 400_000, "batch": 64, "learning_rate": 1e-4}
INDUCTION = ADAMW | {"steps": 204_800, "batch": 8, "sweep": (2e-4, 1e-3)}
# 200 epochs of 12,800 examples; of 256 for memorisation. The publication also tries weight decay.
MAD = ADAMW | {
    "width": 128,
    "heads": 16,
    "steps": 20_000,
    "batch": 128,
    "sweep": (1e-4, 5e-4, 1e-3),
}
MEMORISATION = MAD | {"steps": 400}
PUBLISHED = {
    "multi-query": MULTI_QUERY,
    "associative": ASSOCIATIVE,
    "tree": TREE,
    "selective-copying": SELECTIVE_COPYING,
    "induction": INDUCTION,
    **dict.fromkeys(mad.TASKS, MAD),
    "mad-memorisation": MEMORISATION,
}
# Every mechanism has learned it by then: the target depends on one token alone.
SMALL_SIZES = {"mad-memorisation": SMALL | {"steps": 100}}
DEFAULTS: task_options.Defaults = {
    task: {"small": SMALL_SIZES.get(task, SMALL), "published": PUBLISHED[task]}
    for task in Config.tasks
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    return task_options.main("recall", Config, DEFAULTS, argv)


if __name__ == "__main__":
    sys.exit(main())
