"""Sections of the page on results that are no comparisons of trained models."""

from collections.abc import Callable, Mapping
from typing import Any

from experiments.harness.report import markdown_table
from experiments.harness.statistics import mean
from experiments.page.results import Result

NONE = "-"

Summary = Mapping[str, Any]


def section(result: Result, results: str) -> str:
    """Returns the part of the page on one result; `results` is a link to the folder of all."""
    parts = _CONTENTS[str(result.kind)](result.summary)
    return "\n\n".join([f"## {result.name}", *parts, result.made(results)])


def _pivot(first: str, cells: Mapping[tuple[str, str], str]) -> str:
    """Returns a table of cells by row and column, under a heading of the first column."""
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    found = [[row, *(cells.get((row, column), NONE) for column in columns)] for row in rows]
    return markdown_table([first, *columns], found)


def _approximation(summary: Summary) -> list[str]:
    source = summary["errors"][-1]["source"]
    cells = {
        (record["family"], f"size {record['size']}"): f"{mean(record['output']).value:.3f}"
        for record in sorted(summary["errors"], key=lambda record: record["size"])
        if record["source"] == source and record["output"] is not None
    }
    return [
        "Relative error of the output of approximations of softmax attention, as a mean over "
        f"sequences of {summary['config']['length']} tokens, heads and layers. Queries, keys and "
        f"values: {source}. The size counts landmarks, features, keys of a query and so on.",
        _pivot("approximation", cells),
    ]


def _downstream(summary: Summary) -> list[str]:
    cells = {
        (record["family"], f"{record['task']}, size {record['size']}"): f"{record['kept']:.3f}"
        for record in sorted(summary["records"], key=lambda r: (r["task"], r["size"]))
    }
    explained = {
        "similarity": "Similarity: rank correlation of the similarities of texts "
        "(all-MiniLM-L6-v2).",
        "atoms": "Atoms: share of atoms with the same map (rxnmapper).",
    }
    tasks = dict.fromkeys(record["task"] for record in summary["records"])
    return [
        "Agreement of pretrained encoders with themselves once an approximation replaces softmax "
        "attention in all layers, without further training; 1 is full agreement. "
        f"{' '.join(explained[task] for task in tasks)} "
        "The size counts landmarks, features, keys of a query and so on.",
        _pivot("approximation", cells),
    ]


def _compress(summary: Summary) -> list[str]:
    from experiments.compress import table

    return [
        f"Validation {summary['heading']} of a trained language model and of compressed forms of "
        "it, as they are and after further training; means over seeds, ± half of the 95 % "
        "interval.",
        table(summary),
    ]


def _efficiency(summary: Summary) -> list[str]:
    # Imported late, as it imports JAX.
    from experiments.costs.layers import Workload
    from experiments.costs.tables import Results, crossovers

    keys = ("layers", "longest", "caches", "plain", "memory")
    workload = Workload(**summary["workload"])
    measured = Results(**{key: summary[key] for key in keys}, workload=workload)
    tables = [(f"Layers, {d}:", crossovers(measured, d)) for d in measured.directions()]
    text = (
        "Lengths in tokens from which on a layer takes less time (forward pass, forward + "
        "backward, training step), or fewer bytes, than a layer of exact softmax attention; "
        f"{NONE} if it does not at any measured length. Layers and batches: {workload}."
    )
    if measured.longest:
        size = summary["memory"] / 1e9
        text += f" The last columns have the longest sequences that fit into {size:.1f} GB."
    return [
        text,
        *(part for table in tables for part in table),
    ]


def _scaling(summary: Summary) -> list[str]:
    from experiments.scaling import ON_BOUNDS, text_of, with_interval

    rows = []
    for mechanism, fit in summary["fits"].items():
        law, share = fit["chinchilla"], fit["optimal_parameters"]
        values = [text_of(law, name) for name in ("alpha", "beta", "log E")]
        rows.append([mechanism, *values, with_interval(share["value"], share["interval"])])
    header = ["mechanism", "alpha", "beta", "E (nats per token)", "exponent of compute"]
    return [
        f"Fits of L = E + A / N^alpha + B / D^beta to the losses L of {len(summary['points'])} "
        "language models, with N parameters and D training tokens. The best N grows as compute to "
        "the power in the last column. In brackets: 95 % intervals over resampled pairs of N "
        f"and D, each with all its seeds. {ON_BOUNDS}",
        markdown_table(header, rows),
    ]


def _finetune(summary: Summary) -> list[str]:
    config, headline = summary["config"], summary["headline"]

    def text(way: str, mechanism: str, value: Callable[[Summary], float]) -> str:
        key = way, mechanism
        values = [value(r) for r in summary["runs"] if (r["way"], r["mechanism"]) == key]
        if not values:
            return NONE
        return str(mean(values))

    def last(run: Summary) -> float:
        return run[headline]

    rows = [
        [
            mechanism,
            way,
            text(way, mechanism, lambda run: run["curve"][0][headline]),
            text(way, mechanism, last),
            text("scratch", mechanism, last),
        ]
        for mechanism in config["mechanisms"]
        for way in config["ways"]
    ]
    (reference,) = {run["mechanism"] for run in summary["runs"] if run["way"] == "original"}
    original, scratch = (text(way, reference, last) for way in ("original", "scratch"))
    header = ["mechanism", "way", "before recovery", "after recovery", "from scratch"]
    return [
        f"Validation {summary['heading']} of a trained language model whose softmax attention is "
        "replaced by another mechanism, before and after the training that recovers it; means "
        "over seeds, ± half of the 95 % interval. The last column has models that were trained "
        "from scratch, on as many tokens in total.",
        markdown_table(header, [[reference, "original", NONE, original, scratch], *rows]),
    ]


_CONTENTS: Mapping[str, Callable[[Summary], list[str]]] = {
    "approximation": _approximation,
    "compress": _compress,
    "downstream": _downstream,
    "efficiency": _efficiency,
    "finetune": _finetune,
    "scaling": _scaling,
}
