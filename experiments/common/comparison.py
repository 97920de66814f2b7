"""The runs of a comparison: every mechanism with every seed, at its own best learning rate."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from experiments.common import side_by_side
from experiments.common.errors import Diverged
from experiments.common.progress import Progress

Result = dict[str, Any]
Planned = tuple[str, float, int]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a comparison measured.

    Attributes:
      runs: one result a mechanism and seed, at the mechanism's learning rate.
      sweep: one result a mechanism and learning rate tried, with the first seed.
      at_once: how many of them went on beside each other.
    """

    runs: list[Result]
    sweep: list[Result]
    at_once: int = 1


def planned_runs(mechanisms: int, rates: int, seeds: int) -> int:
    """How many runs `compare` will ask for: the best of a sweep serves as its seed's run."""
    return mechanisms * (rates + seeds - 1)


def compare(
    mechanisms: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    run: Callable[[str, float, int], Result],
    progress: Progress,
    at_once: int = 1,
) -> Comparison:
    """Runs every mechanism with every seed, at the rate that the first seed validates best with.

    Args:
      mechanisms: names, in order.
      rates: learning rates; of several, each mechanism gets its own best.
      seeds: of the parameters and the order of the data.
      run: `(mechanism, rate, seed) -> result`, with the keys "learning_rate" and "valid_loss".
      progress: takes sentences about what was chosen, and stops the runs if one fails.
      at_once: how many runs go on beside each other.

    Raises:
      Diverged: at the only rate, or at every rate of a sweep.
    """

    def run_all(planned: list[Planned], function=run) -> dict[Planned, Any]:
        results = side_by_side.call(lambda p: function(*p), planned, at_once, progress.stop)
        return dict(zip(planned, results, strict=True))

    def attempt(*planned: Any) -> Result | Diverged:
        try:
            return run(*planned)
        except Diverged as error:
            progress.say(f"left out of the sweep: {error}")
            return error

    rate_of = dict.fromkeys(mechanisms, rates[0])
    tried: dict[Planned, Result | Diverged] = {}
    if len(rates) > 1:
        tried = run_all([(m, rate, seeds[0]) for m in mechanisms for rate in rates], attempt)
        for mechanism in mechanisms:
            rate_of[mechanism] = rate = _best([tried[mechanism, r, seeds[0]] for r in rates])
            progress.say(f"{mechanism}: the best learning rate is {rate:g}")
    planned = [(m, rate_of[m], seed) for m in mechanisms for seed in seeds]
    results = tried | run_all([p for p in planned if p not in tried])
    sweep = [result for result in tried.values() if not isinstance(result, Diverged)]
    return Comparison([results[p] for p in planned], sweep, at_once)


def _best(tried: Sequence[Result | Diverged]) -> float:
    """The learning rate of the result that validates best."""
    trained = []
    for result in tried:
        if not isinstance(result, Diverged):
            trained.append(result)
        elif result is tried[-1] and not trained:
            raise result
    return min(trained, key=lambda result: result["valid_loss"])["learning_rate"]
