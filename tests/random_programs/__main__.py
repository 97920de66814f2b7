"""Random calls of every mechanism against its naive form in float64, for a given time.

    python -m tests.random_programs --minutes 30 --seed 0

A *case* is one call with its gradients: a mechanism, shapes, dtypes, options, and the kind of call
(jit, vmap over any arguments, scan, remat, ...). Cases are counted from 0 and follow from the seed
alone. A few consecutive cases share a *program*, which is everything that costs a compilation, and
differ in values: tokens, lengths, packing, offsets. Each failure prints one line, and
`--seed S --case K` runs case K of seed S again.
"""

import argparse
import sys
import time
import warnings

import jax

from tests.random_programs.cases import Cases


def main(arguments: list[str] | None = None) -> int:
    """Runs the cases; returns the exit status, which is 1 if a case failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long it goes on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one alone")
    parser.add_argument("--from-case", type=int, default=0, help="begin there")
    parser.add_argument("--only", default="", help="mechanisms, as a regular expression")
    options = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", 1)  # one device, so that the default takes kernels
    jax.config.update("jax_disable_most_optimizations", True)  # to compile faster
    warnings.simplefilter("ignore")

    cases = Cases(options.seed, options.only)
    case = options.from_case if options.case is None else options.case
    start = time.monotonic()
    tried = refused = failed = 0
    while time.monotonic() - start < 60 * options.minutes:
        program = cases.program(case)
        if program is not None:
            wrong = cases.run(case)
            tried += 1
            refused += wrong is None
            if wrong:
                failed += 1
                reason = "; ".join(wrong)
                print(f"--seed {options.seed} --case {case}: {reason} | {program}", flush=True)
        if options.case is not None:
            break
        case += 1
    print(
        f"{tried} cases of {cases.programs} programs in {time.monotonic() - start:.0f} s, of which "
        f"{refused} were refused by the implementation that they name; {failed} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
