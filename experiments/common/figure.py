"""Figure of a comparison: curves of the validation loss, or a ranking of many mechanisms."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from effattn.analysis.style import COLOURS, MARKERS
from experiments.common.metrics import check_reaches, read

# Each curve needs a colour of its own.
MOST_CURVES = len(COLOURS)

# Maximum number of letters in a line of the legend and of an axis.
LEGEND_LETTERS, TICK_LETTERS = 100, 50


def write_figure(folder: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Draws `loss.png`: curves of few mechanisms, or a ranking of many.

    Args:
      folder: run folder, which also has the metrics of each run.
      runs: results.
    """
    seeds: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        seeds.setdefault(run["mechanism"], []).append(run)
    path = folder / "loss.png"
    figure = _ranking(seeds) if len(seeds) > MOST_CURVES else _curves(folder, seeds)
    partial = path.with_name(f"partial-{path.name}")
    figure.savefig(partial, dpi=150)
    plt.close(figure)
    partial.replace(path)


def _curves(folder: Path, seeds: Mapping[str, Sequence[dict[str, Any]]]) -> Figure:
    """Draws validation loss against tokens and seconds: means over seeds, bands for their range."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for index, (mechanism, runs) in enumerate(seeds.items()):
        style = {"color": COLOURS[index], "marker": MARKERS[index], "label": mechanism}
        evaluations = [_evaluations(folder, run) for run in runs]
        bits = _array(evaluations, "bits_per_byte")
        for axis, key, unit in zip(axes, ("tokens", "seconds"), (1e6, 1), strict=True):
            x = _array(evaluations, key).mean(0) / unit
            axis.plot(x, bits.mean(0), linewidth=1.6, markersize=4, **style)
            axis.fill_between(
                x, bits.min(0), bits.max(0), color=style["color"], alpha=0.2, linewidth=0
            )
    count = len(next(iter(seeds.values())))
    axes[0].set(xlabel="training tokens (millions)", ylabel="validation loss (bits/byte)")
    axes[1].set(xlabel="training time (s)")
    for axis in axes:
        axis.grid(alpha=0.3)
    legend = "mechanism" if count == 1 else f"mean of {count} seeds; band: their range"
    lines = axes[1].get_lines()
    legend_below(figure, lines, legend)
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


def _ranking(seeds: Mapping[str, Sequence[dict[str, Any]]]) -> Figure:
    """Draws the final validation losses, best first, and the training speeds."""

    def values(mechanism: str, key: str) -> np.ndarray:
        return np.array([run[key] for run in seeds[mechanism]])

    ranked = sorted(seeds, key=lambda mechanism: values(mechanism, "bits_per_byte").mean())
    names = [_wrapped(mechanism, TICK_LETTERS) for mechanism in ranked]
    lines, longest = max(n.count("\n") + 1 for n in names), max(map(len, "\n".join(names).split()))
    size = (10 + 0.08 * max(0, longest - 25), 1.2 + (0.07 + 0.15 * lines) * len(ranked))
    figure, axes = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    columns = (("bits_per_byte", 1), ("tokens_per_second", 1e3))
    for axis, colour, (key, unit) in zip(axes, COLOURS, columns, strict=False):
        for row, mechanism in enumerate(ranked):
            x = values(mechanism, key) / unit
            axis.hlines(row, x.min(), x.max(), color=colour, alpha=0.4, linewidth=4)
            axis.plot(x.mean(), row, "o", color=colour, markersize=4.5)
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(ranked)), names, fontsize=8)
    axes[0].set_ylim(len(ranked) - 0.5, -0.5)
    axes[0].set(xlabel="validation loss (bits/byte), less is better")
    axes[1].set(xlabel="training speed (thousand tokens/s)", xlim=(0, None))
    count = len(next(iter(seeds.values())))
    if count > 1:
        figure.suptitle(f"Dots: means of {count} seeds; bars: their range", fontsize=10)
    return figure


def _evaluations(folder: Path, run: dict[str, Any]) -> list[dict[str, Any]]:
    path = folder / run["folder"] / "metrics.jsonl"
    evaluations = [record for record in read(path) if "valid_loss" in record]
    check_reaches(path, evaluations, run["step"])
    return evaluations


def _array(seeds: Sequence[Sequence[dict[str, Any]]], key: str) -> np.ndarray:
    return np.array([[record[key] for record in records] for records in seeds])
