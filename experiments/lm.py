"""Comparison of causal language models that differ only in their mechanism.

`python -m experiments.lm` compares three mechanisms in minutes on two cores; `--help` lists the
options.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

if not __package__:  # run as `python experiments/lm.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness import checks, command, folders
from experiments.harness.metrics import read_json, write_atomically
from experiments.harness.options import Mechanisms
from experiments.harness.text_options import TextOptions, presets
from experiments.tasks.task import Task

COMPARED = ("softmax", "sliding_window", "linear")


@dataclasses.dataclass(frozen=True)
class Config(TextOptions):
    """Trains a small causal language model for each mechanism and compares their perplexities.

    `--corpus` also takes digits and mnist:FOLDER (images, in bits per dimension), and dna and
    dna:FASTA_FILE (in bits per base).

    A stopped run resumes when the same command is given again. A finished run prints its table.
    """

    mechanisms: Mechanisms = COMPARED
    # Further held-out sets of needles and phone books, for bytes; see `experiments.tasks.probes`.
    probes: bool = False

    costs: bool = False  # also measure time and memory of layers against length, for a figure

    # Tasks that are no text: each pixel of a digit from those before it, and each base of a genome.
    generated: ClassVar[tuple[str, ...]] = ("digits", "mnist", "dna")

    @property
    def is_generated(self) -> bool:
        """Returns whether the corpus is no text."""
        return self.corpus.partition(":")[0] in self.generated

    def prepare(self) -> dict[str, Any]:
        if not self.is_generated:
            return super().prepare()
        return {"task_sizes": self._generated.settings()}

    def make_task(self, folder: Path) -> Task:
        return self._generated if self.is_generated else super().make_task(folder)

    def save(self, task: Task, folder: Path) -> None:
        if not self.is_generated:
            super().save(task, folder)

    def check_output(self, folder: Path) -> None:
        if not self.is_generated:
            super().check_output(folder)

    def finish(self, folder: Path, settings: dict[str, Any]) -> None:
        """Draws time and memory of the compared mechanisms against length, in `costs.png`.

        Only mechanisms that are given by their name alone are measured. A figure of other
        mechanisms, from an earlier command, is removed.
        """
        path, numbers = folder / "costs.png", folder / "costs.json"
        if not self.costs:
            return
        from effattn import registry
        from experiments.costs import curves

        plain = [name for name in self.mechanisms if name in registry.names()]
        known = None
        if numbers.is_file():
            remedy = f"delete {numbers} to measure again"
            known = read_json(numbers, ("mechanisms",), remedy)["mechanisms"]
        if known == plain or not (known or plain):
            return
        with folders.claimed(folder, settings):
            # An earlier command compared other mechanisms.
            for earlier in (path, numbers):
                earlier.unlink(missing_ok=True)
            if not plain:
                return
            print("Measuring time and memory against length, for 45 seconds at most.", flush=True)
            points = curves.measure_lengths(plain)
            if len({point.length for point in points}) > 1:
                curves.draw(path, points)
            measured = {"mechanisms": plain, "points": [point._asdict() for point in points]}
            write_atomically(numbers, json.dumps(measured, indent=1) + "\n")

    @functools.cached_property
    def _generated(self) -> Task:
        from experiments.tasks import dna, images

        name, _, path = self.corpus.partition(":")
        if name == "dna":
            # At least 2**17 bases are held out, for validation and for the test.
            held = max(dna.NextBase.held, 2**17 // self.context)
            return dna.NextBase(length=self.context, held=held, path=path)
        if name == "mnist":
            return images.MNISTPixels(path=path)
        return images.NextPixel(images=images.Digits())

    def check(self) -> None:
        super().check()
        if self.is_generated:
            kind, _, path = self.corpus.partition(":")
            need = "must be digits, with nothing after it"
            checks.require(kind != "digits" or self.corpus == kind, self, "corpus", need)
            good = kind != "mnist" or bool(path)
            checks.require(good, self, "corpus", "must be mnist:FOLDER, with the released files")
            of_text = ("tokenizer", "vocabulary", "eval_windows", "whole_documents", "probes")
            for name in (*of_text, *(("context",) if kind != "dna" else ())):
                given, usual = getattr(self, name), getattr(PRESETS[self.preset], name)
                need = f"must be left out with --corpus {self.corpus}, which is no text"
                checks.require(given == usual, self, name, need)
        good = not self.probes or self.tokenizer == "bytes"
        checks.require(good, self, "probes", "needs --tokenizer bytes")

    def of_task(self) -> dict[str, Any]:
        return {"probes": self.probes}


PRESETS = presets(Config)
PRESETS["small"] = dataclasses.replace(PRESETS["small"], costs=True)
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
