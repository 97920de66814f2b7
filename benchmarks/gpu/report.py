"""Report of a run on a GPU: Markdown tables, JSON results and a figure."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.measure import HOST_SHARE, Row
from benchmarks.machine import Rate
from benchmarks.report import Panel, draw, lines_of, not_timed, number, save, table
from benchmarks.workloads import PASSES

TITLES = {
    "causal": "exact, causal",
    "bidirectional": "exact, bidirectional",
    "window": "causal window",
    "documents": "packed documents, causal",
    "grouped": "grouped queries, causal",
    "block sparse": "block sparse",
    "bigbird": "BigBird",
    "longformer": "Longformer",
    "linear": "linear, causal",
    "retention": "retention",
    "scalar gate": "gated linear, scalar decays",
    "vector gate": "gated linear, vector decays",
    "state space": "state-space duality",
    "delta rule": "delta rule",
    "gated delta rule": "gated delta rule",
    "decode": "paged decode",
}
COLUMNS = 4  # panels in a row of the figure
ALONE = "one case each"


def write(
    folder: Path,
    machine: dict[str, Any],
    settings: dict[str, Any],
    rates: Sequence[Rate],
    rows: Sequence[Row],
) -> str:
    """Writes `results.json`, `table.md` and `throughput.png`; returns the text of the tables."""
    text = markdown(machine, rates, rows)
    save(folder, text, machine, settings, rates, rows)
    timed = [row for row in rows if row.seconds is not None]
    if timed:
        draw_throughput(folder / "throughput.png", machine, rates, timed)
    return text


def markdown(machine: dict[str, Any], rates: Sequence[Rate], rows: Sequence[Row]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v)
    device = machine["device"]
    driver = f", driver {device['driver']}" if device["driver"] else ""
    parts = [
        f"{device['name']}{driver}; {machine['cpu']}, {machine['cores']} cores; Python "
        f"{machine['python']}, {versions}; {machine['date']}. Bfloat16.",
        table(
            ("rate, best of several chains", "G/s"), [(r.of, number(r.per_second)) for r in rates]
        ),
    ]
    for comparison in dict.fromkeys(row.comparison for row in rows):
        timed = [r for r in rows if r.comparison == comparison and r.seconds is not None]
        if timed:
            parts += [f"## {TITLES[comparison]}", _measured(timed)]
    parts += [
        "`case` begins with the length; the second number of exact attention and recurrences is "
        "the head size. `ms` is the time of a call, the median of several chains of calls. A star "
        f"marks rows in which the host takes over {HOST_SHARE:.0%} of this time to start a call, "
        "so that the device may have waited. TFLOP/s count the matrix products of the pairs that "
        "attend (for recurrences, a product to write the state and a product to read it), and 3.5 "
        "times as many for forward + backward; `share of product` compares them with the best "
        "product above. `moved` is the least traffic, with operands read and results written once. "
        "GB/s is this traffic over the time, and `share of copy` compares it with the copy above. "
        "`peak` is the memory of operands, results and temporaries; for PyTorch it is the peak of "
        "its allocator. `error` is the largest error of the checked head against float64, relative "
        "to the largest element.",
    ]
    if any(row.skipped for row in rows):
        parts += ["## Not timed", not_timed(rows, _where)]
    return "\n\n".join(parts) + "\n"


def _where(row: Row) -> str:
    return f"{TITLES[row.comparison]}, {row.variant}, {row.which}"


def _measured(rows: Sequence[Row]) -> str:
    header = (
        "", "case", "contender", "ms", "rounds", "TFLOP/s", "share of product", "moved",
        "GB/s", "share of copy", "peak", "error",
    )  # fmt: skip
    return table(header, [_line(row) for row in rows])


def _line(row: Row) -> tuple[str, ...]:
    return (
        row.which,
        row.variant,
        row.contender,
        f"{(row.seconds or 0) * 1e3:.3f}" + ("*" if row.bound_by_host else ""),
        str(len(row.rounds)),
        f"{(row.flops_per_second or 0) / 1e12:.1f}",
        f"{row.product_share or 0:.0%}",
        f"{row.traffic / 1e6:.0f} MB",
        f"{(row.bytes_per_second or 0) / 1e9:.0f}",
        f"{row.copy_share or 0:.0%}",
        "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f} MB",
        f"{row.error:.0e}",
    )


def draw_throughput(
    path: Path, machine: dict[str, Any], rates: Sequence[Rate], rows: Sequence[Row]
) -> None:
    """Draws TFLOP/s against the cases of each kind, with a panel per pass."""
    best = max(rate.per_second for rate in rates if rate.kind == "product") / 1e12
    panels = []
    for title, cases in _kinds(rows).items():
        for which in PASSES:
            points = [
                (row.contender, at, row.flops_per_second and row.flops_per_second / 1e12)
                for at, of_case in enumerate(cases.values())
                for row in of_case
                if row.which == which
            ]
            if points:
                panels.append(
                    Panel(
                        title=f"{title}\n{which}",
                        xlabel="",
                        ylabel="TFLOP/s",
                        ticks=dict(enumerate(cases)),
                        lines=lines_of(points),
                        limit=([-0.5, len(cases) - 0.5], [best, best]),
                        joined=title != ALONE,
                    )
                )
    title = f"Matrix products a second, bfloat16\n{machine['device']['name']}"
    columns = min(COLUMNS, len(panels))
    draw(path, title, panels, columns, limit="product of large matrices", share_y=False)


def _kinds(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Returns the rows by kind and case; kinds with a single case come last, as one kind.

    Each head size of exact attention is a kind, whose cases are lengths.
    """
    kinds: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        title, label = TITLES[row.comparison], row.variant
        if row.comparison in ("causal", "bidirectional"):
            title, label = f"{title}, heads of {row.head_size}", str(row.length)
        kinds.setdefault(title, {}).setdefault(label, []).append(row)
    several = {
        title: dict(sorted(cases.items(), key=lambda case: _numbers(case[0])))
        for title, cases in kinds.items()
        if len(cases) > 1
    }
    alone = {title: next(iter(cases.values())) for title, cases in kinds.items() if len(cases) == 1}
    return {**several, ALONE: alone} if alone else several


def _numbers(label: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", label)]
