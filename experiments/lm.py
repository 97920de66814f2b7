"""Comparison of causal language models that differ only in their mechanism.

`python -m experiments.lm` compares three mechanisms in minutes on two cores; `--help` lists the
options.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as `python experiments/lm.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness import checks, command
from experiments.harness.text_options import TextOptions, presets

COMPARED = ("softmax", "sliding_window", "linear")


@dataclasses.dataclass(frozen=True)
class Config(TextOptions):
    """Trains a small causal language model for each mechanism and compares their perplexities.

    A stopped run resumes when the same command is given again. A finished run prints its table.
    """

    # NAME; NAME,OPTION=8; A/B by layer; A+B by head; all for every registered mechanism.
    mechanisms: tuple[str, ...] = COMPARED
    # Further held-out sets of needles and phone books, for bytes; see `experiments.tasks.probes`.
    probes: bool = False

    def check(self) -> None:
        super().check()
        good = not self.probes or self.tokenizer == "bytes"
        checks.require(good, self, "probes", "needs --tokenizer bytes")

    def of_task(self) -> dict[str, Any]:
        return {"probes": self.probes}


PRESETS = presets(Config)
PRESETS["long"] = dataclasses.replace(PRESETS["long"], probes=True)


def parse(argv: Sequence[str] | None) -> Config:
    """Returns the configuration of a command line: the preset, changed by the other options."""
    return command.parse("lm", PRESETS, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = parse(argv)
    return command.run("lm", config, PRESETS[config.preset])


if __name__ == "__main__":
    sys.exit(main())
