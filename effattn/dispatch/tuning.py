"""Autotuning: measures the fastest implementation and tile sizes of a call on this device."""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from effattn import dispatch
from effattn.arrays import checks
from effattn.dispatch import cache
from effattn.dispatch.cache import Choice

_ENOUGH = 5e-3  # least seconds of one measurement, of several calls in sequence if needed
_LONG = 2.0  # seconds of measurements, after which a candidate is not measured again
_BETTER = 0.97  # a candidate must take less than this fraction of the time of the best so far
# Tolerance of results relative to the largest, by bytes of the dtype: devices round products.
_TOLERANCE = {8: 1e-6, 4: 1e-2, 2: 3e-2}


class Row(NamedTuple):
    """Measurement of one candidate for one call.

    Attributes:
      call: signature of the call.
      choice: the implementation, and its tiles where they differ from the defaults.
      seconds: median time of the whole function; None if the candidate failed.
      reason: why the candidate failed.
    """

    call: str
    choice: Choice
    seconds: float | None
    reason: str = ""


class Tuning(NamedTuple):
    """Result of `tune`; `str` gives a Markdown table.

    Attributes:
      device: kind of the device.
      rows: measurements, in order.
      chosen: the fastest choice for each call.
    """

    device: str
    rows: tuple[Row, ...]
    chosen: Mapping[str, Choice]

    def __str__(self) -> str:
        lines = []
        for call, choice in self.chosen.items():
            lines += [f"{call}, on {self.device}: {choice}", ""]
            lines += ["| implementation and tiles | ms |", "| --- | --- |"]
            for row in self.rows:
                if row.call == call:
                    time = row.reason if row.seconds is None else f"{row.seconds * 1e3:.3f}"
                    lines.append(f"| {row.choice} | {time} |")
            lines.append("")
        return "\n".join(lines[:-1])


@checks.checked
def tune(
    function: Callable[..., Any],
    *arguments: Any,
    gradients: bool = True,
    rounds: int = 5,
    **options: Any,
) -> Tuning:
    """Measures a call on this device, and makes `implementation=None` use the fastest choice.

    All implementations that accept the call and run on this device are timed within the whole
    function; then the tile sizes of the fastest one, kernel by kernel. An implementation whose
    results disagree with XLA is never chosen. The choice applies to programs that are compiled from
    now on, for calls with similar shapes (lengths and rows are rounded up to powers of two) and the
    same options, on this kind of device and with this version of JAX. It is stored in the user's
    cache folder (`effattn.dispatch.cache.cache_file()`).

    Tuning one attention call compiles about twenty programs, which takes minutes on two CPU cores;
    a GPU has more kernels to try. Each program is checked once, and then timed in `rounds` rounds.
    A candidate is not timed again once its measurements sum to two seconds, so a call of several
    seconds runs only twice.

    The choice also applies on several devices, where each of them can run the kernel for its part.

    Args:
      function: a function of effattn, or a function that calls effattn, without `implementation`:
        for example `effattn.dot_product_attention` or the `__call__` of a model.
      arguments: arguments of the function: pytrees of arrays.
      gradients: measure the function with the gradients of all floating-point arrays; False
        measures inference alone.
      rounds: number of measurements of each candidate; fewer if they take seconds.
      options: keyword arguments of the function; any values, without gradients.

    Returns:
      A `Tuning`; print it.

    Raises:
      ValueError: the function makes no call that can be tuned, or names an implementation.
    """
    bench = _Bench(function, arguments, options, gradients, rounds)
    chosen: dict[str, Choice] = {}
    rows: list[Row] = []
    for call, takes in bench.calls.items():
        compete = functools.partial(_compete, bench, call, chosen, rows)
        best = compete([Choice("xla"), *map(Choice, filter(_is_kernel_here, takes))])
        for kernel, tiles in takes[best.implementation].items():
            others = [best._replace(tiles=(*best.tiles, (kernel, tile))) for tile in tiles]
            best = compete([best, *others])
        chosen[call] = best
    cache.save(chosen)
    return Tuning(cache.device_kind(), tuple(rows), chosen)


def _is_kernel_here(implementation):
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    return dispatch.PLATFORMS[implementation] == platform


