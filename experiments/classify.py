"""Comparison of encoders that classify documents and images.

`python -m experiments.classify` compares two Transformers, a recurrent encoder and the
convolutional classifier of Kim 2014 on addresses, in minutes on two cores; `--help` lists the
options.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

if not __package__:  # run as `python experiments/classify.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness import task_options
from experiments.harness.options import Mechanisms
from experiments.tasks import documents, images

COMPARED = ("softmax", "linear", "lstm", "convolutional_classifier")


@dataclasses.dataclass(frozen=True)
class Config(task_options.TaskOptions):
    """Trains a small classifier for each mechanism on documents or images, and compares them.

    A stopped run resumes when the same command is given again. A finished run prints its table.
    """

    mechanisms: Mechanisms = COMPARED

    tasks: ClassVar[task_options.Tasks] = {
        **{
            name: documents.TASKS[name]
            for name in ("addresses", "eras", "reviews", "emails", "files", "imdb")
        },
        **{name: images.TASKS[name] for name in ("digits", "mnist")},
    }


# Film reviews are those of Long-Range Arena, with its budget; other sizes are our own.
BUDGETS = {"imdb": {"steps": 20_000, "learning_rate": 5.6e-4, "weight_decay": 0.1}}
DEFAULTS: task_options.Defaults = {
    task: {
        # Recurrent encoders have more parameters than softmax attention has in all layers.
        "small": {
            "steps": 300,
            "batch": 32,
            "learning_rate": 0.01,
            "seeds": (0,),
            "equal_parameters": False,
        },
        "published": {
            "equal_parameters": False,
            "layers": 4,
            "width": 256,
            "steps": 10_000,
            "batch": 32,
            "optimiser": "adamw",
            "learning_rate": 1e-3,
        }
        | BUDGETS.get(task, {}),
    }
    for task in Config.tasks
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    return task_options.main("classify", Config, DEFAULTS, argv)


if __name__ == "__main__":
    sys.exit(main())
