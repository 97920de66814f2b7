"""Measurement on a CPU: contenders are compiled, checked, and then timed in turns."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from benchmarks import machine
from benchmarks.contenders import Contender, Program
from benchmarks.workloads import (
    WORKLOADS,
    Arrays,
    checked_rows,
    expected,
    only_rows,
    relative_error,
)

Part = TypeVar("Part")

MOST_BYTES = 3e9  # largest temporary memory of a program
TOLERANCE = 1e-5  # largest error, relative to the largest element
ENOUGH_SECONDS, FEWEST_ROUNDS = 3.0, 3  # after both limits a contender leaves the rounds
SLOW_RATIO = 3.0  # slow peers exceed this ratio, and `ENOUGH_SECONDS` per call
PAUSE = 0.005  # lets the threads of the previous contender sleep


class Skip(Exception):
    """Reason why a contender is not timed."""


class Failure(Skip):
    """Error of a contender that should have been timed: it failed, or its results are wrong."""


@contextlib.contextmanager
def skipping() -> Iterator[None]:
    """Converts exceptions in the `with` block to `Skip` or `Failure`."""
    try:
        yield
    except Skip:
        raise
    except NotImplementedError as error:
        raise Skip(_first_sentence(error)) from error
    except Exception as error:
        raise Failure(_first_sentence(error)) from error


@dataclasses.dataclass
class Row:
    """One contender in one comparison.

    Attributes:
      comparison, which, length, contender: the comparison, pass, length and contender.
      flops, exponentials: least operations of the workload for an algorithm in linear memory.
      floor: seconds for these operations, one kind after the other, at the machine's rates.
      temporary_bytes: temporary memory of the compiled program.
      error: largest relative error.
      rounds: seconds of each call; None in rounds without this contender.
      seconds: median of the rounds; None if the contender was not timed.
      ratio: time over effattn's time in the same round, the median; above 1 effattn is faster.
      ratio_range: smallest and largest ratio of the rounds.
      skipped: reason why the contender was not timed.
    """

    comparison: str
    which: str
    length: int
    contender: str
    flops: int
    exponentials: int
    floor: float
    temporary_bytes: int | None = None
    error: float | None = None
    rounds: list[float | None] = dataclasses.field(default_factory=list)
    seconds: float | None = None
    ratio: float | None = None
    ratio_range: tuple[float, float] | None = None
    skipped: str | None = None


def compare(
    comparison: str,
    contenders: Sequence[Contender],
    arrays: Arrays,
    which: str,
    rounds: int,
    rates: Sequence[machine.Rate],
    slow: dict[str, str],
) -> list[Row]:
    """Measures contenders; returns a row for each, with ratios to the first.

    Contenders in `slow` are skipped for the reason given there. Contenders that turn out to be slow
    are added to `slow`.
    """
    best = {r.kind: max(s.per_second for s in rates if s.kind == r.kind) for r in rates}
    length = arrays[0].shape[1]
    rows, taking_part = [], []
    for contender in contenders:
        workload = WORKLOADS[contender.computes]
        flops, exps = workload.flops(length, which), workload.exps(length, which)
        floor = flops / best["product"] + exps / best["exponential"]
        row = Row(comparison, which, length, contender.name, flops, exps, floor)
        rows.append(row)
        try:
            if contender.name in slow:
                raise Skip(slow[contender.name])
            program = build(contender, arrays, which)
            row.temporary_bytes = program.temporary_bytes
            if program.temporary_bytes is not None and program.temporary_bytes > MOST_BYTES:
                raise Skip(f"needs {program.temporary_bytes / 1e9:.1f} GB of temporaries")
            _check(program, contender, arrays, which, row)
            taking_part.append((row, program, program.place(arrays)))
        except Skip as reason:
            row.skipped = str(reason)
    _time(taking_part, rounds)
    for row, *_ in taking_part:
        _summarise(row, rows[0])
    for contender, row in zip(contenders, rows, strict=True):
        takes_long = (row.seconds or 0) > ENOUGH_SECONDS and (row.ratio or 0) > SLOW_RATIO
        if contender.is_peer and takes_long:
            slow[row.contender] = f"slow: a call took {row.seconds:.1f} s at length {length}"
    return rows


def build(contender: Contender, arrays: Arrays, which: str) -> Program:
    """Returns the compiled program of a contender, or raises `Skip`."""
    if not machine.installed(contender.package):
        raise Skip(f"{contender.package} is not installed")
    with skipping():
        return contender.compile(arrays, which != "forward")


def _check(program: Program, contender: Contender, arrays: Arrays, which: str, row: Row) -> None:
    """Runs a program once, which also warms it up, and checks the results."""
    rows = checked_rows(row.length)
    with skipping():
        results = program.run(program.place([*arrays[:-1], only_rows(arrays[-1], rows)]))
        program.wait(results)
    wanted = expected(WORKLOADS[contender.computes].weights, arrays, rows, which)
    row.error = relative_error(program.fetch(results), wanted, rows)
    demand(row.error, TOLERANCE)


def demand(error: float, tolerance: float) -> None:
    """Raises `Failure` for an error above the tolerance."""
    if not error <= tolerance:  # also true for NaN
        raise Failure(f"disagrees: relative error {error:.1e}, tolerance {tolerance:.0e}")


def in_turn(taking_part: Sequence[Part], index: int) -> Sequence[Part]:
    """Returns the contenders in the order of a round; each round starts with another one."""
    first = index % max(1, len(taking_part))
    return (*taking_part[first:], *taking_part[:first])


def _time(taking_part: Sequence[tuple[Row, Program, Any]], rounds: int) -> None:
    """Times one call of each contender per round."""
    for index in range(rounds):
        for row, program, operands in in_turn(taking_part, index):
            spent = sum(seconds or 0 for seconds in row.rounds)
            if index >= FEWEST_ROUNDS and spent >= ENOUGH_SECONDS:
                row.rounds.append(None)
                continue
            time.sleep(PAUSE)
            start = time.perf_counter()
            program.wait(program.run(operands))
            row.rounds.append(time.perf_counter() - start)


def _summarise(row: Row, compared_with: Row) -> None:
    """Computes the medians of a row."""
    row.seconds = statistics.median(s for s in row.rounds if s is not None)
    ratios = [
        seconds / other
        for seconds, other in zip(row.rounds, compared_with.rounds, strict=False)
        if seconds is not None and other is not None
    ]
    if ratios:
        row.ratio = statistics.median(ratios)
        row.ratio_range = (min(ratios), max(ratios))


def _first_sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].partition('. ')[0]}" if lines else repr(error)
