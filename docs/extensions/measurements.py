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
COSTS = RESULTS / "efficiency-all" / "summary.json"  # the experiment `efficiency`


@functools.cache
def costs() -> Mapping[str, Any]:
    """The result of the experiment `efficiency`."""
    return json.loads(COSTS.read_text(encoding="utf-8"))


def layers(direction: str | None = None, mechanism: str | None = None) -> list[Mapping[str, Any]]:
    """Records of layers, by length."""
    return [
        layer
        for layer in sorted(costs()["layers"], key=lambda layer: layer["length"])
        if direction in (None, layer["direction"]) and mechanism in (None, layer["mechanism"])
    ]


def times(found: Mapping[str, Any]) -> float | None:
    """Time of a pass as a multiple of that of exact attention; None if it was not measured."""
    return 1 / found["ratio"] if found.get("ratio") else None


def machine() -> str:
    """The device of the costs, in words."""
    environment = costs()["config"]["environment"]
    return f"{environment['cores']} cores of a CPU with jax {environment['jax']}"


def mean_quality(mechanism: str, is_causal: bool) -> tuple[float, int] | None:
    """Mean difference from a typical score, and the number of tasks; None if unmeasured."""
    scores = [
        each.score - each.typical
        for each in quality.read()
        if (each.mechanism, each.is_causal) == (mechanism, is_causal)
    ]
    return (mean(scores), len(scores)) if scores else None
