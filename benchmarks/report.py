"""Report of a run: Markdown tables, JSON results and a figure."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt

from benchmarks.machine import Rate
from benchmarks.measure import Row
from benchmarks.workloads import PASSES, SPARSE_GLOBAL, SPARSE_WINDOW, WINDOW, WORKLOADS

TITLES = {
    "causal": "exact, causal",
    "bidirectional": "exact, bidirectional",
    "window": f"causal window of {WINDOW[0] + 1} keys",
    "sparse": f"window of {SPARSE_WINDOW} on each side and {SPARSE_GLOBAL} global tokens",
    "linear": "linear, causal, 64 features",
    "retention": "retention",
    "scalar gate": "gated linear, a decay of the token",
    "vector gate": "gated linear, decays of features",
    "delta rule": "delta rule",
    "gated delta rule": "gated delta rule",
}
MARKERS = "osD^v"


class Target(NamedTuple):
    """Least ratio of a contender's time to effattn's; without contender, effattn's memory in MB."""

    comparison: str
    which: str
    length: int
    contender: str | None
    needed: float
    aim: float | None = None


# A pattern with a share p of all pairs may take 2.5 p of the time of all pairs.
_PAIRS = [WORKLOADS[name].pairs(16384) for name in ("bidirectional", "sparse")]

TARGETS = (
    Target("causal", "forward", 8192, "jax.nn", 4.0),
    Target("causal", "forward", 8192, "PyTorch SDPA", 1.0, aim=1.2),
    Target("causal", "forward + backward", 8192, "PyTorch SDPA", 1.0, aim=1.3),
    Target("causal", "forward + backward", 8192, None, 64.0),
    Target("window", "forward", 16384, "PyTorch FlexAttention", 1.0),
    Target("window", "forward", 8192, "jax.nn", 15.0),
    Target("sparse", "forward", 16384, "effattn, exact", _PAIRS[0] / _PAIRS[1] / 2.5),
    Target("linear", "forward", 16384, "effattn, exact", 10.0),
    Target("retention", "forward", 16384, "effattn, exact", 10.0),
    Target("scalar gate", "forward", 16384, "effattn, exact", 15.0),
    Target("vector gate", "forward", 16384, "effattn, exact", 8.0),
    Target("delta rule", "forward", 16384, "effattn, exact", 4.0),
    Target("gated delta rule", "forward", 16384, "effattn, exact", 4.0),
    *(
        Target(recurrence, which, 16384, "jax-linear-attention", 1.0)
        for recurrence in ("scalar gate", "vector gate", "delta rule", "gated delta rule")
        for which in PASSES
    ),
)


def write(
    folder: Path,
    machine: dict[str, Any],
    settings: dict[str, Any],
    rates: Sequence[Rate],
    rows: Sequence[Row],
) -> str:
    """Writes `results.json`, `table.md` and `time.png`; returns the text of the table."""
    text = markdown(machine, rates, rows)
    save(folder, text, machine, settings, rates, rows)
    draw_times(folder / "time.png", machine, rows)
    return text


def save(
    folder: Path,
    text: str,
    machine: dict[str, Any],
    settings: dict[str, Any],
    rates: Sequence[Rate],
    rows: Sequence[Any],
) -> None:
    """Writes `results.json` and `table.md`; rows are dataclasses."""
    record = {
        "machine": machine,
        "settings": settings,
        "rates": [rate._asdict() for rate in rates],
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    (folder / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "table.md").write_text(text, encoding="utf-8")


def markdown(machine: dict[str, Any], rates: Sequence[Rate], rows: Sequence[Row]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v)
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores, load average {machine['load_average'][0]} at "
        f"the start; Python {machine['python']}, {versions}; {machine['date']}. Float32, batch 1, "
        "4 heads of 64.",
        table(("rate, best of many calls", "G/s"), [(r.of, number(r.per_second)) for r in rates]),
    ]
    for comparison in dict.fromkeys(row.comparison for row in rows):
        of_comparison = [row for row in rows if row.comparison == comparison]
        parts += [f"## {TITLES[comparison]}", _measured(of_comparison)]
    parts += [
        "`ratio` is a contender's time over effattn's time in the same round, the median of the "
        "rounds: above 1, effattn is faster. `error` is the largest error against float64, "
        "relative to the largest element. `floor` is the time of the matrix products plus the "
        "time of the exponentials at the best rates above; a program that overlaps both, or uses "
        "cheaper exponentials, can be faster. `temporaries` is the temporary memory of the "
        "compiled program, which PyTorch does not report.",
    ]
    if any(row.skipped for row in rows):
        parts += ["## Not timed", not_timed(rows, _where)]
    if verdicts := _verdicts(rows):
        header = ("effattn against", "ratio", "range of rounds", "needed", "verdict")
        parts += ["## Targets", table(header, verdicts)]
    return "\n\n".join(parts) + "\n"


def _measured(rows: Sequence[Row]) -> str:
    header = (
        "",
        "length",
        "contender",
        "ms",
        "rounds",
        "ratio",
        "floor ms",
        "temporaries",
        "error",
    )
    lines = [
        (
            row.which,
            str(row.length),
            row.contender,
            f"{row.seconds * 1e3:.1f}",
            str(sum(seconds is not None for seconds in row.rounds)),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            f"{row.floor * 1e3:.1f}",
            "" if row.temporary_bytes is None else f"{row.temporary_bytes / 1e6:.1f} MB",
            f"{row.error:.0e}",
        )
        for row in rows
        if row.seconds is not None
    ]
    return table(header, lines)


def _where(row: Row) -> str:
    return f"{TITLES[row.comparison]}, {row.which}, {row.length}"


