"""Compression of a trained language model: fewer bits a weight, and fewer heads.

`python -m experiments.compress` trains a model and compares compressed forms of it; `--help` lists
the options. It needs the package qwix.
"""

import dataclasses
import importlib.util
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as `python experiments/compress.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.compression.forms import ORIGINAL, forms_of, label
from experiments.harness import checks, command, folders, machine, report
from experiments.harness.errors import UserError
from experiments.harness.report import markdown_table
from experiments.harness.text_options import TextOptions, presets

PRUNABLE = "softmax", "sliding_window"

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config(TextOptions):
    """Trains a language model, compresses it, and measures what each form costs.

    Weights get fewer bits by qwix: directly after training, and with further training
    (quantisation-aware: rounded weights forward, straight-through gradients). Heads are removed by
    `effattn.nn.prune_heads`: in each layer those without which the loss on training text rises
    least.

    A stopped run resumes when the same command is given again. A finished run prints its table.
    """

    mechanisms: tuple[str, ...] = ("softmax",)  # mechanism of the model; one
    bits: tuple[int, ...] = (8, 4)  # bits of a weight: 8, 4
    fewer_heads: tuple[int, ...] = (1, 2)  # heads to remove from each layer
    seeds: tuple[int, ...] = (0,)  # seeds of parameters and order of the data
    recovery_steps: int | None = None  # training steps of each form; default --steps / 2
    recovery_rate: float | None = (
        None  # peak learning rate of these steps; default that of training
    )

    def check(self) -> None:
        super().check()
        checks.check_mesh_of_recovery(self)
        good = len(self.mechanisms) == 1 and self.mechanisms != ("all",)
        checks.require(good, self, "mechanisms", "must be one mechanism")
        checks.require(not self.sweep, self, "sweep", "must be left out")
        good = {*self.bits} <= {4, 8} and len({*self.bits}) == len(self.bits)
        checks.require(good, self, "bits", "must be 8, 4 or both, each once")
        heads = self.key_heads or self.heads
        good = all(0 < n < heads for n in self.fewer_heads)
        need = f"must be numbers from 1 to below the {heads} key heads"
        checks.require(good, self, "fewer_heads", need)
        unique = len({*self.fewer_heads}) == len(self.fewer_heads)
        checks.require(unique, self, "fewer_heads", "must not repeat a number")
        name = self.mechanisms[0].partition(",")[0]
        good = not self.fewer_heads or name in PRUNABLE
        need = f"must be empty, as heads are removed from {' and '.join(PRUNABLE)} alone"
        checks.require(good, self, "fewer_heads", need)
        good = not self.fewer_heads or (not self.first_layer and self.positions != "alibi")
        need = "must be empty with --first-layer or --positions alibi"
        checks.require(good, self, "fewer_heads", need)
        need = "must not be empty together with --fewer-heads"
        checks.require(bool(self.bits or self.fewer_heads), self, "bits", need)
        if self.recovery_steps is not None:
            checks.check_counts(self, "recovery_steps")
        if self.recovery_rate is not None:
            checks.check_positive(self, "recovery_rate")
        if self.bits and importlib.util.find_spec("qwix") is None:
            raise UserError(
                "--bits needs the package qwix: pip install qwix; or write --bits without numbers"
            )

    @property
    def original_rate(self) -> float:
        """Peak learning rate of the original."""
        return self.rates[0]

    @property
    def steps_of_recovery(self) -> int:
        return self.recovery_steps or max(1, self.steps // 2)

    def of_folder(self) -> dict[str, Any]:
        """Returns the options that are the same for all runs of a folder: those of the original."""
        own = {"learning_rate": self.original_rate, "recovery_steps": self.steps_of_recovery}
        given = {**super().of_folder(), **own, "evaluate_every": self.evaluate_every}
        return {k: v for k, v in given.items() if k not in ("bits", "fewer_heads", "recovery_rate")}

    def of_runs(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("bits", "fewer_heads", "recovery_rate")}
        return {**super().of_runs(), **own, "learning_rate": self.original_rate}


PRESETS = presets(Config)


def table(summary: Mapping[str, Any]) -> str:
    """Returns the table of the forms."""
    from experiments.harness.statistics import mean

    headline = summary["headline"]
    by_form: dict[str, list[Record]] = {}
    for run in summary["runs"]:
        by_form.setdefault(run["way"], []).append(run)
    rows = []
    for form, runs in by_form.items():
        before = [run["curve"][0][headline] for run in runs]
        after = str(mean([run[headline] for run in runs]))
        first = [after, "-"] if form == ORIGINAL else [str(mean(before)), after]
        size = summary["bytes"][form]
        times = summary["bytes"][ORIGINAL] / size
        rows.append([label(form), *first, f"{size / 1e3:,.0f} kB", f"{times:.2f}"])
    return markdown_table(["form", "as it is", "trained on", "parameters", "times smaller"], rows)


def markdown(summary: Mapping[str, Any]) -> str:
    """Returns the Markdown report."""
    from experiments.harness.statistics import mean

    heading = summary["heading"]
    original, *_ = (run for run in summary["runs"] if run["way"] == ORIGINAL)
    steps = f"{original['tokens']:,} tokens"
    more = f"{max(run['tokens'] for run in summary['runs'] if run['way'] != ORIGINAL):,} tokens"
    parts = [
        f"# Compression of a model with {summary['config']['mechanisms'][0]} attention",
        table(summary),
        f"Validation {heading}. The original was trained on {steps}. Each form starts from it, and "
        f"is then trained on {more}; so is the original itself, for comparison. Forms with fewer "
        "bits round the kernels of projections in each training step too (quantisation-aware "
        "training, with a scale for each output feature); embeddings and norms keep 32 bits.",
    ]
    if summary["heads"]:
        costs = [
            [f"layer {layer}", *(str(mean(of)) for of in zip(*each, strict=True))]
            for layer, each in enumerate(zip(*summary["heads"], strict=True))
        ]
        names = ["", *(f"head {head}" for head in range(len(costs[0]) - 1))]
        parts += [
            "## Heads",
            f"Increase of validation {heading} when one head alone is removed.",
            markdown_table(names, costs),
        ]
    return "\n\n".join([*parts, *report.configuration(summary)])


def check_forms(config: Config, task: Any) -> dict[str, int]:
    """Returns the bytes of the parameters of each form; `UserError` if one is impossible."""
    # Imported late: --help and bad input need not wait for JAX.
    from experiments.compression.training import sizes

    checks.check_mechanisms(config, task)
    return sizes(config, task, forms_of(config.bits, config.fewer_heads))


def train(
    config: Config,
    folder: Path,
    task: Any,
    settings: dict[str, Any],
    made_by: str,
    sizes: Mapping[str, int],
    optional: Collection[str],
) -> None:
    """Trains what is missing, and writes the report; see `experiments.harness.command.run`."""
    from experiments.compression.training import Compression

    trainer = Compression(config, task, folder, folders.fingerprint(settings))
    summary = {
        "command": made_by,
        "config": {**settings, **config.of_runs()},
        "environment": machine.environment(),
        "headline": task.headline,
        "heading": task.heading,
        "bytes": sizes,
        "runs": trainer.train_all(),
        "heads": trainer.costs_of_heads(),
    }
    report.write(folder, summary, markdown(summary))


def read(folder: Path) -> str:
    """Returns the text to print for a finished run."""
    return report.read_markdown(folder, "a folder for each model")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = command.parse("compress", PRESETS, argv)
    return command.run("compress", config, PRESETS[config.preset], check_forms, train, read)


if __name__ == "__main__":
    sys.exit(main())
