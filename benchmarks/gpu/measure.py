"""Measurement on a GPU: contenders are compiled in parallel, checked, and then timed in turns.

The measured time is that of a chain of calls: the host starts several calls of a program and waits
for the last one, and the time of a call is the time of the chain divided by the number of calls.
The measurement is the same for JAX and PyTorch, because both queue calls on one stream of the
device. CUDA events would see only PyTorch's stream, and a profiler would leave out the time between
kernels.

The result is device time only if the host starts calls faster than the device computes them. The
time to start a call is therefore measured as well, and rows in which it is most of the time are
marked: in these rows the device may have waited for the host. A chain has few calls, because XLA
limits the number of queued calls, and the start of a further call waits.

At the sizes of `cases.FULL` the inputs are larger than a GPU's second-level cache, so that each
call reads the inputs from memory.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.contenders import Contender, Program, in_jax, in_torch
from benchmarks.gpu.cases import DTYPE, Case, Sizes
from benchmarks.measure import Failure, Skip, build, demand, in_turn, skipping
from benchmarks.workloads import Arrays, expected, only_rows, relative_error

TOLERANCE = 0.02  # largest error in bfloat16, relative to the largest element
CHAIN_SECONDS, MOST_CALLS = 0.02, 32
FEWEST_ROUNDS, ENOUGH_SECONDS = 3, 1.0  # after both limits a comparison ends
HOST_SHARE = 0.7  # if starting a call takes this share of its time, the device may have waited
NOT_REACHED = "not reached within --minutes"
FIRST = np.index_exp[:1, :, :1]  # the checked head
IN_THREADS = ("jax", "jla", "tokamax")  # packages that can compile in threads


class Budget:
    """Time budget in seconds, from now on."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())

    def demand(self) -> None:
        """Raises `Skip` if no time is left."""
        if not self.left:
            raise Skip(NOT_REACHED)


@dataclasses.dataclass
class Row:
    """One contender in one case.

    Attributes:
      comparison, variant, which, contender: the comparison, case, pass and contender.
      batch, length, heads, kv_heads, head_size: shape of the case.
      flops: floating-point operations of the matrix products.
      traffic: least number of bytes that memory moves.
      peak_bytes: operands, results and temporaries; for PyTorch the peak of its allocator.
      error: largest relative error.
      calls: number of calls in a chain.
      rounds: seconds of a call in each chain.
      seconds: median of the rounds; None if the contender was not timed.
      start_seconds: median time in which the host starts a call.
      flops_per_second, bytes_per_second: `flops` and `traffic` divided by `seconds`.
      product_share, copy_share: shares of the best product and copy measured in the same run.
      skipped: reason why the contender was not timed.
      failed: whether the contender should have been timed.
    """

    comparison: str
    variant: str
    which: str
    contender: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_size: int
    flops: int
    traffic: int
    peak_bytes: int | None = None
    error: float | None = None
    calls: int | None = None
    rounds: list[float] = dataclasses.field(default_factory=list)
    seconds: float | None = None
    start_seconds: float | None = None
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    product_share: float | None = None
    copy_share: float | None = None
    skipped: str | None = None
    failed: bool = False

    @property
    def bound_by_host(self) -> bool:
        """True if the device may have waited for the host."""
        if self.seconds is None or self.start_seconds is None:
            return False
        return self.start_seconds > HOST_SHARE * self.seconds


def rates(sizes: Sizes, device: str, rounds: int) -> list[machine.Rate]:
    """Measures the best rates of a matrix product of each library, and of a copy."""
    shape = (sizes.square, sizes.square)
    square = [jax.random.normal(jax.random.key(n), shape, DTYPE) for n in range(2)]
    flat = jax.random.normal(jax.random.key(2), (sizes.copied,), DTYPE)
    text = f"{sizes.square} x {sizes.square} by {sizes.square} x {sizes.square}, bfloat16"
    operations, moved = 2 * sizes.square**3, 2 * flat.size * flat.dtype.itemsize

    def rate(kind, of, per_call, program, arrays):
        placed = program.place(arrays)
        calls = _calls(program, placed)
        best = min(_chain(program, placed, calls)[0] for _ in range(rounds))
        return machine.Rate(kind, of, per_call / best)

    # The last array is in the place of the output gradient.
    operands = [*square, square[0]]
    product = in_jax(jnp.matmul)(operands, False)
    found = [rate("product", f"{text}, XLA", operations, product, operands)]
    copy = in_jax(lambda x: x + 1)([flat, flat], False)
    found.append(rate("copy", f"{flat.size} + 1, read and written", moved, copy, [flat, flat]))
    if machine.installed("torch"):
        with contextlib.suppress(Exception):  # a build without this device
            import torch

            product = in_torch(lambda length: torch.matmul, device, heads_first=False)(
                operands, False
            )
            found.append(rate("product", f"{text}, PyTorch", operations, product, operands))
    return found


def compare(
    case: Case,
    contenders: Sequence[Contender],
    draws: Arrays,
    rates: Sequence[machine.Rate],
    budget: Budget,
    rounds: int,
    device: jax.Device,
    report: Callable[[Row], None],
) -> list[Row]:
    """Measures a case; returns and reports a row per contender and pass."""
    shapes = jax.eval_shape(case.operands, draws)
    rows = {
        (which, one.name): Row(
            case.comparison, case.variant, which, one.name, case.batch, case.length, case.heads,
            case.kv_heads, case.head_size, case.flops(which), case.traffic(shapes, which),
        )
        for which in case.passes
        for one in contenders
    }  # fmt: skip
    try:
        budget.demand()
        with skipping():
            arrays = case.operands(draws)
    except Skip as reason:
        for row in rows.values():
            _skip(row, reason)
            report(row)
        return list(rows.values())
    with _compiling(case, contenders, arrays, budget, device) as (programs, all_done):
        wanted = _reference(case, arrays)
        all_done()  # a running compilation may use the device
        for which in case.passes:
            taking_part = []
            for one in contenders:
                row = rows[which, one.name]
                with _recording(row):
                    program = programs[which, one.name]()
                    budget.demand()
                    placed = _check(program, case, arrays, wanted, row)
                    taking_part.append((row, program, placed))
            _time(taking_part, rounds, budget)
            for one in contenders:
                row = rows[which, one.name]
                _summarise(row, rates)
                report(row)
    return list(rows.values())


