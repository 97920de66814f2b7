"""Loss against parameters, training tokens and compute, for any set of mechanisms.

`python -m experiments.scaling` trains a grid of small language models and fits power laws; `--help`
lists the options.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as `python experiments/scaling.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.harness import checks, command, folders, machine, report, statistics
from experiments.harness.errors import UserError
from experiments.harness.metrics import read_json
from experiments.harness.options import Mechanisms
from experiments.harness.report import markdown_table
from experiments.harness.text_options import TextOptions, presets

COMPARED = ("softmax", "sliding_window", "linear")

# Options of one model, which the grid replaces, and what replaces them.
OF_ONE = {
    "width": "--widths gives the sizes of the models",
    "steps": "--all-steps gives the training steps of the models",
    "evaluate_every": "every model is evaluated after its last step",
}

AT_BOUND = "at its bound"
ON_BOUNDS = (
    f'"{AT_BOUND.capitalize()}" marks a value at an end of the range that the fit allows: the '
    "losses do not determine it, and the other values of that fit depend on the bound."
)

Point = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config(TextOptions):
    """Trains language models of several widths for several numbers of steps, and fits power laws.

    Every model of the grid is trained on its own, with a learning rate that decays to 0 at its last
    step. A stopped run resumes when the same command is given again. A finished run prints its
    table, and the folder may get a larger grid.
    """

    mechanisms: Mechanisms = COMPARED
    widths: tuple[int, ...] = (32, 48, 64, 96)  # features per token, one model each
    all_steps: tuple[int, ...] = (125, 250, 500, 1000)  # training steps, one model each
    seeds: tuple[int, ...] = (0,)  # seeds of parameters and order of the data
    width: int = 0  # must be left out: see --widths
    steps: int = 0  # must be left out: see --all-steps
    evaluate_every: int | None = 0  # must be left out: only the last step is evaluated

    def check(self) -> None:
        for name, need in OF_ONE.items():
            checks.require(not getattr(self, name), self, name, f"must be left out: {need}")
        for name in ("widths", "all_steps"):
            values = getattr(self, name)
            checks.require(len(values) > 0, self, name, "needs at least one value")
            checks.require(len(set(values)) == len(values), self, name, "must not repeat a value")
        enough = len(self.widths) * len(self.all_steps) > 5
        checks.require(enough, self, "widths", "and --all-steps must give more than 5 models")
        for cell in self.cells().values():
            try:
                cell.check()
            except UserError as error:
                named = str(error).replace("--width ", "--widths ")
                raise UserError(named.replace("--steps ", "--all-steps ")) from None

    def cells(self) -> dict[str, TextOptions]:
        """Returns the options of each width and number of steps, by the name of the folder."""
        shared = {each.name: getattr(self, each.name) for each in dataclasses.fields(TextOptions)}
        return {
            f"width{width}-steps{steps}": TextOptions(
                **{**shared, "width": width, "steps": steps, "evaluate_every": steps}
            )
            for width in self.widths
            for steps in self.all_steps
        }

    def of_folder(self) -> dict[str, Any]:
        """Returns the options of all models; the folder of a grid may get a larger grid."""
        varied = {"widths", "all_steps", *OF_ONE}
        return {k: v for k, v in super().of_folder().items() if k not in varied}

    def of_runs(self) -> dict[str, Any]:
        return super().of_runs() | {"widths": self.widths, "all_steps": self.all_steps}


# Sizes of models by preset; the other options are those of `experiments.lm`.
GRIDS: Mapping[str, Mapping[str, Any]] = {
    "small": {},
    "medium": {"widths": (64, 96, 128, 192), "all_steps": (250, 500, 1000, 2000)},
    "long": {"all_steps": (60, 125, 250, 500)},
    "gpu": {"widths": (128, 256, 384, 512), "all_steps": (60, 125, 250, 500)},
}
ABSENT: Mapping[str, Any] = dict.fromkeys(OF_ONE, 0)
PRESETS = {
    name: dataclasses.replace(preset, **ABSENT, **GRIDS[name])
    for name, preset in presets(Config).items()
}


def points_of(folder: Path, mechanisms: Sequence[str]) -> tuple[list[Point], dict[str, str]]:
    """Returns a point for each mechanism and seed of a folder, and the mechanisms left out."""
    path = folder / "summary.json"
    keys = ("mechanism", "seed", "parameters", "tokens", "loss", "bits_per_byte", "learning_rate")
    found = read_json(path, ("left_out",), f"delete {folder} to train it again", {"runs": keys})
    runs = [run for run in found["runs"] if run["mechanism"] in mechanisms]
    return [{key: run[key] for key in keys} for run in runs], found["left_out"]


def compute(config: TextOptions, task: Any, mechanism: str) -> int:
    """Returns the operations of a training step, from its jaxpr."""
    import jax
    import numpy as np

    from effattn.analysis import cost
    from experiments.harness import models, programs
    from experiments.harness.schedules import Schedule

    schedule = Schedule(config.steps, config.batch, 1, config.steps)
    build = models.builder(mechanism, config, task)
    of = programs.Programs(build, *programs.arguments_of(config, schedule, task))
    params, state = jax.eval_shape(of.init, 0)
    batch = programs.in_parts(task.training(config.batch, 0, 0), config.batch)
    return cost.operations(jax.make_jaxpr(of.one_step)(params, state, np.float32(1), batch))


def fits_of(points: Sequence[Point]) -> dict[str, Any]:
    """Returns both laws and the compute-optimal frontier of one mechanism's points."""
    from experiments.harness import fits

    columns = {key: [p[key] for p in points] for key in ("parameters", "tokens", "loss", "compute")}
    found: dict[str, Any] = {}
    for name, law in fits.LAWS.items():
        fit = fits.fit(law, columns["parameters"], columns["tokens"], columns["loss"])
        found[name] = {
            "values": fit.values,
            "intervals": fit.intervals,
            "residual": fit.residual,
            "at_bound": fit.at_bound,
        }
        if name == "chinchilla":
            # Parameters for the least loss grow as compute to this power.
            alpha, beta = fit.resampled["alpha"], fit.resampled["beta"]
            share = beta / (alpha + beta)
            values = fit.values
            found["optimal_parameters"] = {
                "value": values["beta"] / (values["alpha"] + values["beta"]),
                "interval": interval(share),
            }
    models = by_model(points, "loss")
    compute = [model[-1] for model in models]
    loss = [statistics.mean(losses).value for losses in models.values()]
    kept = fits.frontier(compute, loss)
    front = {"compute": [compute[i] for i in kept], "loss": [loss[i] for i in kept]}
    exponent = fits.power(front["compute"], front["loss"]) if len(kept) > 1 else None
    found["frontier"] = {**front, "exponent": exponent}
    return found


