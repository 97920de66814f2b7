"""Benchmark of effattn beside JAX, Tokamax, PyTorch and jax-linear-attention, on the CPU.

python -m benchmarks.run --help
"""

import argparse
import collections
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks import machine, measure, report
from benchmarks.arguments import at_least, output_folder, reason_against
from benchmarks.contenders import COMPARISONS
from benchmarks.workloads import PASSES, draw

LENGTHS, ROUNDS, RATE_SECONDS = (1024, 4096, 8192, 16384), 9, 2.0
QUICK_LENGTHS, QUICK_ROUNDS, QUICK_RATE_SECONDS = (512, 1024), 3, 0.2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description="Measures effattn beside JAX, Tokamax, PyTorch and jax-linear-attention, "
        "interleaved, on the CPU. Peers that are not installed are skipped.",
        allow_abbrev=False,
    )
    lengths = " ".join(map(str, LENGTHS))
    parser.add_argument(
        "--lengths", type=at_least(16), nargs="+", metavar="TOKENS", help=f"default {lengths}"
    )
    parser.add_argument(
        "--rounds", type=at_least(1), help=f"calls of each contender, default {ROUNDS}"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=COMPARISONS,
        default=list(COMPARISONS),
        help="comparisons, default all",
    )
    parser.add_argument(
        "--quick", action="store_true", help="short lengths and few rounds, to test the program"
    )
    parser.add_argument(
        "--output",
        type=output_folder,
        default=Path("runs/benchmarks"),
        help="folder of the report, default %(default)s",
    )
    options = parser.parse_args(argv)
    options.lengths = options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes the report; returns 1 if effattn itself failed or gave wrong results."""
    options = parse(argv)
    folder: Path = options.output
    if reason := reason_against(folder):
        print(reason, file=sys.stderr)
        return 2
    jax.config.update("jax_platforms", "cpu")
    about = machine.describe()
    print(f"{about['cpu']}, {about['cores']} cores, load average {about['load_average'][0]}")
    rates = machine.rates(QUICK_RATE_SECONDS if options.quick else RATE_SECONDS)
    for rate in rates:
        print(f"  {rate.per_second / 1e9:6.1f} G/s  {rate.of}")
    rows: list[measure.Row] = []
    slow: dict[tuple[str, str], dict[str, str]] = collections.defaultdict(dict)
    for length in sorted(options.lengths):
        arrays = draw(length)
        for comparison in options.only:
            ours, *others = COMPARISONS[comparison]
            for which in PASSES:
                print(f"{length} {comparison}, {which}:", end=" ", flush=True)
                done = measure.compare(
                    comparison,
                    (ours, *others),
                    arrays,
                    which,
                    options.rounds,
                    rates,
                    slow[comparison, which],
                )
                print("; ".join(map(_brief, done)), flush=True)
                rows += done
    chosen = ("lengths", "rounds", "only")
    settings = {name: getattr(options, name) for name in chosen}
    print(f"\n{report.write(folder, about, settings, rates, rows)}\nwritten to {folder}")
    wrong = [row for row in rows if row.contender.startswith("effattn") and row.seconds is None]
    for row in wrong:
        where = f"{row.comparison}, {row.which}, {row.length}"
        print(f"{row.contender} was not timed: {where}: {row.skipped}", file=sys.stderr)
    return 1 if wrong else 0


def _brief(row: measure.Row) -> str:
    if row.seconds is None:
        return f"{row.contender} - ({row.skipped})"
    ratio = "" if row.ratio is None else f" ({row.ratio:.2f})"
    return f"{row.contender} {row.seconds * 1e3:.1f} ms{ratio}"


if __name__ == "__main__":
    sys.exit(main())
