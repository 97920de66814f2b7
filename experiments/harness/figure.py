"""Figures of a comparison: curves of a measure, or a ranking of many mechanisms."""

import dataclasses
import math
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from effattn.analysis.style import COLOURS, MARKERS, line
from experiments.harness.report import SHARES, comparable_with
from experiments.harness.statistics import front

if TYPE_CHECKING:
    from experiments.tasks.task import Task

# Each curve needs a colour of its own.
MOST_CURVES = len(COLOURS)

# Losses by position are drawn for windows of 256 tokens and more: the places are powers of two.
BY_POSITION, LEAST_PLACES = "bits_by_position", 8

# Thousand operations of a call, per token.
OPERATIONS = "operations"

# Maximum number of letters in a line of the legend and of an axis.
LEGEND_LETTERS, TICK_LETTERS, SET_LETTERS = 100, 50, 12


def write_figures(folder: Path, runs: Sequence[dict[str, Any]], task: "Task") -> None:
    """Draws `results.png`: curves of few mechanisms, or a ranking of many.

    A ranking has the speeds of the largest group of mechanisms that were trained in the same
    environments.

    With losses by position in long windows, it also draws `positions.png`, which shows whether a
    mechanism uses what is far. With several mechanisms that decode, and a measure of which more is
    better, it also draws `states.png`: that measure against the size of the decode state. With the
    operations of the models in the results, it also draws `operations.png`.

    Args:
      folder: run folder.
      runs: results.
      task: task, which names the measure.
    """
    # An earlier report, of other mechanisms, may have left figures that this one lacks.
    for name in ("positions.png", "states.png", "operations.png"):
        (folder / name).unlink(missing_ok=True)
    seeds: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        seeds.setdefault(run["mechanism"], []).append(run)
    measure = Measure.of(task)
    if len(seeds) > MOST_CURVES:
        comparable = max((comparable_with(mechanism, runs) for mechanism in seeds), key=len)
        results = _ranking(seeds, measure, comparable)
    else:
        results = _curves(seeds, measure)
    save(results, folder / "results.png")
    places = runs[0]["held_out"].get("validation", {}).get(BY_POSITION, {})
    if len(places) >= LEAST_PLACES:
        save(_positions(seeds), folder / "positions.png")
    decoding = {m: of for m, of in seeds.items() if of[0]["state_bytes"]}
    if measure.more_is_better and len({of[0]["state_bytes"] for of in decoding.values()}) > 2:
        x = "state_bytes", 1e3, "decode state (kB)"
        save(_against(*x, decoding, measure), folder / "states.png")
    if OPERATIONS in runs[0]:
        x = OPERATIONS, 1.0, "thousand operations of a call per token"
        save(_against(*x, seeds, measure), folder / "operations.png")


@dataclasses.dataclass(frozen=True)
class Measure:
    """Measure of a figure: its key in results, its name, its unit and which values are better."""

    key: str
    name: str
    unit: float
    more_is_better: bool

    @classmethod
    def of(cls, task: "Task") -> "Measure":
        """Returns the headline of a task."""
        name = task.heading
        is_share = task.headline in SHARES
        name, unit = (f"{name} (%)", 0.01) if is_share else (name, 1.0)
        return cls(task.headline, name, unit, task.more_is_better)

    def in_set(self, run: Mapping[str, Any], name: str) -> float:
        """Returns the measure of a run on a held-out set."""
        return run["held_out"][name][self.key] / self.unit


def save(figure: Figure, path: Path) -> None:
    """Writes and closes a figure; a killed process leaves either the old file or the new file."""
    partial = path.with_name(f"partial-{path.name}")
    figure.savefig(partial, dpi=150)
    plt.close(figure)
    partial.replace(path)


