"""Trains one small language model a mechanism on the same text, and compares their perplexity.

`python -m experiments.lm` compares three mechanisms in minutes on two cores; `--help` has the rest.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as `python experiments/lm.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.common import command
from experiments.common.objectives import NextToken

COMPARED = ("softmax", "sliding_window", "linear")


@dataclasses.dataclass(frozen=True)
class Config(command.Options):
    """Trains one small decoder a mechanism on the same text, and compares their perplexity.

    Stopped at any moment, the same command goes on where it was. A finished one prints its table.
    """

    mechanisms: tuple[str, ...] = COMPARED  # names; NAME,OPTION=8; A/B by layer; A+B by head


PRESETS = command.presets(Config)


def parse(argv: Sequence[str] | None) -> Config:
    """The configuration of a command line: the preset's, with what else is given."""
    return command.parse("lm", PRESETS, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return command.run("lm", parse(argv), NextToken)


if __name__ == "__main__":
    sys.exit(main())