def not_timed(rows: Sequence[Any], where: Callable[[Any], str]) -> str:
    """Returns a line for each contender and reason, with all comparisons concerned."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.skipped is not None:
            reasons.setdefault((row.contender, row.skipped), {})[where(row)] = None
    return "\n".join(f"- {name}: {why} ({'; '.join(w)})" for (name, why), w in reasons.items())


def _verdicts(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Returns the verdicts on the targets whose contenders and lengths are in this run."""
    found = {(row.comparison, row.which, row.length, row.contender): row for row in rows}
    lines: list[tuple[str, ...]] = []
    for comparison, which, length, contender, needed, aim in TARGETS:
        row = found.get((comparison, which, length, contender or "effattn"))
        if row is None:
            continue
        name = f"{TITLES[comparison]}, {which}, {length}: {contender or 'MB of temporaries'}"
        bound = f"{needed:.3g}" if contender else f"below {needed:g}"
        if contender is None and row.temporary_bytes is not None:
            megabytes = row.temporary_bytes / 1e6
            verdict = "met" if megabytes < needed else "MISSED"
            lines.append((name, f"{megabytes:.1f}", "", bound, verdict))
            continue
        if row.ratio is None or row.ratio_range is None:
            reason = row.skipped or "effattn was not timed"
            lines.append((name, "", "", bound, f"not measured: {reason}"))
            continue
        verdict = "met" if row.ratio >= needed else "MISSED"
        if aim is not None:
            verdict += f", aim of {aim:g} {'met' if row.ratio >= aim else 'missed'}"
        spread = "{:.2f} to {:.2f}".format(*row.ratio_range)
        lines.append((name, f"{row.ratio:.2f}", spread, bound, verdict))
    return lines


def number(per_second: float) -> str:
    """Returns a rate as text in units of 1e9."""
    giga = per_second / 1e9
    return f"{giga:.0f}" if giga >= 10 else f"{giga:.2f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table with aligned columns."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    padded = [[cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in padded)


class Panel(NamedTuple):
    """Panel of a figure.

    Attributes:
      title, xlabel, ylabel: texts; empty for none.
      ticks: positions and labels of the x axis.
      lines: positions and values of each contender.
      limit: positions and values of the dotted line.
      joined: whether lines join the values of a contender.
    """

    title: str
    xlabel: str
    ylabel: str
    ticks: Mapping[float, str]
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    limit: tuple[Sequence[float], Sequence[float]]
    joined: bool = True


def draw_times(path: Path, machine: dict[str, Any], rows: Sequence[Row]) -> None:
    """Draws time against length, with a column per comparison and a row per pass."""
    comparisons = list(dict.fromkeys(row.comparison for row in rows))
    ticks = {math.log2(n): str(n) for n in sorted({row.length for row in rows})}
    panels = []
    for which in PASSES:
        for comparison in comparisons:
            here = [r for r in rows if (r.comparison, r.which) == (comparison, which)]
            timed = [(r.contender, math.log2(r.length), r.seconds) for r in here]
            floors = [r for r in here if r.contender == "effattn"]
            panels.append(
                Panel(
                    TITLES[comparison] if which == PASSES[0] else "",
                    "length (tokens)" if which == PASSES[-1] else "",
                    f"{which} (s)" if comparison == comparisons[0] else "",
                    ticks,
                    lines_of(timed),
                    ([math.log2(r.length) for r in floors], [r.floor for r in floors]),
                )
            )
    title = (
        f"Median time of a call, float32, 4 heads of 64\n{machine['cpu']}, {machine['cores']} cores"
    )
    draw(path, title, panels, len(comparisons), limit="floor", share_y=True)


def lines_of(
    points: Iterable[tuple[str, float, float | None]],
) -> dict[str, tuple[list[float], list[float]]]:
    """Returns the lines of a panel from points (contender, position, value or None)."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for name, position, value in points:
        if value is not None:
            line = lines.setdefault(name, ([], []))
            line[0].append(position)
            line[1].append(value)
    return lines


def draw(
    path: Path, title: str, panels: Sequence[Panel], columns: int, *, limit: str, share_y: bool
) -> None:
    """Draws panels row by row, with one colour per contender and logarithmic values."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    height = -(-len(panels) // columns)
    upright = [len(tick) for p in panels if not p.joined for tick in p.ticks.values()]
    inches = 1.6 + 3.2 * height + 0.09 * max(upright, default=0)
    with plt.style.context("petroff10"):  # colours for any colour vision
        figure, grid = plt.subplots(
            height, columns, figsize=(1.2 + 3.2 * columns, inches), sharey=share_y, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for axes, panel in zip(grid.flat, panels, strict=False):
            for index, name in enumerate(names):
                axes.plot(
                    *panel.lines.get(name, ([], [])),
                    color=f"C{index}", marker=MARKERS[index % len(MARKERS)], label=name,
                    linestyle="-" if panel.joined else "",
                )  # fmt: skip
            axes.plot(*panel.limit, color="black", linestyle=":", label=limit)
            rotation = 45 if panel.joined else 90  # names are longer than numbers
            axes.set_xticks(list(panel.ticks), list(panel.ticks.values()), rotation=rotation)
            axes.set_yscale("log")
            axes.grid(alpha=0.3)
            axes.set_title(panel.title)
            axes.set_xlabel(panel.xlabel)
            axes.set_ylabel(panel.ylabel)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        handles, labels = grid[0, 0].get_legend_handles_labels()  # includes empty lines
        figure.legend(handles, labels, loc="outside lower center", ncols=min(6, 1 + columns))
        figure.suptitle(title)
        figure.savefig(path, dpi=150)
        plt.close(figure)
