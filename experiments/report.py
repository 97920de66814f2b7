"""One page of all committed results.

`make report` reads every `summary.json` in `experiments/results`, and writes `docs/report.md`, its
figures and the quality of mechanisms for `effattn.advise`. Numbers without the command, the
configuration and the version that made them are not shown.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as `python experiments/report.py`
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro

from experiments.harness import outcome
from experiments.harness.metrics import read_json, write_atomically
from experiments.harness.report import SCHEMA, SHARES, markdown_table
from experiments.harness.statistics import Mean, mean

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
PUBLISHED = ROOT / "experiments" / "published.json"
REFERENCE = "softmax"

# The adviser gets the quality of a direction once there are so many tables of it: one task says
# little about others.
LEAST_TABLES = 3


@dataclasses.dataclass(frozen=True)
class Config:
    """Writes the report of all results in a folder."""

    results: Path = RESULTS  # a folder for each table, with summary.json and summary.md
    page: Path = ROOT / "docs" / "report.md"  # Markdown file to write
    images: Path = ROOT / "docs" / "images"  # folder for the figures
    # File for the quality of mechanisms, which `effattn.advise` reads.
    quality: Path = ROOT / "effattn" / "advice" / "quality.json"


@dataclasses.dataclass(frozen=True)
class Table:
    """Results of one comparison.

    Attributes:
      name: name of its folder.
      summary: content of `summary.json`.
    """

    name: str
    summary: Mapping[str, Any]

    @property
    def headline(self) -> str:
        return self.summary["headline"]

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return 1 if self.summary["more_is_better"] else -1

    @property
    def heading(self) -> str:
        columns = self.summary["columns"]
        return next(heading for heading, key in columns.items() if key == self.headline)

    def runs(self) -> dict[str, list[Mapping[str, Any]]]:
        """Returns the runs of each mechanism."""
        found: dict[str, list[Mapping[str, Any]]] = {}
        for run in self.summary["runs"]:
            found.setdefault(run["mechanism"], []).append(run)
        return found

    def sets(self) -> list[str]:
        """Returns the names of the held-out sets."""
        return list(self.summary["runs"][0]["held_out"])

    def measured(self, name: str) -> dict[str, Mean]:
        """Returns the headline of each mechanism on a held-out set."""
        return {
            mechanism: mean([run["held_out"][name][self.headline] for run in runs])
            for mechanism, runs in self.runs().items()
        }

    def shown(self, value: Mean) -> str:
        """Returns a mean and its interval as text."""
        unit, digits = (0.01, 1) if self.headline in SHARES else (1.0, 3)
        text = f"{value.value / unit:.{digits}f}"
        if value.half is not None:
            text += f" ± {value.half / unit:.{digits}f}"
        return text

    def ranked(self) -> list[str]:
        """Returns the mechanisms by the headline of the validation set, the best first."""
        values = self.measured(self.sets()[0])
        return sorted(values, key=lambda mechanism: -self.sign * values[mechanism].value)


def tables(folder: Path) -> list[Table]:
    """Returns the results of all comparisons that carry what made them, by name."""
    found = []
    for path in sorted(folder.glob("*/summary.json")):
        summary = read_json(path, (), f"delete {path.parent}, and make that table again")
        made = {"command", "config", "environment"} <= summary.keys()
        if summary.get("schema") == SCHEMA and "headline" in summary and made:
            found.append(Table(path.parent.name, summary))
    return found


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Returns the names that no other name beats in both numbers, of which more is better."""

    def beaten(name: str) -> bool:
        x, y = points[name]
        return any(
            (a >= x and b >= y) and (a > x or b > y)
            for other, (a, b) in points.items()
            if other != name
        )

    return sorted((name for name in points if not beaten(name)), key=lambda name: points[name])


