"""Figures of costs against length, in logarithms."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from effattn.analysis.style import line
from experiments.harness.figure import save

GREY = "#999999"

# Longer names in a legend of two columns would make the panels narrow.
LONGEST_IN_TWO_COLUMNS = 18

# More lines in a panel cannot be told apart.
MOST_LINES = 12

# Points of a line: lengths and values.
Line = tuple[Sequence[int], Sequence[float]]


class Quantity(NamedTuple):
    """Quantity on a vertical axis: label with unit, and the values in one unit."""

    label: str
    unit: float


SECONDS = Quantity("time (ms)", 1e-3)
BYTES = Quantity("memory (MB)", 1e6)


def draw_families(
    path: Path,
    title: str,
    quantity: Quantity,
    families: Mapping[str, Mapping[str, Line]],
    exact: tuple[str, Line],
) -> None:
    """Draws families on one page, with exact attention in grey in each panel.

    A family has one panel, or several with at most `MOST_LINES` lines.
    """
    name, line = exact
    panels = _panels(families, name)
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    most = max(len(lines) for lines in panels.values())
    size = (max(2.5 * columns, 3) + 0.4, (2.2 + 0.075 * most) * rows + 0.5)
    figure, grid = plt.subplots(
        rows, columns, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (panel, lines) in zip(grid.flat, panels.items(), strict=False):
        axes.plot(line[0], _in(quantity, line[1]), color=GREY, linewidth=2.5, zorder=1)
        _draw_lines(axes, quantity, lines)
        axes.set_title(panel, fontsize=9)
        if lines:
            in_row = 2 if max(map(len, lines)) <= LONGEST_IN_TWO_COLUMNS else 1
            axes.legend(
                fontsize=6.5, ncols=in_row, loc="upper center", bbox_to_anchor=(0.5, -0.2),
                frameon=False, handlelength=2.2, columnspacing=1, labelspacing=0.25,
            )  # fmt: skip
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel(quantity.label, fontsize=8)
    _label_lengths(grid.flat[: len(panels)])
    # One panel is narrower than the title.
    between = "\n" if columns == 1 else "; "
    figure.suptitle(f"{title}{between}grey: {name}", fontsize=10)
    save(figure, path)


def _panels(families: Mapping[str, Mapping[str, Line]], exact: str) -> dict[str, dict[str, Line]]:
    """Returns the lines of each panel by its title, without those of exact attention."""
    panels = {}
    for family, of_family in families.items():
        lines = [(name, points) for name, points in of_family.items() if name != exact]
        parts = max(1, math.ceil(len(lines) / MOST_LINES))
        for part in range(parts):
            begin, end = (len(lines) * place // parts for place in (part, part + 1))
            title = family if parts == 1 else f"{family}, {part + 1} of {parts}"
            panels[title] = dict(lines[begin:end])
    return panels


def draw_side_by_side(
    path: Path, title: str, panels: Sequence[tuple[Quantity, Mapping[str, Line]]], reference: str
) -> None:
    """Draws the same mechanisms in a panel for each quantity; the line `reference` is dotted."""
    figure, grid = plt.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 3.8), squeeze=False, layout="constrained"
    )
    for axes, (quantity, lines) in zip(grid.flat, panels, strict=True):
        if reference in lines:
            lengths, values = lines[reference]
            look = {"color": GREY, "linestyle": ":", "linewidth": 2}
            axes.plot(lengths, _in(quantity, values), label=reference, **look)
        _draw_lines(axes, quantity, {n: line for n, line in lines.items() if n != reference})
        axes.set_ylabel(quantity.label)
    _label_lengths(grid.flat)
    handles = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(title)
    save(figure, path)


def _draw_lines(axes: Any, quantity: Quantity, lines: Mapping[str, Line]) -> None:
    for index, (name, (lengths, values)) in enumerate(lines.items()):
        # Later markers are smaller, so that they do not hide earlier ones at the same point.
        axes.plot(
            lengths, _in(quantity, values), label=name, **line(index),
            markersize=max(3, 5 - index / 2), linewidth=1.1, zorder=2,
        )  # fmt: skip


def _in(quantity: Quantity, values: Sequence[float]) -> list[float]:
    return [value / quantity.unit for value in values]


def _label_lengths(every: Sequence[Any]) -> None:
    """Sets logarithmic axes, with lengths such as 4k."""
    for axes in every:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(LogLocator(base=4, numticks=5))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda length, _: short(round(length)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.tick_params(labelsize=7.5, labelbottom=True)
        axes.grid(alpha=0.3)
        axes.set_xlabel("length (tokens)", fontsize=8)


def short(length: int) -> str:
    """Returns a length in units of 1024: 256, 4k, 1M."""
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        if length >= unit and length % unit == 0:
            return f"{length // unit}{letter}"
    return str(length)
