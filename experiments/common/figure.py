"""The figure of a comparison: validation losses, against tokens and seconds or ranked."""

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

# More lines than colours cannot be told apart.
MOST_CURVES = len(COLOURS)


def write_figure(folder: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Draws the run folder's `loss.png`: curves of a few mechanisms, a ranking of many.

    Args:
      folder: the run folder.
      runs: results; the metrics of each lie in its folder.
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
    """Validation loss while training: means over seeds, in bands from the lowest to the highest."""
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
    # Beside the curves: wherever it lies among them, it hides some in some comparison.
    figure.legend(handles=lines, title=legend, loc="outside lower center", ncols=min(4, len(lines)))
    return figure


def _ranking(seeds: Mapping[str, Sequence[dict[str, Any]]]) -> Figure:
    """Final validation loss, the best above, with the speed of training beside it."""

    def values(mechanism: str, key: str) -> np.ndarray:
        return np.array([run[key] for run in seeds[mechanism]])

    ranked = sorted(seeds, key=lambda mechanism: values(mechanism, "bits_per_byte").mean())
    figure, axes = plt.subplots(
        1, 2, figsize=(10, 1.2 + 0.22 * len(ranked)), sharey=True, layout="constrained"
    )
    columns = (("bits_per_byte", 1), ("tokens_per_second", 1e3))
    for axis, colour, (key, unit) in zip(axes, COLOURS, columns, strict=False):
        for row, mechanism in enumerate(ranked):
            x = values(mechanism, key) / unit
            axis.hlines(row, x.min(), x.max(), color=colour, alpha=0.4, linewidth=4)
            axis.plot(x.mean(), row, "o", color=colour, markersize=4.5)
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(ranked)), ranked, fontsize=8)
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
