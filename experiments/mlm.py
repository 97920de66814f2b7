"""Comparison of masked language models that differ only in their bidirectional mechanism.

`python -m experiments.mlm` compares four mechanisms in minutes on two cores; `--help` lists the
options. Training masks tokens as BERT does. Validation measures the loss of each token once, with
the same masks for all models (`experiments.tasks.text.MaskedTokens`).
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

if not __package__:  # run as `python experiments/mlm.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness import command
from experiments.harness.options import Mechanisms
from experiments.harness.text_options import TextOptions, presets

COMPARED = ("softmax", "sliding_window", "linformer", "nystrom")


@dataclasses.dataclass(frozen=True)
class Config(TextOptions):
    """Trains a small masked language model for each mechanism and compares their perplexities.

    Training masks 15 % of the tokens, as BERT does. The perplexity is that of masked tokens, given
    the tokens that are not masked. A stopped run resumes when the same command is given again. A
    finished run prints its table.
    """

    mechanisms: Mechanisms = COMPARED
    seeds: tuple[int, ...] = (0, 1)  # seeds of parameters, order of the data and masks
    learning_rate: float | None = None  # peak learning rate; default 0.01 for muon, 0.003 for adamw
    eval_windows: int = 128  # held-out windows; each is evaluated under 7 disjoint masks

    task: ClassVar[str] = "MaskedTokens"
    default_rates: ClassVar[Mapping[str, float]] = {"muon": 0.01, "adamw": 0.003}


PRESETS = presets(Config)
# The projections of Linformer have more parameters than the whole model at this length.
PRESETS["long"] = dataclasses.replace(
    PRESETS["long"], mechanisms=("softmax", "sliding_window", "long_short", "nystrom")
)


def parse(argv: Sequence[str] | None) -> Config:
    """Returns the configuration of a command line: the preset, changed by the other options."""
    return command.parse("mlm", PRESETS, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = parse(argv)
    return command.run("mlm", config, PRESETS[config.preset])


if __name__ == "__main__":
    sys.exit(main())
