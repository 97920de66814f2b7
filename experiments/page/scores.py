"""Scores of mechanisms relative to softmax attention, for `effattn.advise`."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from effattn.advice import quality
from experiments.harness.naming import REFERENCE
from experiments.page.comparisons import Table

# A table counts if it has so many mechanisms by their plain name: a rank among few would put a weak
# mechanism before better ones that were not measured. A mechanism gets its scores once it is in so
# many such tables of a direction: one task says little about others.
LEAST_MECHANISMS, LEAST_TABLES = 12, 3

# Largest score, so that one task that softmax attention fails does not decide alone.
MOST = 2.0


def scores(tables: Sequence[Table]) -> dict[str, Any]:
    """Returns the content of `quality.json`.

    Only mechanisms by their plain name count, as options follow the length of the task.
    """
    found: dict[tuple[bool, str], list[dict[str, Any]]] = {}
    for table in tables:
        is_causal = bool(table.summary["is_causal"])
        mechanisms = [name for name in table.runs if name.isidentifier()]
        if len(mechanisms) < LEAST_MECHANISMS:
            continue
        for mechanism in mechanisms:
            score = relative(table, mechanism)
            if score is not None:
                version = table.environment.get("effattn", "?")
                result = {
                    "mechanism": mechanism,
                    "task": table.name,
                    "is_causal": is_causal,
                    "relative": round(score, 4),
                    "source": f"experiments/results/{table.name}: {table.seeds}, effattn {version}",
                }
                found.setdefault((is_causal, mechanism), []).append(result)
    enough = [of for of in found.values() if len(of) >= LEAST_TABLES]
    return {"schema": quality.SCHEMA, "results": [result for of in enough for result in of]}


def relative(table: Table, mechanism: str) -> float | None:
    """Returns the score of a mechanism; None if unknown.

    It is the mean over the held-out sets. Losses count on the validation set alone: the others are
    probes, at which a small model may be surely wrong where another one guesses.
    """
    if REFERENCE not in table.runs:
        return None
    ratios = []
    for name in table.sets if table.sign > 0 else table.sets[:1]:
        values = table.measured(name)
        ours, reference = values[mechanism].value, values[REFERENCE].value
        top, bottom = (ours, reference) if table.sign > 0 else (reference, ours)
        if bottom > 0:
            ratios.append(min(MOST, top / bottom))
    return fmean(ratios) if ratios else None
