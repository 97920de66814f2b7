"""Measurement of layers in turns with exact attention, within budgets of time and memory."""

import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from experiments.costs.layers import EXACT, PASSES, Layer, Program, compile_pass
from experiments.harness import machine

Record = dict[str, Any]

FEWEST_ROUNDS = 3
PAUSE = 0.005  # seconds; lets the threads of the previous call sleep
LEAST_EXPONENT = 7  # the search for the longest sequence begins at 128 tokens


@dataclasses.dataclass(frozen=True)
class Budget:
    """Limits of a measurement.

    Attributes:
      rounds: calls of each program.
      seconds: after this time and `FEWEST_ROUNDS` a program leaves the rounds. If one call takes
        longer, the pass is not timed at longer lengths.
      program_bytes: larger programs are compiled, and not run.
    """

    rounds: int
    seconds: float
    program_bytes: float


def device_bytes() -> int:
    """Returns the memory of the device; on a CPU that of the machine."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def in_turns(calls: Sequence[Callable[[], None]], budget: Budget) -> list[list[float | None]]:
    """Times functions in turns; returns the seconds of each round, None for a round left out."""
    times: list[list[float | None]] = []
    rounds = []
    for call in calls:
        begin = time.perf_counter()
        call()  # the first call is slower
        slow = time.perf_counter() - begin > budget.seconds
        rounds.append(1 if slow else budget.rounds)
        times.append([])
    for index in range(max(rounds)):
        for place in range(len(calls)):
            turn = (place + index) % len(calls)
            spent = sum(seconds or 0 for seconds in times[turn])
            enough = index >= FEWEST_ROUNDS and spent >= budget.seconds
            if index >= rounds[turn] or enough:
                times[turn].append(None)
                continue
            time.sleep(PAUSE)
            begin = time.perf_counter()
            calls[turn]()
            times[turn].append(time.perf_counter() - begin)
    return times


@functools.cache
def _exact_call(layer: Layer, which: str) -> Callable[[], None]:
    return compile_pass(layer, which, count=False).start()


Programs = Mapping[str, Program | Exception]


def compile_layers(layers: Sequence[Layer]) -> Iterator[Programs]:
    """Compiles all passes of layers; yields the programs of each layer, in order.

    On an accelerator the host compiles as many layers at once as it has cores, and yields their
    programs when all are done, so that nothing compiles while the caller measures.

    Yields:
      For each layer its programs by pass; in place of a program, the error of its compilation.
    """
    at_once = 1 if jax.default_backend() == "cpu" else machine.cores()
    with ThreadPoolExecutor(at_once) as pool:
        for begin in range(0, len(layers), at_once):
            yield from list(pool.map(_compile, layers[begin : begin + at_once]))


def _compile(layer: Layer) -> Programs:
    programs: dict[str, Program | Exception] = {}
    for which in PASSES:
        try:
            programs[which] = compile_pass(layer, which)
        # A mechanism may be the user's own, and then anything may fail.
        except Exception as error:
            programs[which] = error
    return programs


def measure(
    layer: Layer,
    programs: Programs,
    budget: Budget,
    shorter: Record | None,
    exact: Record | None,
) -> Record:
    """Measures all passes of a layer.

    Args:
      layer: the layer.
      programs: its programs, from `compile_layers`.
      budget: limits.
      shorter: record of the layer at the next shorter length, or None.
      exact: record of exact attention at this length; None if the layer is exact attention.

    Returns:
      The record: for each pass the counted quantities, the median `seconds`, and `ratio`, the
      median over rounds of the time of exact attention over the time of the layer; or, as
      `skipped`, the reason why the pass was not timed. If a call of exact attention takes longer
      than the budget's seconds, `ratio` is the quotient of the medians of both records.
    """
    passes: dict[str, Record] = {}
    for which, program in programs.items():
        if isinstance(program, Exception):
            passes[which] = {"skipped": _sentence(program)}
            continue
        try:
            timed = _timed(layer, which, program, budget, shorter, exact)
        except Exception as error:
            timed = {"skipped": _sentence(error)}
        passes[which] = program.sizes() | timed
    return {
        "mechanism": layer.mechanism,
        "direction": layer.direction,
        "length": layer.length,
        "state_bytes": layer.state_bytes(),
        "passes": passes,
    }


def _timed(
    layer: Layer,
    which: str,
    program: Program,
    budget: Budget,
    shorter: Record | None,
    exact: Record | None,
) -> Record:
    if program.needed_bytes > budget.program_bytes:
        return {"skipped": f"needs {program.needed_bytes / 1e9:.1f} GB"}
    if shorter is not None:
        before = shorter["passes"][which]
        if "skipped" in before:
            return {"skipped": before["skipped"]}
        if before["seconds"] > budget.seconds:
            seconds, length = before["seconds"], shorter["length"]
            return {"skipped": f"a call at {length:,} tokens took {seconds:.1f} s"}
    calls = [program.start()]
    of_exact = None if exact is None else exact["passes"][which].get("seconds")
    if of_exact is not None and of_exact <= budget.seconds:
        reference = dataclasses.replace(layer, mechanism=EXACT, options=())
        calls.append(_exact_call(reference, which))
    times = in_turns(calls, budget)
    own = [seconds for seconds in times[0] if seconds is not None]
    seconds = statistics.median(own)
    ratio = None if of_exact is None else of_exact / seconds
    if exact is None or len(calls) > 1:
        ratios = [b / a for a, b in zip(times[0], times[-1], strict=True) if a and b]
        ratio = statistics.median(ratios)
    return {"seconds": seconds, "rounds": len(own), "ratio": ratio}


def forget() -> None:
    """Frees compiled programs; call it before the next length, or if there are too many."""
    _exact_call.cache_clear()
    machine.forget_programs()


def longest(
    layer_at: Callable[[int], Layer], which: str, memory: float, known: Mapping[int, float]
) -> int | None:
    """Returns the longest power of two whose program fits into the memory, by bisection.

    Programs are compiled, not run, so that nothing is allocated.

    Args:
      layer_at: `(length) -> layer`.
      which: the pass.
      memory: bytes for arguments, results and temporary arrays.
      known: bytes of programs by length, which need not be compiled again.

    Returns:
      The length, or None if 128 tokens do not fit.
    """

    def fits(exponent: int) -> bool:
        length = 2**exponent
        if length not in known:
            try:
                return compile_pass(layer_at(length), which, count=False).needed_bytes <= memory
            except Exception:  # sizes that the compiler cannot represent
                return False
        return known[length] <= memory

    lengths = [int(math.log2(length)) for length, needed in known.items() if needed <= memory]
    low = max(lengths, default=LEAST_EXPONENT - 1)
    # Two arrays of tokens, input and output, do not fit at this length.
    workload = layer_at(2**LEAST_EXPONENT).workload
    token_bytes = workload.features * workload.itemsize
    high = max(low, math.floor(math.log2(memory / (2 * token_bytes)))) + 1
    beyond = [int(math.log2(length)) for length, needed in known.items() if needed > memory]
    high = min(beyond, default=high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 2**low if low >= LEAST_EXPONENT else None


def _sentence(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:200]