def _curves(seeds: Mapping[str, Sequence[dict[str, Any]]], measure: Measure) -> Figure:
    """Draws the measure against tokens, and by held-out set or against seconds.

    Lines are means over the seeds, and bands their range.
    """
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    first = next(iter(seeds.values()))
    sets = list(first[0]["held_out"])
    for index, (mechanism, runs) in enumerate(seeds.items()):
        style = {"color": COLOURS[index], "marker": MARKERS[index], "label": mechanism}
        curves = [run["curve"] for run in runs]
        values = _array(curves, measure.key) / measure.unit
        panels: list[tuple[Any, Any]] = [(_array(curves, "tokens").mean(0) / 1e6, values)]
        if len(sets) > 1:
            by_set = np.array([[measure.in_set(run, name) for name in sets] for run in runs])
            panels.append((np.arange(len(sets)), by_set))
        else:
            panels.append((_array(curves, "seconds").mean(0), values))
        for axis, (x, y) in zip(axes, panels, strict=True):
            axis.plot(x, y.mean(0), linewidth=1.6, markersize=4, **style)
            axis.fill_between(x, y.min(0), y.max(0), color=style["color"], alpha=0.2, linewidth=0)
    axes[0].set(xlabel="training tokens (millions)", ylabel=f"validation: {measure.name}")
    if len(sets) > 1:
        names = [textwrap.fill(name, SET_LETTERS) for name in sets]
        axes[1].set_xticks(range(len(sets)), names, fontsize=8)
        axes[1].set(xlabel="held-out set, at the end")
    else:
        axes[1].set(xlabel="training time (s)")
    for axis in axes:
        axis.grid(alpha=0.3)
    legend = "mechanism" if len(first) == 1 else f"mean of {len(first)} seeds; band: their range"
    legend_below(figure, axes[1].get_lines(), legend)
    return figure


def legend_below(figure: Figure, lines: Sequence[Any], title: str) -> None:
    """Adds a legend below the axes, in up to four columns, as the figure has room.

    A legend inside the axes would hide curves of some comparisons.
    """
    labels = [_wrapped(line.get_label(), LEGEND_LETTERS) for line in lines]
    for columns in range(min(4, len(lines)), 0, -1):
        legend = figure.legend(
            lines, labels, title=title, loc="outside lower center", ncols=columns
        )
        if columns == 1 or legend.get_window_extent().width < 0.98 * figure.bbox.width:
            return
        legend.remove()


def _wrapped(name: str, letters: int) -> str:
    """Breaks a long name of a mechanism into lines, preferably after `,`, `/` or `+`."""
    lines = [""]
    for part in re.split(r"(?<=[,/+])", name):
        for piece in textwrap.wrap(part, letters):
            if lines[-1] and len(lines[-1]) + len(piece) > letters:
                lines.append("")
            lines[-1] += piece
    return "\n".join(lines)


def _ranking(
    seeds: Mapping[str, Sequence[dict[str, Any]]], measure: Measure, comparable: Collection[str]
) -> Figure:
    """Draws a row for each mechanism, best first.

    The panels have the measure on the validation set and on the last held-out set, and the speeds
    of comparable mechanisms.
    """
    sets = list(next(iter(seeds.values()))[0]["held_out"])
    sign = -1 if measure.more_is_better else 1
    columns = [
        (f"{name}: {measure.name}" if len(sets) > 1 else f"validation: {measure.name}", name)
        for name in dict.fromkeys((sets[0], sets[-1]))
    ]

    def values(mechanism: str, name: str | None) -> np.ndarray:
        if name is None:
            return np.array([run["tokens_per_second"] / 1e3 for run in seeds[mechanism]])
        return np.array([measure.in_set(run, name) for run in seeds[mechanism]])

    ranked = sorted(seeds, key=lambda mechanism: sign * values(mechanism, sets[0]).mean())
    names = [_wrapped(mechanism, TICK_LETTERS) for mechanism in ranked]
    lines, longest = max(n.count("\n") + 1 for n in names), max(map(len, "\n".join(names).split()))
    size = (
        4 + 3 * (len(columns) + 1) + 0.08 * max(0, longest - 25),
        1.2 + (0.07 + 0.15 * lines) * len(ranked),
    )
    figure, axes = plt.subplots(
        1, len(columns) + 1, figsize=size, sharey=True, layout="constrained"
    )
    speed = "training speed (thousand tokens/s)"
    if len(comparable) < len(seeds):
        speed += "\nno dot: made in another environment"
    panels = [*columns, (speed, None)]
    for axis, colour, (label, name) in zip(axes, COLOURS, panels, strict=False):
        for row, mechanism in enumerate(ranked):
            if name is None and mechanism not in comparable:
                continue
            x = values(mechanism, name)
            axis.hlines(row, x.min(), x.max(), color=colour, alpha=0.4, linewidth=4)
            axis.plot(x.mean(), row, "o", color=colour, markersize=4.5)
        axis.grid(alpha=0.3)
        axis.set(xlabel=label)
    axes[0].set_yticks(range(len(ranked)), names, fontsize=8)
    axes[0].set_ylim(len(ranked) - 0.5, -0.5)
    axes[-1].set(xlim=(0, None))
    better = "more is better" if measure.more_is_better else "less is better"
    count = len(next(iter(seeds.values())))
    spread = f"dots: means of {count} seeds; bars: their range; " if count > 1 else ""
    figure.suptitle(f"{spread}{measure.name.partition(' (')[0]}: {better}", fontsize=10)
    return figure


