"""Report of a comparison: `summary.json`, `summary.md` and the text on the screen."""

import json
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.harness import machine
from experiments.harness.comparison import Comparison
from experiments.harness.errors import UserError
from experiments.harness.metrics import is_measure, is_number, read_json, write_atomically
from experiments.harness.naming import REFERENCE

if TYPE_CHECKING:
    from experiments.tasks.task import Task

Row = dict[str, Any]

# Version of the keys of `summary.json`, of all experiments.
SCHEMA = 2


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_tree(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and bool(value) and is_measure(value)


# Keys of a result, with the conditions on their values, beside the measures of its task.
OF_RUN: Mapping[str, Callable[[Any], bool]] = {
    "mechanism": _is_text,
    "seed": _is_whole,
    "learning_rate": is_number,
    "loss": is_measure,
    "held_out": _is_tree(dict),
    "tokens": is_number,
    "tokens_per_second": is_number,
    "parameters": is_number,
    "state_bytes": lambda value: value is None or is_number(value),
    "temporary_bytes": is_number,
    "curve": _is_tree(list),
}
_OF_ROW = {key: OF_RUN[key] for key in OF_RUN if key not in ("seed", "loss", "curve")}

# These measures are shown as percentages.
SHARES = frozenset({"accuracy", "exact", "near", "far", "near_exact_share", "far_exact_share"})


def summarise(comparison: Comparison, columns: Mapping[str, str], headline: str) -> list[Row]:
    """Returns one row per mechanism, with means and standard deviations over the seeds.

    A mean is None if the value of any seed is None, as is a perplexity that overflows a float.

    Args:
      comparison: results.
      columns: keys of the measures in the table, by heading.
      headline: key of the measure that is also shown for every held-out set.
    """
    rows: dict[str, Row] = {}
    for mechanism in dict.fromkeys(run["mechanism"] for run in comparison.runs):
        runs = [run for run in comparison.runs if run["mechanism"] == mechanism]
        row: Row = {"mechanism": mechanism}
        for key in columns.values():
            row[key], row[f"{key}_std"] = _spread_of([run[key] for run in runs])
        row["held_out"] = {
            name: _spread_of([run["held_out"][name][headline] for run in runs])
            for name in runs[0]["held_out"]
        }
        row["tokens_per_second"] = statistics.fmean(run["tokens_per_second"] for run in runs)
        row["seeds"] = [run["seed"] for run in runs]
        if "expert_load" in runs[0]:
            for key in ("expert_load", "expert_dropped"):
                row[key] = np.mean([run[key] for run in runs], 0).tolist()
        for key in ("parameters", "temporary_bytes", "state_bytes", "learning_rate", "tokens"):
            row[key] = runs[0][key]
        rows[mechanism] = row
    return list(rows.values())


def table(summary: Mapping[str, Any]) -> str:
    """Returns the rows of a summary as a Markdown table with aligned columns."""
    rows = summary["mechanisms"]
    measures = {
        heading: key
        for heading, key in summary["columns"].items()
        if any(row[key] is not None for row in rows) or key == summary["headline"]
    }

    def measured(row: Row) -> list[str]:
        return [
            _spread(key, row[key], row[f"{key}_std"], digits=1 if "word" in key else 3)
            for key in measures.values()
        ]

    columns = {
        "parameters": lambda row: f"{row['parameters']:,}",
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "step temporaries": lambda row: f"{row['temporary_bytes'] / 1e6:,.1f} MB",
        "decode state": lambda row: (
            "-" if row["state_bytes"] is None else f"{row['state_bytes'] / 1e3:,.1f} kB"
        ),
        "learning rate": lambda row: f"{row['learning_rate']:g}",
    }
    if all(row["state_bytes"] is None for row in rows):
        del columns["decode state"]
    if any("expert_load" in row for row in rows):
        columns |= {"expert load": _load, "dropped": _dropped}
    cells = [
        [row["mechanism"], *measured(row), *(cell(row) for cell in columns.values())]
        for row in rows
    ]
    return markdown_table(["mechanism", *measures, *columns], cells)


def _load(row: Row) -> str:
    if "expert_load" not in row:
        return "-"
    low, high = (100 * edge(row["expert_load"]) for edge in (np.min, np.max))
    return f"{low:.1f} to {high:.1f} %"


def _dropped(row: Row) -> str:
    return f"{100 * np.mean(row['expert_dropped']):.1f} %" if "expert_dropped" in row else "-"


def sets_table(summary: Mapping[str, Any]) -> str | None:
    """Returns the headline on every held-out set as a Markdown table; None for one set alone."""
    rows, headline = summary["mechanisms"], summary["headline"]
    names = list(rows[0]["held_out"])
    if len(names) == 1:
        return None
    cells = [
        [row["mechanism"], *(_spread(headline, *row["held_out"][name]) for name in names)]
        for row in rows
    ]
    return markdown_table(["mechanism", *names], cells)


def relative_table(summary: Mapping[str, Any]) -> str | None:
    """Returns training speed and memory relative to softmax attention as a Markdown table.

    Returns:
      None if softmax attention is not compared with anything.
    """
    rows = {row["mechanism"]: row for row in summary["mechanisms"]}
    reference = rows.get(REFERENCE)
    if reference is None or len(rows) == 1:
        return None
    comparable = comparable_with(REFERENCE, summary["runs"], summary.get("environment"))

    def speed(name: str, row: Mapping[str, Any]) -> str:
        if name not in comparable:
            return "-"
        return f"{row['tokens_per_second'] / reference['tokens_per_second']:.2f}"

    cells = [
        [name, speed(name, row), f"{row['temporary_bytes'] / reference['temporary_bytes']:.2f}"]
        for name, row in rows.items()
    ]
    found = markdown_table(["mechanism", "training speed", "step temporaries"], cells)
    if all(cell != "-" for _, cell, _ in cells):
        return found
    note = f"A dash: made in another environment than {REFERENCE}, so the speeds do not compare."
    return f"{found}\n\n{note}"


def comparable_with(
    mechanism: str, runs: Sequence[Mapping[str, Any]], here: Mapping[str, str] | None = None
) -> frozenset[str]:
    """Returns the mechanisms whose training speeds can be compared with that of `mechanism`.

    Seed by seed, the environments of their runs are equal, apart from the commit. `here` is the
    environment of runs without an entry "environment".
    """
    made_by: dict[str, list[Any]] = {}
    for run in runs:
        where = run.get("environment", here) or {}
        machine = {key: value for key, value in where.items() if key != "commit"}
        made_by.setdefault(run["mechanism"], []).append(machine)
    return frozenset(name for name, made in made_by.items() if made == made_by[mechanism])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table in aligned columns; all but the first are aligned right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def write_report(
    folder: Path, comparison: Comparison, settings: dict[str, Any], task: "Task", command: str
) -> None:
    """Writes `summary.json` into the run folder.

    It removes an earlier `summary.md`, so that the report is unfinished until `finish`.
    """
    (folder / "summary.md").unlink(missing_ok=True)
    # Speeds of runs that an earlier report shows may be those of more runs at a time.
    at_once = max(comparison.at_once, _earlier_at_once(folder))
    summary = {
        "schema": SCHEMA,
        "title": task.title or f"{type(task).__name__}: mechanisms compared",
        "command": command,
        "is_causal": settings.get("side", "decoder") == "decoder" and task.is_causal,
        "reference": task.reference,
        "explained": task.explained,
        "columns": dict(task.columns),
        "headline": task.headline,
        "more_is_better": task.more_is_better,
        "prompted": task.prompted,
        "answered": task.answered,
        "config": settings,
        "environment": machine.environment(),
        "at_once": at_once,
        "mechanisms": summarise(comparison, task.columns, task.headline),
        "runs": comparison.runs,
        "sweep": comparison.sweep,
        # Later commands may compare these again, also where the folders of the runs are gone.
        "others": comparison.others,
        "left_out": comparison.left_out,
    }
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")


def finish(folder: Path) -> None:
    """Writes `summary.md`, last of all, from `summary.json`."""
    write_atomically(folder / "summary.md", _markdown(_read_summary(folder)))


def finished(folder: Path, settings: dict[str, Any], optional: Collection[str] = ()) -> bool:
    """Returns whether the report of these settings was written.

    A report of other mechanisms, seeds or learning rates does not count; runs that it shares with
    these settings are not trained again.

    Args:
      folder: run folder.
      settings: settings of the folder and of its runs.
      optional: mechanisms that the report may have left out.
    """
    if not (folder / "summary.md").is_file():
        return False
    summary = _read_summary(folder, ("config",))
    lacking = summary.get("left_out", {}).keys() & set(optional)
    wanted = json.loads(json.dumps(settings))
    if lacking:
        wanted["mechanisms"] = [m for m in wanted["mechanisms"] if m not in lacking]
    return summary["config"] == wanted


def earlier_runs(folder: Path) -> list[Row]:
    """Returns all results that an earlier report in the folder shows or keeps."""
    if not (folder / "summary.json").is_file():
        return []
    summary = _read_summary(folder)
    return [*summary["sweep"], *summary["runs"], *summary.get("others", ())]


def _earlier_at_once(folder: Path) -> int:
    if not (folder / "summary.json").is_file():
        return 1
    return _read_summary(folder, ("at_once",))["at_once"]


def read_report(folder: Path) -> str:
    """Returns the text to print for a finished run: tables, and one sample per mechanism."""
    summary = _read_summary(folder)
    runs = summary["runs"]
    parts = []
    if "sample" in runs[0]:
        parts.append(f"{summary['prompted']}:\n{_quoted(runs[0]['prompt'])}")
        for run in runs:
            if run["seed"] == runs[0]["seed"]:
                parts.append(f"{run['mechanism']} {summary['answered']}:\n{_sample(run)}")
    shown = filter(None, (table(summary), sets_table(summary)))
    files = f"In {folder}: summary.md, summary.json, figures, config.json and one folder per run."
    return "\n\n".join([*parts, *shown, *_on_speeds(summary), files])


def write(folder: Path, summary: Mapping[str, Any], text: str) -> None:
    """Writes `summary.json`, and then `summary.md`, which marks the results as finished."""
    (folder / "summary.md").unlink(missing_ok=True)
    content = {"schema": SCHEMA, **summary}
    write_atomically(folder / "summary.json", json.dumps(content, indent=2) + "\n")
    write_atomically(folder / "summary.md", text + "\n")


def read_markdown(folder: Path, files: str) -> str:
    """Returns the text to print for finished results: `summary.md`, and what is in the folder."""
    text = (folder / "summary.md").read_text(encoding="utf-8")
    return f"{text}\nIn {folder}: summary.md, summary.json, {files}."


def _read_summary(
    folder: Path,
    keys: tuple[str, ...] = ("schema", "mechanisms", "runs", "sweep", "config", "headline"),
) -> dict[str, Any]:
    path, markdown = folder / "summary.json", folder / "summary.md"
    remedy = f"delete {markdown}, and the same command writes both again"
    if not path.is_file():
        raise UserError(f"{path} is gone; {remedy}")
    again = f"delete it and {markdown}; the same command writes both again"
    of_rows = {"mechanisms": _OF_ROW, "runs": OF_RUN, "sweep": OF_RUN}
    rows = {key: of_rows[key] for key in keys if key in of_rows}
    found = read_json(path, keys, again, rows)
    if found.get("schema", SCHEMA) != SCHEMA:
        raise UserError(
            f"{path} has version {found['schema']} of the results, and this program reads version "
            f"{SCHEMA}; choose another --output, or delete {folder} to start over"
        )
    return found


def configuration(summary: Mapping[str, Any]) -> list[str]:
    """Returns paragraphs on what made the results: command, configuration and environment."""

    def plain(value: Any) -> str:
        return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)

    def listed(values: Mapping[str, Any]) -> str:
        return ", ".join(f"{key} {plain(value)}" for key, value in values.items())

    here: Mapping[str, str] = summary["environment"]
    earlier: dict[str, list[str]] = {}
    for run in summary.get("runs", ()):
        there = run.get("environment", here)
        if there != here:
            name = f"{run['mechanism']} with seed {run['seed']}"
            earlier.setdefault(listed(there), []).append(name)
    texts = [listed(summary["config"]), listed(here)]
    texts += [f"Made earlier, with {there}: {', '.join(of)}" for there, of in earlier.items()]
    return ["## Configuration", f"`{summary['command']}`", *(f"{text}." for text in texts)]