def fronts(table: Table) -> dict[str, list[str]]:
    """Returns the Pareto fronts of quality against speed, training memory and decode state."""
    quality = {m: table.sign * v.value for m, v in table.measured(table.sets()[0]).items()}
    runs = {mechanism: of[0] for mechanism, of in table.runs().items()}
    speed = {m: mean([r["tokens_per_second"] for r in of]).value for m, of in table.runs().items()}
    costs: dict[str, dict[str, float]] = {
        "speed": speed,
        "training memory": {m: -run["temporary_bytes"] for m, run in runs.items()},
        "decode state": {m: -run["state_bytes"] for m, run in runs.items() if run["state_bytes"]},
    }
    return {
        name: front({m: (cost, quality[m]) for m, cost in of.items()})
        for name, of in costs.items()
        if len(of) > 1
    }


def published_of(table: Table, published: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the published number of each mechanism of a table, with the key of its source."""
    return {
        row["mechanism"]: f"{row['value']} [{row['source']}]"
        for row in published
        if table.name.endswith(row["table"])
    }


def disagreements(table: Table, published: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns sentences on pairs of mechanisms whose published order is not ours.

    Pairs whose intervals overlap here are left out, and so are numbers of different sources.
    """
    ours = table.measured(table.sets()[0])
    theirs = [r for r in published if table.name.endswith(r["table"]) and r["mechanism"] in ours]
    found = []
    for i, one in enumerate(theirs):
        for other in theirs[i + 1 :]:
            if one["source"] != other["source"] or one["value"] == other["value"]:
                continue
            here, there = ours[one["mechanism"]], ours[other["mechanism"]]
            apart = here.separates(there)
            same = (one["value"] > other["value"]) == (table.sign * (here.value - there.value) > 0)
            if apart and not same:
                found.append(
                    f"{table.name}: {one['source']} has {one['mechanism']} at {one['value']} and "
                    f"{other['mechanism']} at {other['value']}; here they have "
                    f"{table.shown(here)} and {table.shown(there)}."
                )
    return found


def quality(found: Sequence[Table]) -> dict[str, Any]:
    """Returns the scores relative to softmax attention, for `effattn.advise`.

    Only mechanisms by their plain name count: their options follow the length of the task.
    """
    results = []
    judged = [table for table in found if REFERENCE in table.runs()]
    for table in judged:
        same = [t for t in judged if t.summary["is_causal"] == table.summary["is_causal"]]
        if len(same) < LEAST_TABLES:
            continue
        values = table.measured(table.sets()[-1])
        reference = values[REFERENCE].value
        version = table.summary["environment"].get("effattn", "")
        for mechanism, of in values.items():
            if mechanism.isidentifier() and of.value and reference:
                ratio = of.value / reference if table.sign > 0 else reference / of.value
                results.append(
                    {
                        "mechanism": mechanism,
                        "task": table.name,
                        "is_causal": bool(table.summary["is_causal"]),
                        "relative": round(ratio, 4),
                        "source": f"experiments/results/{table.name} (effattn {version})",
                    }
                )
    return {"schema": 1, "results": results}


def section(table: Table, published: Sequence[Mapping[str, Any]], results: str) -> str:
    """Returns the part of the page on one table."""
    printed = published_of(table, published)
    names = table.sets()
    values = {name: table.measured(name) for name in names}
    header = ["mechanism", *names, *(["published"] if printed else [])]
    rows = [
        [
            m,
            *(table.shown(values[name][m]) for name in names),
            *([printed.get(m, "")] if printed else []),
        ]
        for m in table.ranked()
    ]
    seeds = {len(runs) for runs in table.runs().values()}
    unit = "%" if table.headline in SHARES else ""
    described = f"{table.heading} {unit}".strip()
    best = [f"{name}: {', '.join(of)}" for name, of in fronts(table).items()]
    environment = table.summary["environment"]
    parts = [
        f"## {table.name}",
        f"{table.summary['title']}. Shown is {described} on each held-out set: the mean of "
        f"{' or '.join(map(str, sorted(seeds)))} seed(s)"
        + (" ± half of its 95 % interval." if max(seeds) > 1 else "."),
        markdown_table(header, rows),
        f"Nothing else in this table is better in both quality and {{}}: {'; '.join(best)}.".format(
            "the cost named"
        ),
        f"`{table.summary['command']}` with effattn {environment.get('effattn', '?')} and jax "
        f"{environment['jax']} on {environment['device']}; [configuration and speeds]"
        f"({results}/{table.name}/summary.md). Task: {table.summary['reference']}",
    ]
    return "\n\n".join(parts)


def overview(found: Sequence[Table]) -> str:
    """Returns one row per mechanism with its headline in every table."""
    columns = {table.name: table.measured(table.sets()[0]) for table in found}
    names = sorted({m for of in columns.values() for m in of})
    rows = [
        [m, *(t.shown(columns[t.name][m]) if m in columns[t.name] else "" for t in found)]
        for m in names
    ]
    return markdown_table(["mechanism", *(table.name for table in found)], rows)


def draw(path: Path, found: Sequence[Table]) -> None:
    """Draws quality against the decode state and against speed, a row for each causal table."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from effattn.analysis.style import COLOURS

    shown = [t for t in found if any(run["state_bytes"] for run in t.summary["runs"])]
    if not shown:
        return
    figure, axes = plt.subplots(
        len(shown), 2, figsize=(10, 3.6 * len(shown)), layout="constrained", squeeze=False
    )
    for row, table in zip(axes, shown, strict=True):
        values = table.measured(table.sets()[0])
        unit = 0.01 if table.headline in SHARES else 1.0
        kinds = (
            ("decode state", "decode state (kB)", lambda run: (run["state_bytes"] or 0) / 1e3),
            ("speed", "training speed (thousand tokens/s)", lambda r: r["tokens_per_second"] / 1e3),
        )
        best = fronts(table)
        for axis, (kind, label, cost) in zip(row, kinds, strict=True):
            for mechanism, runs in table.runs().items():
                x, y = cost(runs[0]), values[mechanism].value / unit
                if x:
                    on_front = mechanism in best.get(kind, ())
                    axis.plot(x, y, "o", color=COLOURS[0] if on_front else "silver", markersize=5)
                    if on_front:
                        axis.annotate(
                            mechanism, (x, y), (3, 3), textcoords="offset points", fontsize=7
                        )
            axis.set(xscale="log", xlabel=label)
            axis.margins(x=0.15)
            for formatter in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
                formatter("{x:g}")
            axis.tick_params(axis="x", which="both", labelsize=8)
            axis.grid(alpha=0.3)
        row[0].set(ylabel=f"{table.name}\n{table.heading}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    figure.savefig(partial, dpi=150)
    plt.close(figure)
    partial.replace(path)


def write(config: Config) -> None:
    """Writes the page, its figure and the quality of mechanisms."""
    found = tables(config.results)
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    numbers, sources = published["numbers"], published["sources"]
    results = (
        Path("..") / config.results.relative_to(ROOT)
        if config.results.is_relative_to(ROOT)
        else config.results
    )
    figure = config.images / "report.png"
    draw(figure, found)
    differing = [line for table in found for line in disagreements(table, numbers)]
    parts = [
        "# Report",
        "All results in `experiments/results`, made by the commands below the tables. Intervals "
        "are over seeds, by Student's t distribution. This page is written by `make report`.",
        "## Overview",
        overview(found) if found else "There are no results yet.",
        "![Quality against decode state and speed; the Pareto fronts are named]"
        f"(images/{figure.name})",
        *(section(table, numbers, str(results)) for table in found),
        "## Where published results differ",
        "\n".join(f"- {line}" for line in differing)
        or "No pair of mechanisms whose intervals are apart has another order than published.",
        "## Published sources",
        "\n".join(f"- [{key}] {text}" for key, text in sources.items()),
    ]
    write_atomically(config.page, "\n\n".join(parts) + "\n")
    judged = quality(found)
    if judged["results"]:
        write_atomically(config.quality, json.dumps(judged, indent=1) + "\n")
    print(
        f"Wrote {config.page} from {len(found)} tables, and {len(judged['results'])} scores for "
        "effattn.advise."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    config = tyro.cli(Config, prog="python -m experiments.report", args=argv)
    return outcome.exit_status(lambda: write(config), "stopped; the same command starts again")


if __name__ == "__main__":
    sys.exit(main())
