"""Comparison of encoder-decoders that differ only in the mechanism of one side.

`python -m experiments.seq2seq` compares three encoders in minutes on two cores; `--help` lists the
options.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

if not __package__:  # run as `python experiments/seq2seq.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness import checks, command
from experiments.harness.options import Mechanisms, Options
from experiments.tasks import pairs

COMPARED = ("softmax", "sliding_window", "linear")


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Trains a small encoder-decoder for each mechanism on pairs of texts and compares them.

    Tokens are bytes. A stopped run resumes when the same command is given again. A finished run
    prints its table.
    """

    preset: Literal["small", "published"] = "small"  # defaults of the other options
    task: str = "reverse"  # sort, reverse, dates, or a file of lines SOURCE, tab, TARGET
    mechanisms: Mechanisms = COMPARED
    side: Literal["encoder", "decoder", "cross_attention"] = "encoder"  # its mechanism is compared
    encoder: str = "softmax"  # mechanism of the encoder, if it is not the compared side
    decoder: str = "softmax"  # mechanism of the decoder, if it is not the compared side
    cross_attention: str = "softmax"  # mechanism from decoder to encoder, if not compared
    batch: int = 64  # pairs per step
    steps: int = 600  # training steps
    optimiser: Literal["muon", "adamw"] = "adamw"  # muon is for kernels, with Adam for others
    seeds: tuple[int, ...] = (0,)  # seeds of parameters and order of the pairs
    examples: int = 20000  # pairs to generate, or to read from a file at most
    # Held-out pairs; from a file, at most the distinct pairs of every tenth source. All pairs of a
    # source are either trained on or held out. A repeated held-out pair is measured once.
    held_out: int = 256

    @property
    def label(self) -> str:
        return f"{self.preset}-{Path(self.task).stem}"

    @property
    def is_causal(self) -> bool:
        return self.side == "decoder"

    def fits(self, capabilities: frozenset[str]) -> bool:
        if self.side == "cross_attention":
            return "cross" in capabilities and bool({"offset", "state"} & capabilities)
        return super().fits(capabilities) and "lengths" in capabilities

    def sides(self) -> dict[str, str]:
        """Returns the mechanism of each side by name; that of `side` is not used."""
        names = ("encoder", "decoder", "cross_attention")
        return {name: getattr(self, name) for name in names}

    def fixed_mechanisms(self) -> dict[str, str]:
        others = {name: text for name, text in self.sides().items() if name != self.side}
        return super().fixed_mechanisms() | others

    def check(self) -> None:
        super().check()
        checks.check_counts(self, "examples", "held_out")
        need = f"must be left out with --side {self.side}: --mechanisms names those of that side"
        checks.require(getattr(self, self.side) == "softmax", self, self.side, need)

    @functools.cached_property
    def _pairs(self) -> pairs.Pairs:
        return pairs.load(self.task, self.examples, self.held_out)

    def prepare(self) -> dict[str, Any]:
        return {"pairs_sha256": self._pairs.sha256}

    def make_task(self, folder: Path) -> pairs.Translation:
        return pairs.Translation(pairs=self._pairs)


PRESETS = {
    "small": Config(),
    # Sizes, steps and rates of the base model of Vaswani et al. 2017. Differs: norms before each
    # sublayer, no dropout and no smoothing of labels; a batch of 256 pairs, of about as many bytes
    # as there tokens; the schedule of these experiments.
    "published": Config(
        preset="published",
        layers=6,
        width=512,
        heads=8,
        positions="sinusoidal",
        norm="layer",
        feed_forward="relu",
        batch=256,
        steps=100_000,
        warmup=0.04,
        learning_rate=7e-4,
        examples=10_000_000,
        held_out=2048,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = command.parse("seq2seq", PRESETS, argv)
    return command.run("seq2seq", config, PRESETS[config.preset])


if __name__ == "__main__":
    sys.exit(main())
