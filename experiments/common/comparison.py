"""The runs of a comparison: every mechanism with every seed, at its own best learning rate."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from experiments.common.errors import Diverged

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a comparison measured.

    Attributes:
      runs: one result a mechanism and seed, at the mechanism's learning rate.
      sweep: one result a mechanism and learning rate tried, with the first seed.
    """

    runs: list[Result]
    sweep: list[Result]


def planned_runs(mechanisms: int, rates: int, seeds: int) -> int:
    """How many runs `compare` will ask for: the best of a sweep serves as its seed's run."""
    return mechanisms * (rates + seeds - 1)


def compare(
    mechanisms: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    run: Callable[[str, float, int], Result],
    say: Callable[[str], None],
) -> Comparison:
    """Runs every mechanism with every seed, at the rate that the first seed validates best with.

    Args:
      mechanisms: names, in order; all runs of one come before those of the next.
      rates: learning rates; of several, each mechanism gets its own best.
      seeds: of the parameters and the order of the data.
      run: `(mechanism, rate, seed) -> result`, with the key "valid_loss".
      say: takes a sentence about what was chosen.

    Raises:
      Diverged: at the only rate, or at every rate of a sweep.
    """
    comparison = Comparison([], [])
    for mechanism in mechanisms:
        trials = []
        for rate in rates:
            try:
                trials.append(run(mechanism, rate, seeds[0]))
            except Diverged as error:
                if rate == rates[-1] and not trials:
                    raise
                say(f"left out of the sweep: {error}")
        best = min(trials, key=lambda result: result["valid_loss"])
        rate = best["learning_rate"]
        if len(rates) > 1:
            comparison.sweep.extend(trials)
            say(f"{mechanism}: the best learning rate is {rate:g}")
        comparison.runs.append(best)
        comparison.runs.extend(run(mechanism, rate, seed) for seed in seeds[1:])
    return comparison
