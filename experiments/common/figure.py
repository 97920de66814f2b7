"""The figure of a comparison: validation loss against tokens and against seconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np

from effattn.analysis.style import COLOURS, MARKERS
from experiments.common.metrics import read


def write_figure(folder: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Draws one line a mechanism, the mean over seeds, in a band from the lowest to the highest.

    Args:
      folder: the run folder; the figure is its `loss.png`.
      runs: results; the metrics of each lie in its folder.
    """
    curves: dict[str, list[list[dict[str, Any]]]] = {}
    for run in runs:
        records = read(folder / run["folder"] / "metrics.jsonl")
        evaluations = [record for record in records if "valid_loss" in record]
        curves.setdefault(run["mechanism"], []).append(evaluations)
    path = folder / "loss.png"
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for index, (mechanism, seeds) in enumerate(curves.items()):
        style = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "label": mechanism,
        }
        bits = _array(seeds, "bits_per_byte")
        for axis, key, unit in zip(axes, ("tokens", "seconds"), (1e6, 1), strict=True):
            x = _array(seeds, key).mean(0) / unit
            axis.plot(x, bits.mean(0), linewidth=1.6, markersize=4, **style)
            axis.fill_between(
                x, bits.min(0), bits.max(0), color=style["color"], alpha=0.2, linewidth=0
            )
    count = len(next(iter(curves.values())))
    axes[0].set(xlabel="training tokens (millions)", ylabel="validation loss (bits/byte)")
    axes[1].set(xlabel="training time (s)")
    for axis in axes:
        axis.grid(alpha=0.3)
    legend = "mechanism" if count == 1 else f"mean of {count} seeds; band: their range"
    lines = axes[1].get_lines()
    # Beside the curves: wherever it lies among them, it hides some in some comparison.
    figure.legend(handles=lines, title=legend, loc="outside lower center", ncols=min(4, len(lines)))
    partial = path.with_name(f"partial-{path.name}")
    figure.savefig(partial, dpi=150)
    plt.close(figure)
    partial.replace(path)


def _array(seeds: Sequence[Sequence[dict[str, Any]]], key: str) -> np.ndarray:
    return np.array([[record[key] for record in records] for records in seeds])
