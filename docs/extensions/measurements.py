"""Measured costs and qualities of mechanisms, from the results in the repository."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from effattn.advice import quality

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
# Results of the experiment `efficiency`. The second has a mechanism that the first lacks, measured
# on another machine.
COSTS = "efficiency-all", "efficiency-gated-attention"


@functools.cache
def _costs(name: str) -> Mapping[str, Any]:
    return json.loads((RESULTS / name / "summary.json").read_text(encoding="utf-8"))


def table_of(mechanism: str) -> str:
    """The name of the result that has the costs of a mechanism."""
    for name in COSTS:
        if any(layer["mechanism"] == mechanism for layer in _costs(name)["layers"]):
            return name
    raise ValueError(f"no result of {', '.join(COSTS)} has {mechanism}")


def layers(mechanism: str, direction: str | None = None) -> list[Mapping[str, Any]]:
    """Records of the layers of a mechanism, by length."""
    return [
        layer
        for layer in sorted(_costs(table_of(mechanism))["layers"], key=lambda each: each["length"])
        if layer["mechanism"] == mechanism and direction in (None, layer["direction"])
    ]


def times(found: Mapping[str, Any]) -> float | None:
    """Time of a pass as a multiple of that of exact attention; None if it was not measured."""
    return 1 / found["ratio"] if found.get("ratio") else None


def machine(mechanism: str) -> str:
    """The device of the costs of a mechanism, in words."""
    environment = _costs(table_of(mechanism))["config"]["environment"]
    return f"{environment['cores']} cores of a CPU with jax {environment['jax']}"


def mean_quality(mechanism: str, is_causal: bool) -> tuple[float, int] | None:
    """Mean difference from a typical score, and the number of tasks; None if unmeasured."""
    scores = [
        each.score - each.typical
        for each in quality.read()
        if (each.mechanism, each.is_causal) == (mechanism, is_causal)
    ]
    return (mean(scores), len(scores)) if scores else None