def by_model(points: Sequence[Point], key: str) -> dict[tuple[Any, ...], list[float]]:
    """Returns a quantity of all seeds by mechanism, width, parameters, tokens and compute."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for p in points:
        model = tuple(p[n] for n in ("mechanism", "width", "parameters", "tokens", "compute"))
        found.setdefault(model, []).append(p[key])
    return found


def interval(values: Any) -> tuple[float, float]:
    """Returns the 95 % interval of resampled values."""
    import numpy as np

    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def with_interval(value: float, interval: Sequence[float]) -> str:
    """Returns the text of a value with its interval."""
    return f"{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"


def text_of(law: Mapping[str, Any], name: str) -> str:
    """Returns the text of a fitted value, E for "log E"; a value at its bound is marked."""
    value = law["values"][name]
    text = (
        f"{math.exp(value):.3f}"
        if name == "log E"
        else with_interval(value, law["intervals"][name])
    )
    return text + (f", {AT_BOUND}" if name in law["at_bound"] else "")


def markdown(summary: Mapping[str, Any]) -> str:
    """Returns the Markdown report."""
    rows, kaplan = [], []
    for mechanism, fit in summary["fits"].items():
        law, share, front = fit["chinchilla"], fit["optimal_parameters"], fit["frontier"]
        rows.append(
            [
                mechanism,
                *(text_of(law, n) for n in ("alpha", "beta", "log E")),
                with_interval(share["value"], share["interval"]),
                "-" if front["exponent"] is None else f"{front['exponent']:.3f}",
                f"{law['residual']:.4f}",
            ]
        )
        law = fit["kaplan"]
        values = (text_of(law, n) for n in ("alpha", "beta"))
        kaplan.append([mechanism, *values, f"{law['residual']:.4f}"])
    of_models = by_model(summary["points"], "bits_per_byte")
    points = [
        [
            mechanism,
            f"{width}",
            f"{parameters:,}",
            f"{tokens:,}",
            f"{compute:.2e}",
            str(statistics.mean(losses)),
        ]
        for (mechanism, width, parameters, tokens, compute), losses in of_models.items()
    ]
    header = ["mechanism", "alpha", "beta", "E (nats)", "parameters ~ compute^", "frontier slope"]
    return "\n\n".join(
        [
            "# Scaling laws",
            "![Loss against compute, and fits](scaling.png)",
            "## L = E + A / N^alpha + B / D^beta",
            markdown_table([*header, "residual"], rows),
            "N counts all parameters, D the training tokens; the loss L is in nats per token. In "
            "brackets: 95 % intervals over resampled pairs of N and D, each with all its seeds. "
            f"{ON_BOUNDS} The column of parameters is beta / (alpha + beta), the power of compute "
            "with which the best number of parameters grows (Hoffmann et al. 2022, approach 3). "
            "The slope is that of log loss against log compute on the frontier: the models whose "
            "loss, the mean over seeds, is below that of all models with at most their compute. "
            "The residual is the root mean square of the error of log L.",
            "## L = ((Nc / N)^(alpha / beta) + Dc / D)^beta",
            markdown_table(["mechanism", "alpha", "beta", "residual"], kaplan),
            "Kaplan et al. 2020, equation 1.5.",
            "## Models",
            markdown_table(
                ["mechanism", "width", "parameters", "tokens", "operations", "bits/byte"], points
            ),
            "Operations are those of all training steps, counted from the program. Losses of "
            "several seeds are means, ± half of the 95 % interval.",
            *report.on_left_out(summary),
            *report.configuration(summary),
        ]
    )


def draw(summary: Mapping[str, Any]) -> Any:
    """Draws the loss against compute, with the frontier, and the fits against parameters."""
    import numpy as np

    from effattn.analysis.style import line
    from experiments.harness import fits
    from experiments.harness.figure import legend_below, plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained", sharey=True)
    for index, (mechanism, fit) in enumerate(summary["fits"].items()):
        points = [p for p in summary["points"] if p["mechanism"] == mechanism]
        mark = line(index) | {"linestyle": "none"}
        style = {"color": mark["color"]}
        axes[0].plot(
            [p["compute"] for p in points], [p["loss"] for p in points], **mark, label=mechanism
        )
        front = fit["frontier"]
        axes[0].plot(front["compute"], front["loss"], **style, alpha=0.6)
        law = fits.LAWS["chinchilla"]
        values = np.array([fit["chinchilla"]["values"][name] for name in law.names])
        parameters = [p["parameters"] for p in points]
        sizes = np.geomspace(min(parameters), max(parameters), 50)
        for tokens in sorted({p["tokens"] for p in points}):
            of = [p for p in points if p["tokens"] == tokens]
            axes[1].plot([p["parameters"] for p in of], [p["loss"] for p in of], **mark)
            fitted = law.log_loss(values, np.log(sizes), np.full(50, np.log(tokens)))
            axes[1].plot(sizes, np.exp(fitted), **style, alpha=0.6, linewidth=1)
    for axis in axes:
        axis.set(xscale="log", yscale="log")
        axis.grid(alpha=0.3, which="both")
    # A factor of two or less needs no powers of ten.
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_formatter("{x:g}")
    axes[0].set(xlabel="training operations", ylabel="validation loss (nats per token)")
    axes[1].set(xlabel="parameters; a line for each number of tokens")
    legend_below(figure, list(axes[0].get_lines()[::2]), "mechanism")
    return figure


def check_grid(config: Config, task: Any) -> dict[str, str]:
    """Tries each mechanism at every width; returns and raises as `checks.check_mechanisms`."""
    left_out: dict[str, str] = {}
    for width, cell in {cell.width: cell for cell in config.cells().values()}.items():
        for mechanism, reason in checks.check_mechanisms(cell, task).items():
            left_out.setdefault(mechanism, f"width {width}: {reason}")
    return left_out


def train(
    config: Config,
    folder: Path,
    task: Any,
    settings: dict[str, Any],
    made_by: str,
    left_out: Mapping[str, str],
    optional: Collection[str],
) -> None:
    """Trains the grid and writes the report; see `experiments.harness.command.run`.

    A mechanism that is left out of the models of one size is left out of all.
    """
    from experiments.harness import figure

    left_out, points = dict(left_out), []
    cells = config.cells()
    of_cells = {
        name: settings | {key: getattr(cell, key) for key in OF_ONE} for name, cell in cells.items()
    }
    for name, of_cell in of_cells.items():
        folders.check_folder(folder / name, of_cell)

    @functools.cache
    def of_step(mechanism: str, width: int) -> int:
        return compute(next(c for c in cells.values() if c.width == width), task, mechanism)

    for name, of_cell in of_cells.items():
        kept = tuple(each for each in config.mechanisms if each not in left_out)
        cell, inner = dataclasses.replace(cells[name], mechanisms=kept), folder / name
        with folders.claimed(inner, of_cell):
            if not report.finished(inner, {**of_cell, **cell.of_runs()}, optional):
                print(f"{name}:", flush=True)
                command.train_all(cell, inner, task, of_cell, made_by, {}, optional)
        found, diverged = points_of(inner, kept)
        left_out |= {mechanism: f"{name}: {reason}" for mechanism, reason in diverged.items()}
        points += [{**point, "width": cell.width, "steps": cell.steps} for point in found]
    points = [point for point in points if point["mechanism"] not in left_out]
    for point in points:
        point["compute"] = point.pop("steps") * of_step(point["mechanism"], point["width"])
    kept = tuple(each for each in config.mechanisms if each not in left_out)
    summary = {
        "command": made_by,
        "config": {**settings, **config.of_runs(), "mechanisms": kept},
        "environment": machine.environment(),
        "points": points,
        "fits": {m: fits_of([p for p in points if p["mechanism"] == m]) for m in kept},
        "left_out": left_out,
    }
    figure.save(draw(summary), folder / "scaling.png")
    report.write(folder, summary, markdown(summary))


def read(folder: Path) -> str:
    """Returns the text to print for a finished grid."""
    return report.read_markdown(folder, "scaling.png and a folder for each size of model")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = command.parse("scaling", PRESETS, argv)
    return command.run("scaling", config, PRESETS[config.preset], check_grid, train, read)


if __name__ == "__main__":
    sys.exit(main())
