"""Recovery of language models whose softmax attention is replaced after training.

`python -m experiments.finetune` trains a model with softmax attention, converts it to other
mechanisms by `effattn.nn.convert`, and trains the converted models on; `--help` lists the options.
"""

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

if not __package__:  # run as `python experiments/finetune.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness import checks, command, folders, machine, report
from experiments.harness.naming import REFERENCE
from experiments.harness.report import markdown_table
from experiments.harness.text_options import TextOptions, presets

COMPARED = ("sliding_window", "linear", "hedgehog")

# Least increase of the loss, in bits/byte, for which the table shows the share that was regained.
LEAST_INCREASE = 0.01

# Lines of the figure.
LINES = {"finetune": "-", "distill": "--"}

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config(TextOptions):
    """Trains a softmax language model, converts it to each mechanism, and measures the recovery.

    A converted model recovers by fine-tuning on the language-model loss, as in T2R (Kasai et al.
    2021), or by distillation from the original: first of the output of each mixer (mean squared
    error, mixer parameters only), as in LoLCATs (Zhang et al. 2024), then of the logits
    (Kullback-Leibler divergence, all parameters). The same models are also trained from scratch,
    with as many tokens in total.

    A stopped run resumes when the same command is given again. A finished run prints its table.
    """

    # NAME; NAME,OPTION=8; A/B by layer; A+B by head. softmax is a control: it needs no recovery.
    mechanisms: tuple[str, ...] = COMPARED
    ways: tuple[Literal["finetune", "distill"], ...] = ("finetune", "distill")  # ways to recover
    seeds: tuple[int, ...] = (0,)  # seeds of parameters and order of the data
    recovery_steps: int | None = None  # training steps after the conversion; default --steps / 2
    recovery_rate: float | None = None  # peak learning rate of recovery; default that of training
    # Fraction of the steps of distillation that learn outputs of mixers; the others learn logits.
    transfer: float | None = None  # default 0.5
    # Learning rates to try for recovery and from scratch; the best is used, by mechanism and way.
    sweep: tuple[float, ...] = ()

    def check(self) -> None:
        # The rate is that of the original, and the sweep is for the models after it.
        TextOptions.check(dataclasses.replace(self, learning_rate=None))
        checks.check_mesh_of_recovery(self)
        if self.learning_rate is not None:
            checks.check_positive(self, "learning_rate")
        if self.recovery_steps is not None:
            checks.check_counts(self, "recovery_steps")
        if self.recovery_rate is not None:
            checks.check_positive(self, "recovery_rate")
        both = self.sweep and self.recovery_rate is not None
        checks.require(not both, self, "sweep", "must be left out if --recovery-rate is given")
        good = 0 < len(self.ways) == len(set(self.ways))
        checks.require(good, self, "ways", "must name finetune, distill or both, each once")
        if self.transfer is not None:
            good = 0 <= self.transfer <= 1
            checks.require(good, self, "transfer", "must be a fraction from 0 to 1")
            good = "distill" in self.ways
            checks.require(good, self, "transfer", "must be left out without distill in --ways")
        each = "all" not in self.mechanisms
        need = "must not be all, as models cannot be converted to some mechanisms"
        checks.require(each, self, "mechanisms", need)
        same = "must stay on, as converted models keep the feed-forward layers of the original"
        checks.require(self.equal_parameters, self, "equal_parameters", same)

    @property
    def original_rate(self) -> float:
        """Peak learning rate of the original."""
        return self.learning_rate or self.default_rates[self.optimiser]

    @property
    def steps_of_recovery(self) -> int:
        return self.recovery_steps or max(1, self.steps // 2)

    @property
    def fraction_of_transfer(self) -> float:
        return 0.5 if self.transfer is None else self.transfer

    def of_folder(self) -> dict[str, Any]:
        """Returns the options that are the same for all runs of a folder: those of originals."""
        given = super().of_folder() | {
            "transfer": self.fraction_of_transfer,
            "learning_rate": self.original_rate,
            "recovery_steps": self.steps_of_recovery,
            "evaluate_every": self.evaluate_every,
        }
        return {k: v for k, v in given.items() if k not in ("ways", "recovery_rate")}

    def of_runs(self) -> dict[str, Any]:
        chosen = {"ways": self.ways, "recovery_rate": self.recovery_rate, "sweep": self.sweep}
        return super().of_runs() | chosen | {"learning_rate": self.original_rate}


PRESETS = presets(Config)


def runs_of(summary: Mapping[str, Any], way: str, mechanism: str) -> list[Record]:
    """Returns the results of one kind of model, one per seed."""
    return [r for r in summary["runs"] if (r["way"], r["mechanism"]) == (way, mechanism)]


def budgets_of(curve: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the places in a curve that tables show: budgets that double, and the last one."""
    last = len(curve) - 1
    return [2**n for n in range(last.bit_length()) if 2**n < last] + [last]


def table(summary: Mapping[str, Any]) -> str:
    """Returns the table of losses."""
    from experiments.harness.statistics import mean

    headline, config = summary["headline"], summary["config"]

    def final(way: str, mechanism: str) -> list[float]:
        return [run[headline] for run in runs_of(summary, way, mechanism)]

    curve = runs_of(summary, config["ways"][0], config["mechanisms"][0])[0]["curve"]
    budgets = budgets_of(curve)
    (original, *_) = runs_of(summary, "original", REFERENCE)
    rows = [
        [
            REFERENCE,
            "original",
            str(mean(final("original", REFERENCE))),
            *["-"] * (len(budgets) + 1),
            str(mean(final("scratch", REFERENCE))),
            state_of(original),
            f"{original['learning_rate']:g}",
        ]
    ]
    for mechanism in config["mechanisms"]:
        for way in config["ways"]:
            runs = runs_of(summary, way, mechanism)
            starts = [run["curve"][0][headline] for run in runs]
            start = fmean(starts)
            increase = start - fmean(final("original", REFERENCE))
            regained = start - fmean(final(way, mechanism))
            rows.append(
                [
                    mechanism,
                    way,
                    str(mean(starts)),
                    *(str(mean([run["curve"][at][headline] for run in runs])) for at in budgets),
                    f"{100 * regained / increase:.0f} %" if increase > LEAST_INCREASE else "-",
                    str(mean(final("scratch", mechanism))),
                    state_of(runs[0]),
                    f"{runs[0]['learning_rate']:g}",
                ]
            )
    header = [
        "mechanism",
        "way",
        "before recovery",
        *(f"{curve[at]['tokens']:,} tokens" for at in budgets),
        "regained",
        "from scratch",
        "decode state",
        "learning rate",
    ]
    return markdown_table(header, rows)


def conversions_table(summary: Mapping[str, Any]) -> str:
    """Returns the table of the parameters that conversions keep, add and drop."""

    def count(part: str, values: Mapping[str, int]) -> str:
        names = ", ".join(values) if part != "kept" else ""
        return f"{sum(values.values()):,}" + (f" ({names})" if names else "")

    parts = ("kept", "new", "dropped")
    rows = [
        [mechanism, *(count(part, of[part]) for part in parts)]
        for mechanism, of in summary["conversions"].items()
    ]
    return markdown_table(["mechanism", *parts], rows)


def markdown(summary: Mapping[str, Any]) -> str:
    """Returns the Markdown report."""
    config = summary["config"]
    curve = runs_of(summary, config["ways"][0], config["mechanisms"][0])[0]["curve"]
    (original, *_) = runs_of(summary, "original", REFERENCE)
    count_of_seeds = len(config["seeds"])
    seeds = f"means over {count_of_seeds} seeds ± half of the 95 % interval"
    seeds = seeds if count_of_seeds > 1 else "for one seed"
    total = original["tokens"] + curve[-1]["tokens"]
    return "\n\n".join(
        [
            "# Recovery after softmax attention is replaced",
            "![Loss against training tokens after the replacement](recovery.png)",
            table(summary),
            f"The losses are validation {summary['heading']}, {seeds}. A converted model starts "
            "with the parameters of the original: the model with softmax attention, after "
            f"{original['tokens']:,} training tokens. `finetune` trains it on the loss of the "
            "language model (Kasai et al. 2021, T2R). `distill` trains it for "
            f"{config['transfer']:.0%} of the tokens to give the outputs of the original's mixers "
            "(mean squared error on the original's inputs, mixer parameters only;"
            " Zhang et al. 2024, LoLCATs), and for the other tokens to give the original's "
            "predictions (Kullback-Leibler divergence, all parameters). The learning rate decays "
            "until the last step of recovery, so columns of fewer tokens show losses before the "
            "rate has decayed. Regained: the replacement increases the loss, and this is the share "
            f"of the increase that recovery undid, for increases above {LEAST_INCREASE:g}. From "
            f"scratch: the same model trained on {total:,} tokens, as many as training and "
            "recovery together. The decode state is that of one sequence as long as those of the "
            "validation set.",
            "## Parameters of the conversion",
            conversions_table(summary),
            "The table shows how many numbers each conversion keeps, adds and drops, random "
            "features included, as reported by `effattn.nn.conversion`.",
            *report.configuration(summary),
        ]
    )


def state_of(run: Mapping[str, Any]) -> str:
    """Returns the size of a decode state as text."""
    return "-" if run["state_bytes"] is None else f"{run['state_bytes'] / 1e3:,.1f} kB"


def draw(summary: Mapping[str, Any]) -> Any:
    """Draws the loss against the tokens of recovery, one line per mechanism and way."""
    import numpy as np

    from effattn.analysis.style import line
    from experiments.harness.figure import legend_below, plt

    headline, config = summary["headline"], summary["config"]
    figure, axis = plt.subplots(figsize=(10, 5.5), layout="constrained")
    originals = [run[headline] for run in runs_of(summary, "original", REFERENCE)]
    axis.axhline(np.mean(originals), color="black", linestyle=":", label=f"{REFERENCE}: original")
    for index, mechanism in enumerate(config["mechanisms"]):
        for way in config["ways"]:
            curves = [run["curve"] for run in runs_of(summary, way, mechanism)]
            values = np.array([[record[headline] for record in curve] for curve in curves])
            axis.plot(
                [record["tokens"] / 1e6 for record in curves[0]],
                values.mean(0),
                **line(index) | {"markersize": 4, "linestyle": LINES[way]},
                label=f"{mechanism}: {way}",
            )
    axis.set(xlabel="training tokens after the replacement (millions)")
    axis.set(ylabel=f"validation loss ({summary['heading']})")
    axis.grid(alpha=0.3)
    legend_below(figure, axis.get_lines(), "mechanism: way to recover")
    return figure


def conversions_of(config: Config, task: Any) -> dict[str, Any]:
    """Returns what each conversion keeps, adds and drops; `UserError` if one is impossible."""
    # Imported late: --help and bad input need not wait for JAX.
    from experiments.harness import meshes, models
    from experiments.recovery.training import conversion

    if config.mesh:
        meshes.check(config, task)
        meshes.check_model(config, models.builder(REFERENCE, config, task), task)
    return {mechanism: conversion(config, task, mechanism) for mechanism in config.mechanisms}


def train(
    config: Config,
    folder: Path,
    task: Any,
    settings: dict[str, Any],
    made_by: str,
    conversions: Mapping[str, Any],
    optional: Collection[str],
) -> None:
    """Trains what is missing, and writes the report; see `experiments.harness.command.run`."""
    from experiments.harness import figure
    from experiments.recovery.training import Trainer

    summary = {
        "command": made_by,
        "config": {**settings, **config.of_runs()},
        "environment": machine.environment(),
        "headline": task.headline,
        "heading": task.heading,
        "conversions": conversions,
        "runs": Trainer(config, task, folder, folders.fingerprint(settings)).train_all(),
    }
    figure.save(draw(summary), folder / "recovery.png")
    report.write(folder, summary, markdown(summary))


def read(folder: Path) -> str:
    """Returns the text to print for a finished run."""
    return report.read_markdown(folder, "recovery.png and a folder for each model")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = command.parse("finetune", PRESETS, argv)
    return command.run("finetune", config, PRESETS[config.preset], conversions_of, train, read)


if __name__ == "__main__":
    sys.exit(main())
