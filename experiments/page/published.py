"""Published numbers beside the tables, and where their order differs."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.harness.statistics import Mean

if TYPE_CHECKING:
    from experiments.page.comparisons import Table


@dataclasses.dataclass(frozen=True)
class Source:
    """Publication.

    Attributes:
      key: short name.
      text: title, place and conditions of the numbers.
      measure: key of the measure that the publication prints.
      scale: the publication prints our values times this number.
      held_out: held-out set that corresponds to the published one, "first" or "last".
    """

    key: str
    text: str
    measure: str
    scale: float
    held_out: str

    def set_of(self, table: "Table") -> str:
        """Returns the name of the table's held-out set that corresponds to the published one."""
        return table.sets[{"first": 0, "last": -1}[self.held_out]]


@dataclasses.dataclass(frozen=True)
class Published:
    """Published numbers.

    Attributes:
      sources: publications by key.
      numbers: records with task, mechanism, value as printed, and key of the source.
    """

    sources: dict[str, Source]
    numbers: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> "Published":
        content = json.loads(path.read_text(encoding="utf-8"))
        sources = {key: Source(key, **of) for key, of in content["sources"].items()}
        return cls(sources, content["numbers"])

    def of(self, table: "Table") -> list[tuple[Source, dict[str, float]]]:
        """Returns the sources on the task of a table, with their values for its mechanisms.

        The values are on the scale of our results. Sources of measures that the table lacks are
        left out.
        """
        found = []
        for source in self.sources.values():
            values = {
                row["mechanism"]: row["value"] / source.scale
                for row in self.numbers
                if (row["task"], row["source"]) == (table.task, source.key)
                and row["mechanism"] in table.runs
            }
            measures = table.summary["runs"][0]["held_out"][source.set_of(table)]
            if values and source.measure in measures:
                found.append((source, values))
        return found


def disagreements(table: "Table", published: Published) -> tuple[int, list[str]]:
    """Returns the number of compared pairs of mechanisms, and sentences on those that differ.

    Pairs are compared in the measure of a source if their intervals are apart here and the source
    prints different values.
    """
    compared, found = 0, []
    for source, theirs in published.of(table):
        ours = table.measured(source.set_of(table), source.measure)
        for one, other in itertools.combinations(sorted(theirs), 2):
            gap = theirs[one] - theirs[other]
            if not gap or not ours[one].separates(ours[other]):
                continue
            compared += 1
            if (gap > 0) != (ours[one].value > ours[other].value):
                both = " and ".join(
                    f"`{m}` {table.shown(Mean(theirs[m], None), source.measure)} (here "
                    f"{table.shown(ours[m], source.measure)})"
                    for m in (one, other)
                )
                heading = table.heading(source.measure)
                found.append(f"{table.name}, {heading}: [{source.key}] has {both}.")
    return compared, found


def sections(tables: Sequence["Table"], published: Published) -> list[str]:
    """Returns the parts of the page on differing orders, and on the sources that it cites."""
    cited = {source.key: source for table in tables for source, _ in published.of(table)}
    compared, lines = 0, []
    for table in tables:
        count, differing = disagreements(table, published)
        compared += count
        lines += differing
    if not compared:
        verdict = (
            "No published order could be compared yet: that takes two mechanisms of one source "
            "whose 95 % intervals are apart here."
        )
    else:
        verdict = (
            "Pairs of mechanisms are compared if their 95 % intervals are apart here. Pairs "
            f"compared: {compared}. Pairs whose published order is the other way round: "
            f"{len(lines)}."
        )
    parts = ["## Where published results differ", verdict]
    if lines:
        parts.append("\n".join(f"- {line}" for line in lines))
    if cited:
        texts = (f"- [{key}] {source.text}" for key, source in cited.items())
        parts += ["## Published sources", "\n".join(texts)]
    return parts