def _skip(row: Row, reason: Skip) -> None:
    row.skipped, row.failed = str(reason), isinstance(reason, Failure)


@contextlib.contextmanager
def _recording(row: Row) -> Iterator[None]:
    """Converts exceptions in the `with` block to the reason why a row is not timed."""
    try:
        with skipping():
            yield
    except Skip as reason:
        _skip(row, reason)


@contextlib.contextmanager
def _compiling(
    case: Case,
    contenders: Sequence[Contender],
    arrays: Arrays,
    budget: Budget,
    device: jax.Device,
) -> Iterator[tuple[Mapping[tuple[str, str], Callable[[], Program]], Callable[[], Any]]]:
    """Compiles the programs of all passes in threads, except PyTorch's, which compile on request.

    Yields:
      `(programs, wait)`: functions that return each program by pass and contender, and a function
      that waits for all compilations in threads.
    """

    def on_device(one, which):
        with jax.default_device(device):  # the default device is a setting of the thread
            return build(one, arrays, which)

    def result(future):
        try:
            return future.result(timeout=budget.left)
        except TimeoutError:
            raise Skip(NOT_REACHED) from None

    pool = concurrent.futures.ThreadPoolExecutor(max_workers=machine.cores())
    programs: dict[tuple[str, str], Callable[[], Program]] = {}
    futures: list[concurrent.futures.Future] = []
    for which in case.passes:
        for one in contenders:
            if one.package in IN_THREADS:
                futures.append(pool.submit(on_device, one, which))
                programs[which, one.name] = functools.partial(result, futures[-1])
            else:
                programs[which, one.name] = functools.partial(build, one, arrays, which)
    try:
        yield programs, lambda: concurrent.futures.wait(futures, timeout=budget.left)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _reference(case: Case, arrays: Arrays) -> list[np.ndarray]:
    """Returns output and gradients of the first head, in float64 on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        checked = [np.asarray(array) for array in case.checked(arrays)]
        return expected(case.weights, checked, case.rows, case.passes[-1])


def _check(
    program: Program, case: Case, arrays: Arrays, wanted: Sequence[np.ndarray], row: Row
) -> Any:
    """Runs a program once, which also warms it up, and checks the first head; returns operands."""
    row.peak_bytes = program.peak_bytes
    partly = [*arrays[:-1], only_rows(arrays[-1], case.rows, slice(1))]
    with _peak_of_torch(row):
        results = program.run(program.place(partly))
        program.wait(results)
    found = program.fetch(results, FIRST)
    row.error = relative_error(found, wanted[: len(found)], case.rows)
    demand(row.error, TOLERANCE)
    return program.place(arrays)


@contextlib.contextmanager
def _peak_of_torch(row: Row) -> Iterator[None]:
    """Sets the peak memory of a row by PyTorch's allocator, if the peak is not known yet."""
    torch = sys.modules.get("torch")
    if row.peak_bytes is not None or torch is None or not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield
    row.peak_bytes = torch.cuda.max_memory_allocated() - before


def _chain(program: Program, placed: Any, calls: int) -> tuple[float, float]:
    """Runs a chain; returns the seconds of a call, and the seconds to start a call."""
    begin = time.perf_counter()
    for _ in range(calls):
        results = program.run(placed)
    started = time.perf_counter()
    program.wait(results)
    return (time.perf_counter() - begin) / calls, (started - begin) / calls


def _calls(program: Program, placed: Any) -> int:
    """Returns the number of calls in a chain; the program is warm afterwards."""
    _chain(program, placed, 1)
    seconds, _ = _chain(program, placed, 2)
    return max(1, min(MOST_CALLS, math.ceil(CHAIN_SECONDS / seconds)))


def _time(taking_part: Sequence[tuple[Row, Program, Any]], rounds: int, budget: Budget) -> None:
    """Times one chain of each contender per round."""
    starts: dict[str, list[float]] = {row.contender: [] for row, *_ in taking_part}
    for row, program, placed in taking_part:
        with _recording(row):
            row.calls = _calls(program, placed)
    begin = time.monotonic()
    for index in range(rounds):
        enough = time.monotonic() - begin > ENOUGH_SECONDS or not budget.left
        if index >= FEWEST_ROUNDS and enough:
            break
        for row, program, placed in in_turn(taking_part, index):
            if row.skipped is None and row.calls is not None:
                with _recording(row):
                    seconds, start = _chain(program, placed, row.calls)
                    row.rounds.append(seconds)
                    starts[row.contender].append(start)
    for row, *_ in taking_part:
        if row.skipped is None:
            row.start_seconds = statistics.median(starts[row.contender])


def _summarise(row: Row, rates: Sequence[machine.Rate]) -> None:
    """Computes the median of a row, and its rates."""
    if row.skipped is not None:
        return
    best = {r.kind: max(s.per_second for s in rates if s.kind == r.kind) for r in rates}
    row.seconds = statistics.median(row.rounds)
    row.flops_per_second = row.flops / row.seconds
    row.bytes_per_second = row.traffic / row.seconds
    row.product_share = row.flops_per_second / best["product"]
    row.copy_share = row.bytes_per_second / best["copy"]