def on_left_out(summary: Mapping[str, Any]) -> list[str]:
    """Returns paragraphs on the mechanisms that have no results, if there are some."""
    reasons = [f"- {name}: {reason}" for name, reason in summary.get("left_out", {}).items()]
    return ["Left out:", "\n".join(reasons)] if reasons else []


def _on_speeds(summary: dict[str, Any]) -> list[str]:
    at_once = summary["at_once"]
    if at_once == 1:
        return []
    return [
        f"Up to {at_once} runs shared the machine at a time; each speed is that of one run among"
        " them."
    ]


def _spread_of(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Returns the mean and the standard deviation; None where they are unknown."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None, None
    # `statistics.mean` sums in fractions: a sum of floats may overflow.
    return statistics.mean(known), statistics.stdev(known) if len(known) > 1 else None


def _spread(key: str, mean: float | None, deviation: float | None, digits: int = 3) -> str:
    if key in SHARES and mean is not None:
        share = f"{100 * mean:.1f}"
        return f"{share} %" if deviation is None else f"{share} ± {100 * deviation:.1f} %"
    if deviation is None:
        return _number(mean, digits)
    return f"{_number(mean, digits)} ± {_number(deviation, digits)}"


def _number(value: float | None, digits: int = 3) -> str:
    """Returns the value as text with `digits` decimals; large values are in scientific notation."""
    if value is None:
        return "infinite"
    return f"{value:.{digits}f}" if value < 1e6 else f"{value:.{digits}e}"


def _markdown(summary: dict[str, Any]) -> str:
    rows, runs = summary["mechanisms"], summary["runs"]
    parts = [
        f"# {summary['title']}",
        table(summary),
        f"{_seeds(len(rows[0]['seeds']))} after {rows[0]['tokens']:,} tokens in the same order. "
        f"{summary['explained']} Step temporaries are the memory of the compiled training step "
        "without its arguments and results, as XLA reports.",
        *_on_speeds(summary),
    ]
    if any(row["state_bytes"] for row in rows):
        parts.append("The decode state is that of one row at the length of the validation set.")
    if any("expert_load" in row for row in rows):
        parts.append(
            "The expert load is the least and the largest share of the choices of tokens that fall "
            "on an expert of a layer, on the validation set. Dropped choices are those for which "
            "the expert has no slot."
        )
    counts = [row["parameters"] for row in rows]
    if max(counts) > 1.01 * min(counts):
        parts.append("**The models differ in their numbers of parameters.**")
    elif len(rows) > 1 and summary["config"]["equal_parameters"]:
        parts.append("Feed-forward widths give all models the same number of parameters.")
    by_set = sets_table(summary)
    if by_set is not None:
        heading = summary["headline"].replace("_", " ")
        parts += [f"## Held-out sets: {heading}", by_set]
    relative = relative_table(summary)
    if relative is not None:
        parts += [f"## Relative to {REFERENCE}", relative]
    parts += on_left_out(summary)
    parts.append("![Results](results.png)")
    if summary["sweep"]:
        swept = [
            [
                run["mechanism"],
                f"{run['learning_rate']:g}",
                _spread(summary["headline"], run[summary["headline"]], None),
            ]
            for run in summary["sweep"]
        ]
        heading = next(h for h, key in summary["columns"].items() if key == summary["headline"])
        parts += [
            "## Learning rates tried",
            markdown_table(["mechanism", "learning rate", heading], swept),
            "Each mechanism's best rate was chosen on the validation set, with the first seed.",
        ]
    parts += ["## Task", summary["reference"], *configuration(summary)]
    if "sample" in runs[0]:
        parts.append(f"## Samples\n\n{summary['prompted']}:\n\n{_quoted(runs[0]['prompt'])}")
        for run in runs:
            parts.append(f"### {run['mechanism']}, seed {run['seed']}\n\n{_sample(run)}")
    return "\n\n".join(parts) + "\n"


def _seeds(count: int) -> str:
    if count == 1:
        return "One seed,"
    return f"Means over {count} seeds, ± the standard deviation between them,"


def _sample(run: Row) -> str:
    return "(none: the model does not decode)" if run["sample"] is None else _quoted(run["sample"])


def _quoted(text: str) -> str:
    # A model that has hardly learnt writes control characters, which must not reach a terminal.
    lines = ["".join(c if c.isprintable() else "\ufffd" for c in line) for line in text.split("\n")]
    return "\n".join("    " + line for line in lines)
