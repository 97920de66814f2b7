"""Trains one small masked language model a mechanism on the same text, and compares them.

The sibling of `experiments.lm` for mechanisms that look both ways. `python -m experiments.mlm`
compares four in minutes on two cores; `--help` has the rest. Masks are BERT's in training; each
token's loss is measured once, under masks that are the same for all
(`experiments.common.objectives.MaskedTokens`).
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

if not __package__:  # run as `python experiments/mlm.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.common import command
from experiments.common.objectives import MaskedTokens

COMPARED = ("softmax", "sliding_window", "linformer,num_projected=16", "nystrom,num_landmarks=16")


@dataclasses.dataclass(frozen=True)
class Config(command.Options):
    """Trains one small encoder a mechanism on the same text, and compares their perplexity.

    15 % of the tokens are masked as in BERT. The perplexity is of tokens that are masked, given
    those that are not. Stopped at any moment, the same command goes on where it was. A finished one
    prints its table.
    """

    mechanisms: tuple[str, ...] = COMPARED  # names; NAME,OPTION=8; A/B by layer; A+B by head
    seeds: tuple[int, ...] = (0, 1)  # of the initial parameters, the order of the data, the masks
    learning_rate: float | None = None  # peak; None is 0.01 for muon, 0.003 for adamw
    evaluate_every: int = 250  # steps between evaluations, each followed by a checkpoint
    eval_windows: int = 128  # held-out windows, each seen under 7 disjoint masks, the same for all

    default_rates: ClassVar[Mapping[str, float]] = {"muon": 0.01, "adamw": 0.003}


PRESETS = command.presets(Config)


def parse(argv: Sequence[str] | None) -> Config:
    """The configuration of a command line: the preset's, with what else is given."""
    return command.parse("mlm", PRESETS, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return command.run("mlm", parse(argv), MaskedTokens)


if __name__ == "__main__":
    sys.exit(main())
