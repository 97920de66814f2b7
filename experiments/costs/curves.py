"""Time and memory of a few layers against length, in less than a minute."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.costs import figures, measuring, theory
from experiments.costs.layers import Layer, Workload, compile_pass, directions_of

LENGTHS = tuple(4**n for n in range(4, 10))  # 256 to 262,144
WORKLOAD = Workload()
# A line of the figure: exact attention of effattn does not store its matrices.
MATRIX = f"attention matrices of {WORKLOAD.heads} heads"
MOST_BYTES = 2e9
ROUNDS = 3


class Point(NamedTuple):
    """Forward pass of a layer: mechanism, tokens, median seconds, and bytes in addition to tokens.

    The bytes are the temporary memory of the compiled program.
    """

    mechanism: str
    length: int
    seconds: float
    bytes: int


def measure_lengths(
    mechanisms: Sequence[str], lengths: Sequence[int] = LENGTHS, seconds: float = 45.0
) -> list[Point]:
    """Measures the forward pass of layers, shortest length first, until the time is over.

    Args:
      mechanisms: registered names; a mechanism with both directions is causal.
      lengths: numbers of tokens, each at most 4 times the one before.
      seconds: time for everything, compilation included. A mechanism leaves the longer lengths if
        its next length would take more than the rest of the time.
    """
    deadline = time.monotonic() + seconds
    points: list[Point] = []
    expected = dict.fromkeys(mechanisms, 0.0)  # seconds of the next length
    for length in lengths:
        for name in mechanisms:
            begin = time.monotonic()
            if begin + expected[name] > deadline:
                expected[name] = float("inf")
                continue
            layer = Layer(name, directions_of(name)[0], length, WORKLOAD)
            budget = measuring.Budget(ROUNDS, seconds / 50, MOST_BYTES)
            try:
                program = compile_pass(layer, "forward", count=False)
                if program.needed_bytes > MOST_BYTES:
                    expected[name] = float("inf")
                    continue
                times = measuring.in_turns([program.start()], budget)[0]
            except Exception as error:  # a mechanism of the user's own may not take this size
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                print(f"not measured: {name} with {length} tokens ({reason})", flush=True)
                expected[name] = float("inf")
                continue
            median = statistics.median(t for t in times if t is not None)
            points.append(Point(name, length, median, program.temporary_bytes))
            # Compilation takes as long at the next length; calls take 16 times as long at worst.
            calls = (ROUNDS + 1) * median
            expected[name] = time.monotonic() - begin + 15 * calls
    return points


def draw(path: Path, points: Sequence[Point]) -> None:
    """Draws time and memory against length, with the size of the attention matrices as a line."""
    names = dict.fromkeys(point.mechanism for point in points)

    def lines(value: str) -> dict[str, figures.Line]:
        of_names = {name: [p for p in points if p.mechanism == name] for name in names}
        return {
            name: ([p.length for p in mine], [getattr(p, value) for p in mine])
            for name, mine in of_names.items()
        }

    lengths = sorted({point.length for point in points})
    matrices = [WORKLOAD.heads * theory.matrix_bytes(length, 4) for length in lengths]
    figures.draw_side_by_side(
        path,
        f"Forward pass of one layer, {WORKLOAD}",
        [(figures.SECONDS, lines("seconds")),
         (figures.BYTES, lines("bytes") | {MATRIX: (lengths, matrices)})],
        MATRIX,
    )  # fmt: skip
