"""Scores of mechanisms on the tasks of all tables, for `effattn.advise`."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from effattn.advice import quality
from experiments.page.comparisons import Table

# A table counts if it has at least `LEAST_MECHANISMS` without options, as the best of a few may be
# weak. A mechanism gets its scores if it is in at least `LEAST_TABLES` such tables of a direction,
# as one task says little about others.
LEAST_MECHANISMS, LEAST_TABLES = 12, 3

# Tasks without scores: in mad-compression attention may look the tokens up, where a recurrence must
# keep them in its state; in mad-memorisation all mechanisms score alike.
WITHOUT_JUDGEMENT = frozenset({"mad-compression", "mad-memorisation"})

# Accuracy that is 0 for random guesses and 1 for right answers, where a task has it.
SCALED = "scaled_accuracy"


def scores(tables: Sequence[Table]) -> dict[str, Any]:
    """Returns the content of `quality.json`.

    Only mechanisms by their plain name count, as options follow the length of the task.
    """
    found = []
    for is_causal in (True, False):
        of_direction = [
            table
            for table in tables
            if bool(table.summary["is_causal"]) == is_causal and table.task not in WITHOUT_JUDGEMENT
        ]
        of_each = [(table, of_plain_names(table)) for table in of_direction]
        of_tables = [(table, of) for table, of in of_each if len(of) >= LEAST_MECHANISMS]
        names = [name for _, of in of_tables for name in of]
        enough = {name for name in names if names.count(name) >= LEAST_TABLES}
        typical = levels([{n: x for n, x in of.items() if n in enough} for _, of in of_tables])
        for (table, of), level in zip(of_tables, typical, strict=True):
            version = table.environment.get("effattn", "?")
            source = f"experiments/results/{table.name}: {table.seeds}, effattn {version}"
            found += [
                {
                    "mechanism": name,
                    "task": table.name,
                    "is_causal": is_causal,
                    "score": round(score, 4),
                    "typical": round(level, 4),
                    "source": source,
                }
                for name, score in of.items()
                if name in enough
            ]
    return {"schema": quality.SCHEMA, "results": found}


def of_plain_names(table: Table) -> dict[str, float]:
    """Returns the score of each mechanism of a table, 0 to 1, more is better.

    It is the accuracy, as a mean over the held-out sets. With losses, it is the least loss of the
    table over the mechanism's loss, on the validation set alone: the others are probes, at which a
    small model may be surely wrong where another one guesses.
    """
    names = [name for name in table.runs if name.isidentifier()]
    if table.sign < 0:
        values = table.measured(table.sets[0])
        least = min((values[name].value for name in names), default=0.0)
        return {name: least / values[name].value for name in names}
    first = next(iter(table.runs.values()))[0]["held_out"]
    has_scaled = all(SCALED in first[each] for each in table.sets)
    by_set = [table.measured(each, SCALED if has_scaled else None) for each in table.sets]
    return {name: fmean(max(0.0, values[name].value) for values in by_set) for name in names}


def levels(tables: Sequence[Mapping[str, float]]) -> list[float]:
    """Returns for each table the score that a typical mechanism would have there.

    Tables have different mechanisms, and a table of strong ones would make each of them look weak.
    So the scores are fitted as sums of a level of the table and a quality of the mechanism, with
    least squares; the mean quality over all mechanisms is 0.
    """
    names = list(dict.fromkeys(name for of in tables for name in of))
    rows = [
        (t, names.index(name), score) for t, of in enumerate(tables) for name, score in of.items()
    ]
    if not rows:
        return [0.0] * len(tables)
    design = np.zeros((len(rows) + 1, len(tables) + len(names)))
    for row, (table, name, _) in enumerate(rows):
        design[row, table] = design[row, len(tables) + name] = 1
    design[-1, len(tables) :] = 1  # the sum of the qualities, which is 0
    wanted = np.array([score for *_, score in rows] + [0.0])
    return np.linalg.lstsq(design, wanted)[0][: len(tables)].tolist()
