"""Comparison of masked language models that differ only in their bidirectional mechanism.

`python -m experiments.mlm` compares four mechanisms in minutes on two cores; `--help` lists the
options. Training masks tokens as BERT does. Validation measures the loss of each token once, with
the same masks for all models (`experiments.common.objectives.MaskedTokens`).
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
    """Trains a small masked language model for each mechanism and compares their perplexities.

    Training masks 15 % of the tokens, as BERT does. The perplexity is that of masked tokens, given
    the tokens that are not masked. A stopped run resumes when the same command is given again. A
    finished run prints its table.
    """

    mechanisms: tuple[str, ...] = COMPARED  # NAME; NAME,OPTION=8; A/B by layer; A+B by head
    seeds: tuple[int, ...] = (0, 1)  # seeds of parameters, order of the data and masks
    learning_rate: float | None = None  # peak learning rate; default 0.01 for muon, 0.003 for adamw
    evaluate_every: int = 250  # steps between evaluations; each writes a checkpoint
    eval_windows: int = 128  # held-out windows; each is evaluated under 7 disjoint masks

    default_rates: ClassVar[Mapping[str, float]] = {"muon": 0.01, "adamw": 0.003}


PRESETS = command.presets(Config)


def parse(argv: Sequence[str] | None) -> Config:
    """Returns the configuration of a command line: the preset, changed by the other options."""
    return command.parse("mlm", PRESETS, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    return command.run("mlm", parse(argv), MaskedTokens)


if __name__ == "__main__":
    sys.exit(main())
