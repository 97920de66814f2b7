"""Means with confidence intervals, and Pareto fronts."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy import stats

LEVEL = 0.95


class Mean(NamedTuple):
    """Mean of a measure over seeds, and half of its 95 % interval; None for one seed."""

    value: float
    half: float | None

    def __str__(self) -> str:
        return f"{self.value:.3f}" + ("" if self.half is None else f" ± {self.half:.3f}")

    def separates(self, other: "Mean") -> bool:
        """Returns whether the intervals are known and do not overlap."""
        if self.half is None or other.half is None:
            return False
        return abs(self.value - other.value) > self.half + other.half


def mean(values: Sequence[float]) -> Mean:
    """Returns the mean and half of its interval, by Student's t distribution."""
    if len(values) < 2:
        return Mean(statistics.fmean(values), None)
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Mean(statistics.fmean(values), half)


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Returns the names that no other name beats in both numbers, of which more is better."""

    def beaten(name: str) -> bool:
        x, y = points[name]
        return any(
            (a >= x and b >= y) and (a > x or b > y)
            for other, (a, b) in points.items()
            if other != name
        )

    return sorted((name for name in points if not beaten(name)), key=lambda name: points[name])
