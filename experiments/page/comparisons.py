"""Comparisons of trained models: numbers, Pareto fronts, and their sections of the page."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.harness.metrics import is_number
from experiments.harness.report import SHARES, comparable_with, markdown_table
from experiments.harness.statistics import Mean, front, mean
from experiments.page.published import Published
from experiments.page.results import Result, no_number

PERCENTAGES = SHARES | {"scaled_accuracy"}

# Speed and costs of a run: 1 if more is better, else -1; label of an axis; value, or None.
COSTS: Mapping[str, tuple[int, str, Callable[[Mapping[str, Any]], float | None]]] = {
    "speed": (
        1,
        "training speed (thousand tokens/s)",
        lambda run: run["tokens_per_second"] / 1e3,
    ),
    "training memory": (
        -1,
        "training memory (MB)",
        lambda run: run["temporary_bytes"] / 1e6,
    ),
    "decode state": (
        -1,
        "decode state (kB)",
        lambda run: None if run["state_bytes"] is None else run["state_bytes"] / 1e3,
    ),
    # Only some tasks count operations.
    "operations": (
        -1,
        "thousand operations per token",
        lambda run: run.get("operations"),
    ),
}


class Table(Result):
    """Result of a comparison."""

    def check_runs(self) -> None:
        """Raises `UserError` if a run is repeated, or has no number where the page needs one."""
        seen: set[tuple[str, int]] = set()
        for run in self.summary["runs"]:
            mechanism, seed = run["mechanism"], run["seed"]
            if (mechanism, seed) in seen:
                raise self.refused(f"has two runs of {mechanism} with seed {seed}")
            seen.add((mechanism, seed))
            numbers = {key: run[key] for key in ("tokens_per_second", "temporary_bytes")}
            for name, measures in run["held_out"].items():
                numbers[f"held_out.{name}.{self.headline}"] = measures[self.headline]
            for name, value in numbers.items():
                if not is_number(value):
                    raise self.refused(no_number(value, f"runs.{name}", mechanism))

    @property
    def task(self) -> str:
        """Name of the task, without its options; of the experiment if that has one task."""
        config = self.summary["config"]
        return str(config.get("task") or config.get("experiment", "")).partition(",")[0]

    @property
    def headline(self) -> str:
        return self.summary["headline"]

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return 1 if self.summary["more_is_better"] else -1

    @functools.cached_property
    def runs(self) -> dict[str, list[Mapping[str, Any]]]:
        """The runs of each mechanism, one per seed."""
        found: dict[str, list[Mapping[str, Any]]] = {}
        for run in self.summary["runs"]:
            found.setdefault(run["mechanism"], []).append(run)
        return found

    @property
    def sets(self) -> list[str]:
        """Names of the held-out sets; the first is for validation."""
        return list(self.summary["runs"][0]["held_out"])

    @property
    def seeds(self) -> str:
        """Number of seeds in words."""
        return in_seeds(sorted({len(runs) for runs in self.runs.values()}))

    def heading(self, measure: str | None = None) -> str:
        """Returns the name of a measure with its unit; default the headline."""
        measure = measure or self.headline
        columns = {key: heading for heading, key in self.summary["columns"].items()}
        return columns.get(measure, measure) + (" (%)" if measure in PERCENTAGES else "")

    def measured(self, name: str, measure: str | None = None) -> dict[str, Mean]:
        """Returns a measure of each mechanism on a held-out set; default the headline."""
        measure = measure or self.headline
        return {
            mechanism: mean([run["held_out"][name][measure] for run in runs])
            for mechanism, runs in self.runs.items()
        }

    def further(self) -> dict[str, dict[str, Mean]]:
        """Returns each known measure beside the headline, by mechanism, on the validation set."""
        found = {}
        for measure in self.summary["columns"].values():
            values = {m: [run[measure] for run in runs] for m, runs in self.runs.items()}
            if measure != self.headline and not any(None in of for of in values.values()):
                found[measure] = {mechanism: mean(of) for mechanism, of in values.items()}
        return found

    def shown(self, value: Mean, measure: str | None = None) -> str:
        """Returns a mean and half of its interval as text."""
        scale, digits = (100, 1) if (measure or self.headline) in PERCENTAGES else (1, 3)
        known = [part for part in value if part is not None]
        return " ± ".join(f"{part * scale:.{digits}f}" for part in known)

    def ranked(self) -> list[str]:
        """Returns the mechanisms by the headline of the validation set, the best first."""
        values = self.measured(self.sets[0])
        return sorted(values, key=lambda mechanism: -self.sign * values[mechanism].value)

    @property
    def incomparable(self) -> str | None:
        """Reason why the speeds cannot be compared, or None."""
        if self.summary.get("at_once", 1) > 1:
            return "several runs shared the machine"
        first = next(iter(self.runs))
        if comparable_with(first, self.summary["runs"], self.environment) < self.runs.keys():
            return "the runs were made in several environments"
        return None

    def costs(self, cost: str) -> dict[str, float]:
        """Returns a cost of each mechanism that has it, as a mean over seeds."""
        value = COSTS[cost][2]
        found = {
            mechanism: [known for run in runs if (known := value(run))]
            for mechanism, runs in self.runs.items()
        }
        return {m: mean(of).value for m, of in found.items() if len(of) == len(self.runs[m])}


def in_seeds(counts: Sequence[int]) -> str:
    """Returns numbers of seeds in words: "one seed", "3 seeds", "1 or 3 seeds"."""
    return "one seed" if list(counts) == [1] else f"{' or '.join(map(str, counts))} seeds"


def fronts(table: Table) -> dict[str, list[str]]:
    """Returns the Pareto front of quality and each cost, by cost.

    Costs that fewer than two mechanisms have, and speeds that cannot be compared, have none.
    """
    quality = {m: table.sign * v.value for m, v in table.measured(table.sets[0]).items()}
    found = {}
    for cost, (sign, _, _) in COSTS.items():
        costs = {} if cost == "speed" and table.incomparable else table.costs(cost)
        if len(costs) > 1:
            found[cost] = front({m: (sign * value, quality[m]) for m, value in costs.items()})
    return found


def section(table: Table, published: Published, results: str, image: str | None) -> str:
    """Returns the part of the page on one table.

    Args:
      table: the table.
      published: all published numbers.
      results: link to the folder of all results.
      image: link to the figure; None without figure.
    """
    columns = {
        name: [table.shown(value) for value in _in_order(table, table.measured(name))]
        for name in table.sets
    }
    for measure, values in table.further().items():
        ours = _in_order(table, values)
        columns[f"{table.sets[0]}: {table.heading(measure)}"] = [
            table.shown(value, measure) for value in ours
        ]
    cited = published.of(table)
    for source, numbers in cited:
        heading = table.heading(source.measure)
        if source.measure != table.headline:
            name = source.set_of(table)
            ours = _in_order(table, table.measured(name, source.measure))
            columns[f"{name}: {heading}"] = [table.shown(value, source.measure) for value in ours]
        columns[f"published {heading} [{source.key}]"] = [
            table.shown(Mean(numbers[m], None), source.measure) if m in numbers else ""
            for m in table.ranked()
        ]
    rows = [list(row) for row in zip(table.ranked(), *columns.values(), strict=True)]
    parts = [
        f"## {table.name}",
        f"{table.summary['title']}. {_sentence(table.heading())} on each held-out set: "
        + ("one seed." if table.seeds == "one seed" else f"mean of {table.seeds} ± half of its "
        "95 % interval."),
        markdown_table(["mechanism", *columns], rows),
    ]  # fmt: skip
    preset = table.summary["config"].get("preset", "published")
    if cited and preset != "published":
        parts.append(
            "The published models have the sizes that their source states, and the models here "
            f"those of the preset `{preset}`."
        )
    if left_out := table.summary.get("left_out"):
        parts.append(
            f"Mechanisms without a result, with reasons in the summary: {_listed(left_out)}."
        )
    if best := fronts(table):
        lists = "; ".join(f"{cost}: {_listed(names)}" for cost, names in best.items())
        parts.append(
            "Pareto fronts: in each list no mechanism of the table is better in both quality and "
            f"the named cost. {_sentence(lists)}."
        )
    if table.incomparable:
        parts.append(f"Speeds are not compared, because {table.incomparable}.")
    if image is not None:
        parts += [
            f"![Quality against costs in {table.name}]({image})",
            f"Each dot is a mechanism, as a mean over seeds, on the held-out set "
            f'"{table.sets[0]}". Blue dots with names are the Pareto front of the panel, and grey '
            "dots are all other mechanisms.",
        ]
    return "\n\n".join([*parts, table.made(results), f"Task: {table.summary['reference']}"])


def overview(tables: Sequence[Table]) -> str:
    """Returns, for each direction, one row per mechanism with its headline in every table."""
    parts = []
    for is_causal, direction in ((True, "Causal"), (False, "Bidirectional")):
        among = [table for table in tables if table.summary["is_causal"] == is_causal]
        columns = {f"{t.name}: {t.heading()}": (t, t.measured(t.sets[0])) for t in among}
        names = sorted({m for _, of in columns.values() for m in of})
        rows = [
            [m, *(t.shown(of[m]) if m in of else "" for t, of in columns.values())] for m in names
        ]
        if rows:
            parts += [f"{direction} mechanisms:", markdown_table(["mechanism", *columns], rows)]
    return "\n\n".join(parts)


def _in_order(table: Table, values: Mapping[str, Mean]) -> list[Mean]:
    return [values[mechanism] for mechanism in table.ranked()]


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
