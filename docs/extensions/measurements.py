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
# The experiment `efficiency`: all mechanisms, then longer sequences of many.
COSTS = "efficiency-all", "efficiency"


@functools.cache
def costs() -> list[Mapping[str, Any]]:
    """All results of the experiment `efficiency`; the first has the latest times."""
    paths = (RESULTS / name / "summary.json" for name in COSTS)
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


@functools.cache
def _latest() -> list[Mapping[str, Any]]:
    """The latest record of each mechanism, direction and length, by length."""
    latest = {
        (layer["mechanism"], layer["direction"], layer["length"]): layer
        for found in reversed(costs())
        for layer in found["layers"]
    }
    return sorted(latest.values(), key=lambda layer: layer["length"])


def layers(direction: str | None = None, mechanism: str | None = None) -> list[Mapping[str, Any]]:
    """Records of layers, by length."""
    return [
        layer
        for layer in _latest()
        if direction in (None, layer["direction"]) and mechanism in (None, layer["mechanism"])
    ]


def times(found: Mapping[str, Any]) -> float | None:
    """Time of a pass as a multiple of that of exact attention; None if it was not measured."""
    return 1 / found["ratio"] if found.get("ratio") else None


def machine() -> str:
    """The device of the costs, in words."""
    environment = costs()[0]["config"]["environment"]
    return f"{environment['cores']} cores of a CPU with jax {environment['jax']}"


def mean_quality(mechanism: str, is_causal: bool) -> tuple[float, int] | None:
    """Mean score relative to softmax attention, and the number of tasks; None if unmeasured."""
    scores = [
        each.relative
        for each in quality.read()
        if (each.mechanism, each.is_causal) == (mechanism, is_causal)
    ]
    return (mean(scores), len(scores)) if scores else None