def _compete(bench, call, chosen, rows, candidates):
    """Times candidates; returns the first one (the best so far), or a clearly faster one."""
    programs = {}
    for choice in candidates:
        try:
            programs[choice] = bench.compile({**chosen, call: choice})
        except Exception as error:  # compilers raise any exception for tiles that do not fit
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
            rows.append(Row(call, choice, None, reason))
    seconds = bench.time(programs)
    measured = {row.choice for row in rows if row.call == call}
    rows += [Row(call, *each) for each in seconds.items() if each[0] not in measured]
    best, fastest = candidates[0], min(seconds, key=lambda choice: seconds[choice])
    return fastest if seconds[fastest] < _BETTER * seconds[best] else best


class _Disagrees(Exception):
    """The results differ from those of XLA."""


def _check(found, wanted):
    limit = _TOLERANCE[found.dtype.itemsize]
    found, wanted = (x.astype(np.float64) for x in (found, wanted))
    same = found == wanted  # infinities too
    with np.errstate(invalid="ignore"):
        error = np.max(np.abs(found - wanted), initial=0.0, where=~same)
    largest = np.max(np.abs(wanted), initial=0.0, where=np.isfinite(wanted))
    if not error <= limit * largest:  # NaN is not
        raise _Disagrees(
            f"results must differ from XLA's by at most {limit:.0e} of the largest, {largest:.1e}, "
            f"got {error:.1e}"
        )


class _Bench:
    """Benchmark of one function call: compiles the call with given choices, and times it.

    Attributes:
      calls: signatures of the tunable calls that the function makes, with their candidates.
    """

    def __init__(self, function, arguments, options, gradients, rounds):
        leaves, structure = jax.tree.flatten(arguments)
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        self.floating = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
        self.others = [leaf for leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.floating)]
        kinds = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
        self.rounds = rounds

        def run(floating, others):
            floating, others = iter(floating), iter(others)
            merged = [next(floating) if kind else next(others) for kind in kinds]
            results = jax.tree.leaves(function(*jax.tree.unflatten(structure, merged), **options))
            return [x for x in results if jnp.issubdtype(jnp.result_type(x), jnp.floating)]

        def run_with_gradients(floating, others):
            results, pull_back = jax.vjp(lambda floating: run(floating, others), floating)
            return results, pull_back([jnp.ones_like(x) for x in results])

        self.function, self.wanted = run, None
        trial = cache.Trial({})
        with trial.running():
            jax.eval_shape(run, self.floating, self.others)
        self.calls = {call: takes for call, (takes, _) in trial.called.items()}
        if not self.calls:
            raise ValueError(
                f"{getattr(function, '__name__', function)} must call effattn functions that can "
                "be tuned, with implementation=None, got none; leave `implementation` out"
            )
        if gradients and all(differentiable for _, differentiable in trial.called.values()):
            self.function = run_with_gradients
        self.wanted = self._fetch(self.compile({}))

    def compile(self, choices):
        """Compiles and runs a program; `_Disagrees` if its results differ from XLA's."""
        # A new lambda, because `jax.jit` reuses programs of the same function.
        with cache.Trial(choices).running():
            traced = jax.jit(lambda *operands: self.function(*operands))
            program = traced.lower(self.floating, self.others).compile()
        if self.wanted is not None:
            for found, wanted in zip(self._fetch(program), self.wanted, strict=True):
                _check(found, wanted)
        return program

    def _fetch(self, program):
        results = program(self.floating, self.others)
        return [np.asarray(x) for x in jax.tree.leaves(results)]

    def time(self, programs):
        """Median seconds of a call of each program; in each round the programs take turns."""
        seconds: dict[Any, list[float]] = {name: [] for name in programs}
        for _ in range(self.rounds):
            for name, program in programs.items():
                if sum(seconds[name]) < _LONG:
                    seconds[name].append(self._seconds(program))
        return {name: statistics.median(each) for name, each in seconds.items()}

    def _seconds(self, program):
        calls, spent = 1, 0.0
        while True:
            start = time.perf_counter()
            for _ in range(calls):
                results = program(self.floating, self.others)
            jax.block_until_ready(results)
            spent = time.perf_counter() - start
            if spent >= _ENOUGH:
                return spent / calls
            calls *= 2
