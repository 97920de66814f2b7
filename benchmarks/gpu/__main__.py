"""Benchmark of effattn's kernels beside other libraries, on one CUDA GPU.

python -m benchmarks.gpu --help
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks.arguments import at_least, output_folder, reason_against
from benchmarks.gpu import measure, report
from benchmarks.gpu.cases import DTYPE, FULL, TINY, cases
from benchmarks.gpu.contenders import OURS, contenders
from benchmarks.gpu.device import about_device

MINUTES, ROUNDS, QUICK_ROUNDS = 7.0, 7, 3
REPORT_SECONDS = 15  # part of the minutes that the report takes
MEMORY_OPTIONS = {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}


def minutes(text: str) -> float:
    """Returns the value of `--minutes`, a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text!r}")
    return number


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Measures effattn's kernels beside cuDNN, Tokamax, PyTorch, "
        "flash-linear-attention and jax-linear-attention, interleaved, on the first CUDA GPU. "
        "The report names peers that are not installed.",
        allow_abbrev=False,
    )
    parser.add_argument("--only", nargs="+", choices=OURS, default=list(OURS), help="default: all")
    parser.add_argument(
        "--minutes",
        type=minutes,
        default=MINUTES,
        help="time limit for compiling and timing, default %(default)s",
    )
    parser.add_argument(
        "--rounds", type=at_least(1), help=f"maximum number of rounds, default {ROUNDS}"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny arrays and few rounds, to test the program"
    )
    parser.add_argument(
        "--platform", choices=("cuda", "cpu"), default="cuda", help="cpu needs --quick"
    )
    parser.add_argument(
        "--output",
        type=output_folder,
        default=Path("runs/gpu"),
        help="report folder, default %(default)s",
    )
    options = parser.parse_args(argv)
    if options.platform == "cpu" and not options.quick:
        parser.error("--platform cpu needs --quick, as the full sizes are for a GPU")
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the report; returns 1 if effattn itself failed or gave wrong results."""
    begin = time.monotonic()
    options = parse(argv)
    folder: Path = options.output
    if reason := reason_against(folder):
        print(reason, file=sys.stderr)
        return 2
    if options.platform == "cuda" and not MEMORY_OPTIONS & os.environ.keys():
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.6"  # the rest is for PyTorch
    try:
        # The reference is computed on the CPU.
        device, _ = (jax.devices(name)[0] for name in (options.platform, "cpu"))
    except (RuntimeError, AssertionError) as error:  # an AssertionError under JAX_PLATFORMS=cuda
        reason = (str(error) or "no backend").splitlines()[0]
        print(
            f"JAX finds no CUDA device, or no CPU beside it ({reason}); "
            "without a GPU, pass --platform cpu --quick to test the program",
            file=sys.stderr,
        )
        return 2
    with jax.default_device(device):
        return _run(options, device, begin)


def _run(options: argparse.Namespace, device: jax.Device, begin: float) -> int:
    about = about_device(device)
    print(f"{about['device']['name']}, load average {about['load_average'][0]}")
    budget = measure.Budget(60 * options.minutes - REPORT_SECONDS - (time.monotonic() - begin))
    sizes = TINY if options.quick else FULL
    rates = measure.rates(sizes, options.platform, options.rounds)
    for rate in rates:
        print(f"  {rate.per_second / 1e9:9.1f} G/s  {rate.of}")
    keys = jax.random.split(jax.random.key(0), 4)
    draws = [jax.random.normal(key, (sizes.tokens * sizes.hidden,), DTYPE) for key in keys]
    rows: list[measure.Row] = []
    for case in cases(sizes):
        if case.comparison in options.only:
            taking_part = contenders(case, options.platform)
            rows += measure.compare(
                case, taking_part, draws, rates, budget, options.rounds, device, _show
            )
    settings = {
        "only": options.only, "minutes": options.minutes, "rounds": options.rounds,
        "quick": options.quick, "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip
    text = report.write(options.output, about, settings, rates, rows)
    print(f"\n{text}\nwritten to {options.output}")
    wrong = [row for row in rows if row.contender.startswith("effattn") and row.failed]
    for row in wrong:
        where = f"{row.comparison}, {row.variant}, {row.which}"
        print(f"{row.contender} was not timed: {where}: {row.skipped}", file=sys.stderr)
    return 1 if wrong else 0


def _show(row: measure.Row) -> None:
    """Prints the result of a row."""
    where = f"{row.comparison}, {row.variant}, {row.which}: {row.contender}"
    if row.seconds is None:
        print(f"{where} - ({row.skipped})", flush=True)
        return
    rate = (row.flops_per_second or 0) / 1e12
    print(f"{where} {row.seconds * 1e3:.3f} ms, {rate:.1f} TFLOP/s", flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A compilation in a thread cannot be stopped, and `sys.exit` would wait for it.
    os._exit(code)
