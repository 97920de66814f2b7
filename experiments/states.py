"""Comparison of causal mechanisms in how well they track a state.

`python -m experiments.states` compares four mechanisms on parity, trained on short sequences and
tested on long ones, in minutes on two cores; `--help` lists the options.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

if not __package__:  # run as `python experiments/states.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness import task_options
from experiments.harness.options import Mechanisms
from experiments.tasks import arithmetic, chess_games, parity, permutations

COMPARED = ("softmax", "lstm", "gated_delta_net", "gated_delta_net,allow_negative_eigenvalues=True")


@dataclasses.dataclass(frozen=True)
class Config(task_options.TaskOptions):
    """Trains a small causal model for each mechanism to track a state, and compares them.

    A stopped run resumes when the same command is given again. A finished run prints its table.
    """

    mechanisms: Mechanisms = COMPARED

    tasks: ClassVar[task_options.Tasks] = {
        **parity.TASKS,
        **arithmetic.TASKS,
        **permutations.TASKS,
        **chess_games.TASKS,
    }


SMALL = {"optimiser": "adamw", "steps": 600, "batch": 64, "sweep": (0.003, 0.01), "seeds": (0,)}
# These tasks have more states, and take more examples to learn.
LARGER = SMALL | {"steps": 800, "batch": 256}
# Sizes, batches, steps and rates of the publications: of Grazzi et al. 2025 for parity and
# arithmetic, and of Siems et al. 2025 for the word problems (100 epochs of 99,000 words).
PARITY = {
    "optimiser": "adamw",
    "width": 128,
    "steps": 20_000,
    "batch": 256,
    "learning_rate": 1e-3,
}
ARITHMETIC = PARITY | {"steps": 100_000, "weight_decay": 0.1}
WORDS = PARITY | {"layers": 1, "heads": 8, "steps": 4900, "batch": 2048}
# The question about chess games is our own.
CHESS = {
    "optimiser": "adamw",
    "width": 256,
    "steps": 50_000,
    "batch": 512,
    "weight_decay": 0.01,
    "sweep": (1e-4, 5e-4, 1e-3),
}
PUBLISHED = {
    "parity": PARITY,
    **dict.fromkeys(arithmetic.TASKS, ARITHMETIC),
    **dict.fromkeys(permutations.TASKS, WORDS),
    "chess": CHESS,
}
DEFAULTS: task_options.Defaults = {
    task: {
        "small": SMALL if task in ("parity", "chess") else LARGER,
        "published": PUBLISHED[task],
    }
    for task in Config.tasks
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    return task_options.main("states", Config, DEFAULTS, argv)


if __name__ == "__main__":
    sys.exit(main())
