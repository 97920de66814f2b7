"""Report of a comparison: `summary.json`, `summary.md` and the text on the screen."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common import machine
from experiments.common.comparison import Comparison
from experiments.common.errors import UserError
from experiments.common.metrics import read_json, write_atomically
from experiments.common.objectives import Words

Row = dict[str, Any]


def summarise(comparison: Comparison) -> list[Row]:
    """Returns one row per mechanism, with means and standard deviations over the seeds.

    A mean perplexity is None if the perplexity of any seed overflows a float.
    """
    rows: dict[str, Row] = {}
    for mechanism in dict.fromkeys(run["mechanism"] for run in comparison.runs):
        runs = [run for run in comparison.runs if run["mechanism"] == mechanism]
        bits = [run["bits_per_byte"] for run in runs]
        perplexities = [run["perplexity"] for run in runs]
        words = [run["word_perplexity"] for run in runs]
        rows[mechanism] = {
            "mechanism": mechanism,
            "bits_per_byte": statistics.fmean(bits),
            "bits_per_byte_std": _deviation(bits),
            "perplexity": _mean(perplexities),
            "perplexity_std": _deviation(perplexities),
            "word_perplexity": _mean(words),
            "tokens_per_second": statistics.fmean(run["tokens_per_second"] for run in runs),
            "seeds": [run["seed"] for run in runs],
        }
        for key in ("parameters", "temporary_bytes", "state_bytes", "learning_rate", "tokens"):
            rows[mechanism][key] = runs[0][key]
    return list(rows.values())


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table with aligned columns."""
    columns = {
        "mechanism": lambda row: row["mechanism"],
        "bits/byte": lambda row: _spread(row["bits_per_byte"], row["bits_per_byte_std"]),
        "perplexity": lambda row: _spread(row["perplexity"], row["perplexity_std"]),
        "word perplexity": lambda row: _number(row["word_perplexity"], 1),
        "parameters": lambda row: f"{row['parameters']:,}",
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "step temporaries": lambda row: f"{row['temporary_bytes'] / 1e6:,.1f} MB",
        "decode state": lambda row: (
            "-" if row["state_bytes"] is None else f"{row['state_bytes'] / 1e3:,.1f} kB"
        ),
        "learning rate": lambda row: f"{row['learning_rate']:g}",
    }
    if all(row["word_perplexity"] is None for row in rows):
        del columns["word perplexity"]
    if all(row["state_bytes"] is None for row in rows):
        del columns["decode state"]
    return markdown_table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


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
    folder: Path, comparison: Comparison, settings: dict[str, Any], words: Words
) -> None:
    """Writes `summary.json` and, last of all, `summary.md` into the run folder."""
    summary = {
        "config": settings,
        "environment": machine.environment(),
        "at_once": comparison.at_once,
        "mechanisms": summarise(comparison),
        "runs": comparison.runs,
        "sweep": comparison.sweep,
    }
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_atomically(folder / "summary.md", _markdown(summary, words))


def finished(folder: Path) -> bool:
    """Returns whether the report of this run folder was written."""
    return (folder / "summary.md").is_file()


def read_report(folder: Path, words: Words) -> str:
    """Returns the text to print for a finished run: table, and one sample per mechanism."""
    summary = _read_summary(folder)
    parts = []
    for run in summary["runs"]:
        if run["seed"] == summary["runs"][0]["seed"]:
            parts.append(f"{run['mechanism']} {words.sample}:\n{_sample(run)}")
    prompt = f"{words.prompt}:\n{_quoted(summary['runs'][0]['prompt'])}"
    files = f"In {folder}: summary.md, summary.json, loss.png, config.json and one folder per run."
    shown = table(summary["mechanisms"])
    return "\n\n".join([prompt, *parts, shown, *_on_speeds(summary), files])


def _read_summary(folder: Path) -> dict[str, Any]:
    path, markdown = folder / "summary.json", folder / "summary.md"
    remedy = f"delete {markdown}, and the same command writes both again"
    if not path.is_file():
        raise UserError(f"{path} is gone; {remedy}")
    return read_json(path, ("mechanisms", "runs"), remedy)


def _on_speeds(summary: dict[str, Any]) -> list[str]:
    at_once = summary.get("at_once", 1)  # older summaries do not say: it was one
    if at_once == 1:
        return []
    return [
        f"Up to {at_once} runs shared the machine at a time; each speed is that of one run among"
        " them."
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    # `statistics.mean` sums in fractions: a sum of floats may overflow.
    known = [value for value in values if value is not None]
    return statistics.mean(known) if len(known) == len(values) else None


def _deviation(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) == len(values) > 1 else None


def _spread(mean: float | None, deviation: float | None) -> str:
    return _number(mean) if deviation is None else f"{_number(mean)} ± {_number(deviation)}"


def _number(value: float | None, digits: int = 3) -> str:
    """Returns the value as text with `digits` decimals; large values are in scientific notation."""
    if value is None:
        return "infinite"
    return f"{value:.{digits}f}" if value < 1e6 else f"{value:.{digits}e}"


def _markdown(summary: dict[str, Any], words: Words) -> str:
    rows, runs = summary["mechanisms"], summary["runs"]
    config = ", ".join(f"{key} {_plain(value)}" for key, value in summary["config"].items())
    machine = ", ".join(f"{key} {value}" for key, value in summary["environment"].items())
    parts = [
        f"# {words.title}",
        table(rows),
        f"Means over {len(rows[0]['seeds'])} seed(s), ± the standard deviation between them, after "
        f"{rows[0]['tokens']:,} tokens in the same order. {words.measured} Step temporaries are the"
        " memory of the compiled training step without its arguments and results, as XLA reports.",
        *_on_speeds(summary),
    ]
    counts = [row["parameters"] for row in rows]
    if max(counts) > 1.01 * min(counts):
        parts.append("**The models differ in their numbers of parameters.**")
    elif len(rows) > 1 and summary["config"]["equal_parameters"]:
        parts.append("Feed-forward widths give all models the same number of parameters.")
    parts.append("![Validation losses](loss.png)")
    if summary["sweep"]:
        swept = [
            [run["mechanism"], f"{run['learning_rate']:g}", _number(run["bits_per_byte"])]
            for run in summary["sweep"]
        ]
        parts += [
            "## Learning rates tried",
            markdown_table(["mechanism", "learning rate", "bits/byte"], swept),
            "Each mechanism's best rate was chosen on the same held-out windows as in the table.",
        ]
    parts += ["## Configuration", config + ".", machine + ".", "## Samples"]
    parts.append(f"{words.prompt}:\n\n{_quoted(runs[0]['prompt'])}")
    for run in runs:
        parts.append(f"### {run['mechanism']}, seed {run['seed']}\n\n{_sample(run)}")
    return "\n\n".join(parts) + "\n"


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _sample(run: Row) -> str:
    return "(none: the model does not decode)" if run["sample"] is None else _quoted(run["sample"])


def _quoted(text: str) -> str:
    # A model that has hardly learnt writes control characters, which must not reach a terminal.
    lines = ["".join(c if c.isprintable() else "\ufffd" for c in line) for line in text.split("\n")]
    return "\n".join("    " + line for line in lines)
