"""Benchmark of a layer of every mechanism beside exact attention, on the CPU.

python -m benchmarks.layers --help
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks import machine
from benchmarks.arguments import at_least, output_folder, reason_against
from benchmarks.measure import ENOUGH_SECONDS, FEWEST_ROUNDS, MOST_BYTES, PAUSE, in_turn
from benchmarks.mixers import FEATURES, HEADS, mixer_of
from effattn import registry

EXACT = "softmax"


@dataclasses.dataclass
class Row:
    """Layer of a mechanism in one direction.

    Attributes:
      mechanism: registered name.
      direction: "causal" or "bidirectional".
      temporary_bytes: temporary memory of the compiled program.
      rounds: seconds of each call; None in rounds without this mechanism.
      seconds: median of the rounds.
      speedup: time of exact attention over time of this layer in the same round, the median.
      skipped: reason why the layer was not timed.
    """

    mechanism: str
    direction: str
    temporary_bytes: int | None = None
    rounds: list[float | None] = dataclasses.field(default_factory=list)
    seconds: float | None = None
    speedup: float | None = None
    skipped: str | None = None


def compile_layer(name: str, length: int, is_causal: bool, backward: bool) -> tuple[Callable, int]:
    """Compiles a layer.

    Returns:
      `(call, temporary_bytes)`.

    Raises:
      MemoryError: parameters or temporaries need more than `MOST_BYTES`.
    """
    x = jax.random.normal(jax.random.key(0), (1, length, FEATURES))
    abstract = nnx.eval_shape(lambda: mixer_of(name, length, is_causal))
    graph, *parts = nnx.split(abstract, nnx.Param, ...)
    shapes = tuple(parts)
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    if needed > MOST_BYTES:
        raise MemoryError(f"needs {needed / 1e9:.1f} GB of parameters")

    def forward(state, x):
        return nnx.merge(graph, *state)(x)

    def both(state, x):
        trained, rest = state
        out, pull_back = jax.vjp(lambda trained, x: forward((trained, rest), x), trained, x)
        return out, pull_back(out)

    compiled = jax.jit(both if backward else forward).lower(shapes, x).compile()
    memory = compiled.memory_analysis()
    assert memory is not None  # CPUs report it
    if memory.temp_size_in_bytes > MOST_BYTES:
        raise MemoryError(f"needs {memory.temp_size_in_bytes / 1e9:.1f} GB of temporaries")
    state = jax.jit(lambda: nnx.split(mixer_of(name, length, is_causal), nnx.Param, ...)[1:])()
    return lambda: jax.block_until_ready(compiled(state, x)), memory.temp_size_in_bytes


def measure(
    names: Sequence[str], length: int, is_causal: bool, backward: bool, rounds: int
) -> list[Row]:
    """Measures layers in turns, one call per round; the first row is exact attention."""
    direction = "causal" if is_causal else "bidirectional"
    rows, taking_part = [], []
    for name in dict.fromkeys((EXACT, *names)):
        row = Row(name, direction)
        rows.append(row)
        try:
            call, row.temporary_bytes = compile_layer(name, length, is_causal, backward)
        except MemoryError as error:
            row.skipped = str(error)
            continue
        call()  # the first call is slower
        taking_part.append((row, call))
        print(".", end="", flush=True)
    for index in range(rounds):
        for row, call in in_turn(taking_part, index):
            spent = sum(seconds or 0 for seconds in row.rounds)
            # Exact attention takes part in all rounds: the speedups need its times.
            if index >= FEWEST_ROUNDS and spent >= ENOUGH_SECONDS and row is not rows[0]:
                row.rounds.append(None)
                continue
            time.sleep(PAUSE)
            start = time.perf_counter()
            call()
            row.rounds.append(time.perf_counter() - start)
    print()
    for row, _ in taking_part:
        row.seconds = statistics.median(seconds for seconds in row.rounds if seconds is not None)
        pairs = zip(rows[0].rounds, row.rounds, strict=True)
        row.speedup = statistics.median(exact / own for exact, own in pairs if exact and own)
    return rows


def markdown(about: dict[str, Any], length: int, backward: bool, rows: Sequence[Row]) -> str:
    """Returns the table of each direction, fastest layer first."""
    lines = [
        f"Time of one call of a layer, {'forward + backward' if backward else 'forward'}, with "
        f"projections, of {FEATURES} features and {HEADS} heads on {length:,} tokens, float32: "
        f"{about['cpu']}, {about['cores']} cores, jax {about['versions']['jax']}, load average "
        f"{about['load_average'][0]} at the start.",
    ]
    for direction in dict.fromkeys(row.direction for row in rows):
        lines += [
            "",
            f"| {direction} mechanism | ms | times as fast as exact | temporaries |",
            "|---|---:|---:|---:|",
        ]
        mine = [row for row in rows if row.direction == direction]
        for row in sorted(mine, key=lambda row: row.seconds or float("inf")):
            cells = f"- | {row.skipped} | -"
            if row.seconds is not None and row.temporary_bytes is not None:
                megabytes = f"{row.temporary_bytes / 1e6:,.0f} MB"
                cells = f"{1e3 * row.seconds:,.1f} | {row.speedup:.2f} | {megabytes}"
            lines.append(f"| `{row.mechanism}` | {cells} |")
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layers",
        description="Measures a layer of every mechanism beside exact attention, interleaved.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--length", type=at_least(16), default=16384, metavar="TOKENS", help="default %(default)s"
    )
    parser.add_argument("--rounds", type=at_least(1), default=5, help="default %(default)s")
    parser.add_argument(
        "--only", nargs="+", choices=registry.names(), help="default: all mechanisms"
    )
    parser.add_argument(
        "--backward", action="store_true", help="measure forward + backward, not forward alone"
    )
    parser.add_argument("--output", type=output_folder, default=Path("runs/benchmarks"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if reason := reason_against(options.output):
        print(reason, file=sys.stderr)
        return 2
    jax.config.update("jax_platforms", "cpu")
    about, rows = machine.describe(), []
    for is_causal in (True, False):
        able = registry.names("causal" if is_causal else "bidirectional")
        names = [name for name in able if options.only is None or name in options.only]
        if names:
            rows += measure(names, options.length, is_causal, options.backward, options.rounds)
    table = markdown(about, options.length, options.backward, rows)
    (options.output / "layers.md").write_text(table, encoding="utf-8")
    settings = {"length": options.length, "backward": options.backward, "rounds": options.rounds}
    record = {"machine": about, **settings, "rows": [dataclasses.asdict(row) for row in rows]}
    (options.output / "layers.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{table}\nwritten to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
