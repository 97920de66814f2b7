"""Runs of a comparison: every mechanism with every seed, at the mechanism's best learning rate."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from experiments.harness import side_by_side
from experiments.harness.errors import Diverged
from experiments.harness.progress import Progress

Result = dict[str, Any]
Planned = tuple[str, float, int]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Results of a comparison.

    Attributes:
      runs: one result per mechanism and seed, at the mechanism's learning rate.
      sweep: one result per mechanism and learning rate tried, with the first seed.
      at_once: number of simultaneous runs.
      left_out: reasons why optional mechanisms have no results, by name.
      others: results of earlier commands, with mechanisms, rates or seeds that are not compared.
    """

    runs: list[Result]
    sweep: list[Result]
    at_once: int = 1
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    others: list[Result] = dataclasses.field(default_factory=list)


def planned_runs(mechanisms: int, rates: int, seeds: int) -> int:
    """Returns the number of runs of `compare`; the best run of a sweep counts for its seed."""
    return mechanisms * (rates + seeds - 1)


def compare(
    mechanisms: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    run: Callable[[str, float, int], Result],
    cost: Callable[[Result], tuple[float, ...]],
    progress: Progress,
    at_once: int = 1,
    optional: Collection[str] = (),
) -> Comparison:
    """Runs every mechanism with every seed, at the learning rate that is best for the first seed.

    Args:
      mechanisms: names, in order.
      rates: learning rates to choose from.
      seeds: seeds of the parameters and of the order of the data.
      run: `(mechanism, rate, seed) -> result`, with the key "learning_rate".
      cost: key by which results are compared; the least is the best.
      progress: progress display, which also stops the other runs if one fails.
      at_once: number of simultaneous runs.
      optional: mechanisms that are left out if they diverge.

    Raises:
      Diverged: a model diverged at the only rate, or at every rate of a sweep.
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
    left_out: dict[str, str] = {}
    if len(rates) > 1:
        tried = run_all([(m, rate, seeds[0]) for m in mechanisms for rate in rates], attempt)
        for mechanism in mechanisms:
            try:
                rate_of[mechanism] = rate = _best(
                    [tried[mechanism, r, seeds[0]] for r in rates], cost
                )
            except Diverged as error:
                if mechanism not in optional:
                    raise
                left_out[mechanism] = f"{error} (at every learning rate)"
            else:
                progress.say(f"{mechanism}: the best learning rate is {rate:g}")

    def finish(mechanism: str, rate: float, seed: int) -> Result | Diverged:
        try:
            return run(mechanism, rate, seed)
        except Diverged as error:
            if mechanism not in optional:
                raise
            return error

    planned = [(m, rate_of[m], seed) for m in mechanisms if m not in left_out for seed in seeds]
    results = tried | run_all([p for p in planned if p not in tried], finish)
    left_out |= {p[0]: str(results[p]) for p in planned if isinstance(results[p], Diverged)}
    runs = [results[p] for p in planned if p[0] not in left_out]
    if not runs:
        raise next(result for result in results.values() if isinstance(result, Diverged))
    sweep = [result for result in tried.values() if not isinstance(result, Diverged)]
    return Comparison(runs, sweep, at_once, left_out)


def _best(tried: Sequence[Result | Diverged], cost: Callable[[Result], tuple[float, ...]]) -> float:
    """Returns the learning rate of the best result."""
    trained = []
    for result in tried:
        if not isinstance(result, Diverged):
            trained.append(result)
        elif result is tried[-1] and not trained:
            raise result
    return min(trained, key=cost)["learning_rate"]