def _positions(seeds: Mapping[str, Sequence[dict[str, Any]]]) -> Figure:
    """Draws the validation loss against the number of tokens before the predicted one."""
    figure, axis = plt.subplots(figsize=(10, 5.5), layout="constrained")
    for index, (mechanism, runs) in enumerate(seeds.items()):
        each = [run["held_out"]["validation"][BY_POSITION] for run in runs]
        axis.plot(
            [int(place) for place in each[0]],
            np.mean([list(of_run.values()) for of_run in each], axis=0),
            **line(index),
            markersize=4,
            label=mechanism,
        )
    axis.set_xscale("log", base=2)
    axis.set(xlabel="tokens before (from this number to its double)", ylabel="loss (bits/token)")
    axis.grid(alpha=0.3)
    legend_below(figure, axis.get_lines(), "mechanism")
    return figure


def _against(
    key: str,
    unit: float,
    label: str,
    seeds: Mapping[str, Sequence[dict[str, Any]]],
    measure: Measure,
) -> Figure:
    """Draws the mean of the measure over all held-out sets against a cost of the results.

    Only the Pareto front of many mechanisms has colour and names.
    """
    points = {}
    for mechanism, runs in seeds.items():
        each = [np.mean([measure.in_set(run, name) for name in run["held_out"]]) for run in runs]
        points[mechanism] = runs[0][key] / unit, float(np.mean(each))
    sign = 1 if measure.more_is_better else -1
    best = front({name: (-x, sign * y) for name, (x, y) in points.items()})
    many = len(points) > MOST_CURVES
    figure, axis = plt.subplots(figsize=(10, 5.5), layout="constrained")
    for index, (mechanism, point) in enumerate(points.items()):
        if not many:
            style = {"color": COLOURS[index], "marker": MARKERS[index], "label": mechanism}
        else:
            style = {"color": COLOURS[0] if mechanism in best else "silver", "marker": "o"}
        axis.plot(*point, linestyle="none", **style)
    set_costs(axis)
    if many:
        name_points(axis, {name: point for name, point in points.items() if name in best})
    axis.set(xlabel=label, ylabel=f"mean of all held-out sets: {measure.name}")
    axis.grid(alpha=0.3)
    if many:
        better = "more" if measure.more_is_better else "less"
        axis.set_title(
            f"{better} is better; names: no mechanism is better in both numbers", fontsize=10
        )
    else:
        legend_below(figure, axis.get_lines(), "mechanism")
    return figure


def name_points(axis: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Writes a name beside each point; points that nearly coincide share a line of names.

    Names rise to the right if the points fall, and fall if the points rise, so that they rarely
    meet the names of neighbours.
    """
    in_order = sorted(points.values())
    rising = 1 if in_order[-1][1] <= in_order[0][1] else -1
    (low, high), (bottom, top) = axis.get_xlim(), axis.get_ylim()
    written: dict[tuple[int, int], list[str]] = {}
    for name, (x, y) in points.items():
        across = math.log(x / low) / math.log(high / low)
        place = round(12 * across), round(16 * (y - bottom) / (top - bottom))
        written.setdefault(place, []).append(name)
    for names in written.values():
        axis.annotate(
            ", ".join(names),
            points[names[0]],
            (3, 3 * rising),
            textcoords="offset points",
            fontsize=7,
            rotation=25 * rising,
            rotation_mode="anchor",
            verticalalignment="bottom" if rising > 0 else "top",
        )


def set_costs(axis: Axes) -> None:
    """Makes the horizontal axis logarithmic, with plain numbers, and leaves room for names."""
    axis.set_xscale("log")
    axis.margins(x=0.15, y=0.15)
    low, high = axis.get_xlim()
    # Over several decades there is no room for more numbers.
    axis.xaxis.set_minor_locator(LogLocator(subs=(2, 5) if high > 10 * low else range(2, 10)))
    for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        formatter("{x:g}")
    axis.tick_params(axis="x", which="both", labelsize=8)


def _array(seeds: Sequence[Sequence[dict[str, Any]]], key: str) -> np.ndarray:
    return np.array([[record[key] for record in records] for records in seeds])
