"""Benchmark of one decoding step after short and long prefixes, on the CPU.

python -m benchmarks.decode --help
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.arguments import at_least, output_folder, reason_against
from benchmarks.mixers import FEATURES, HEADS, mixer_of
from effattn import registry

PIECE = 4096


class Row(NamedTuple):
    """Decoding steps of a mechanism.

    Attributes:
      mechanism: registered name.
      state_bytes: size of one sequence's decode state, with room for the longest prefix.
      seconds: median time of a step, by prefix.
    """

    mechanism: str
    state_bytes: int
    seconds: dict[int, float]

    @property
    def ratio(self) -> float:
        """Time of a step after the longest prefix over the time after the shortest prefix."""
        return self.seconds[max(self.seconds)] / self.seconds[min(self.seconds)]


def state_bytes(name: str, length: int) -> int:
    state = jax.eval_shape(lambda: mixer_of(name, length).init_state(1, length, jnp.float32))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def measure(name: str, prefixes: Sequence[int], rounds: int) -> Row:
    """Measures steps after each prefix in turns; every prefix has a state of its own."""
    capacity = max(prefixes) + rounds + 2
    mixer = mixer_of(name, capacity)
    prefill = jax.jit(
        lambda mixer, x, state, lengths: mixer.extend(x, state, lengths=lengths)[1],
        donate_argnums=2,
    )
    step = jax.jit(lambda mixer, x, state: mixer.extend(x, state), donate_argnums=2)
    token = jax.random.normal(jax.random.key(0), (1, 1, FEATURES))
    piece = jax.random.normal(jax.random.key(1), (1, PIECE, FEATURES))
    states: dict[int, Any] = {}
    for prefix in prefixes:
        state = mixer.init_state(1, capacity, jnp.float32)
        for start in range(0, prefix, PIECE):
            state = prefill(mixer, piece, state, jnp.array([min(PIECE, prefix - start)]))
        states[prefix] = state
    times: dict[int, list[float]] = {prefix: [] for prefix in prefixes}
    for n in range(rounds + 2):
        for prefix in np.roll(prefixes, n).tolist():
            start_time = time.perf_counter()
            y, states[prefix] = step(mixer, token, states[prefix])
            jax.block_until_ready((y, states[prefix]))
            if n >= 2:
                times[prefix].append(time.perf_counter() - start_time)
    medians = {prefix: statistics.median(of_prefix) for prefix, of_prefix in times.items()}
    return Row(name, state_bytes(name, capacity), medians)


def markdown(about: dict[str, Any], rows: Sequence[Row]) -> str:
    prefixes = sorted(rows[0].seconds)
    lines = [
        f"Milliseconds per decoding step of a mixer with {FEATURES} features and {HEADS} "
        f"heads, batch 1, float32: {about['cpu']}, {about['cores']} cores, "
        f"jax {about['versions']['jax']}.",
        "",
        "| mechanism | state, kB | " + " | ".join(f"after {p}" for p in prefixes) + " | ratio |",
        "| --- |" + " --- |" * (len(prefixes) + 2),
    ]
    for row in rows:
        times = " | ".join(f"{1e3 * row.seconds[p]:.2f}" for p in prefixes)
        kilobytes = round(row.state_bytes / 1e3)
        lines.append(f"| `{row.mechanism}` | {kilobytes} | {times} | {row.ratio:.2f} |")
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode",
        description="Measures a decoding step after prefixes of several lengths, interleaved.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--prefixes", type=at_least(1), nargs="+", default=[64, 65536], metavar="TOKENS"
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=200, help="steps after each prefix, default 200"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=registry.names("decode"),
        help="default: softmax, and all mechanisms whose state does not grow with the length; "
        "without longformer, which has no global tokens here",
    )
    parser.add_argument("--output", type=output_folder, default=Path("runs/benchmarks"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if reason := reason_against(options.output):
        print(reason, file=sys.stderr)
        return 2
    jax.config.update("jax_platforms", "cpu")
    names = options.only or [
        name
        for name in registry.names("decode")
        if name != "longformer"  # without global tokens it equals sliding_window
        and (name == "softmax" or state_bytes(name, 4096) == state_bytes(name, 8192))
    ]
    about, rows = machine.describe(), []
    for name in names:
        rows.append(measure(name, options.prefixes, options.rounds))
        print(f"{name}: {rows[-1].ratio:.2f}", flush=True)
    table = markdown(about, rows)
    (options.output / "decode.md").write_text(table, encoding="utf-8")
    record = {"machine": about, "rounds": options.rounds, "rows": [row._asdict() for row in rows]}
    (options.output / "decode.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{table}\nwritten to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
