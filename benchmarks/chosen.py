"""Benchmark of attention to chosen keys at the papers' sizes, beside exact attention, on the CPU.

python -m benchmarks.chosen --help
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import effattn
from benchmarks import machine
from benchmarks.arguments import at_least, output_folder, reason_against
from benchmarks.measure import PAUSE, TOLERANCE

# Tokens of the sequence in which results are checked.
_CHECKED = 1500


class Case(NamedTuple):
    """A mechanism with the sizes of its paper.

    Attributes:
      function: the mechanism.
      heads, key_heads, size, value_size: heads, and features of keys and values.
      options: static options.
      further: shapes of the other arrays, without batch and tokens.
    """

    function: Callable[..., jax.Array]
    heads: int
    key_heads: int
    size: int
    value_size: int
    options: dict[str, Any]
    further: dict[str, tuple[int, ...]]

    def arrays(self, length: int) -> dict[str, np.ndarray]:
        """Draws the arrays, normal float32 `(T, ...)`; weights and gates are not negative."""
        shapes = {
            "query": (self.heads, self.size),
            "key": (self.key_heads, self.size),
            "value": (self.key_heads, self.value_size),
            **self.further,
        }
        draws = np.random.default_rng(0)
        found = {
            name: draws.standard_normal((length, *shape), dtype=np.float32)
            for name, shape in shapes.items()
        }
        return {
            name: np.abs(x) if name in ("gates", "index_weights") else x
            for name, x in found.items()
        }


def cases(share: int = 1) -> dict[str, Case]:
    """The cases; indexed attention has 1/`share` of the paper's heads and of its index heads."""
    return {
        # Yuan et al. 2025: one of the four groups of heads, and the default sizes.
        "native_sparse": Case(
            effattn.native_sparse_attention, 16, 1, 192, 128, {}, {"gates": (16, 3)}
        ),
        # Lu et al. 2025, scaling laws: blocks of 512 tokens, of which a query chooses three.
        "moba": Case(effattn.moba_attention, 4, 4, 128, 128, {"block_size": 512, "top_k": 3}, {}),
        # DeepSeek-AI 2025: all heads read one latent of 512 features and 64 rotary ones.
        "indexed": Case(
            effattn.indexed_attention,
            128 // share,
            1,
            576,
            512,
            {"top_k": 2048},
            {
                "index_query": (64 // share, 128),
                "index_key": (128,),
                "index_weights": (64 // share,),
            },
        ),
    }


@dataclasses.dataclass
class Row:
    """A mechanism beside exact attention with the same heads.

    Attributes:
      mechanism: name of the case.
      sizes: the heads and the options, as text.
      error: largest difference from XLA in a short sequence, relative to the largest element.
      seconds, exact_seconds: medians of the rounds.
      ratio: exact attention's time over the mechanism's in the same round, the median.
    """

    mechanism: str
    sizes: str
    error: float
    seconds: float
    exact_seconds: float
    ratio: float


def _exact(query, key, value, **_):
    return effattn.dot_product_attention(query, key, value, is_causal=True)


def _program(function, arrays, backward: bool, **options):
    """Compiles a function of arrays; the other arrays of `_exact` have no gradient."""

    def both(arrays):
        out, pull_back = jax.vjp(lambda arrays: function(**arrays, **options), arrays)
        return out, pull_back(out)

    def forward(arrays):
        return function(**arrays, **options)

    return jax.jit(both if backward else forward).lower(arrays).compile()


def error_of(case: Case) -> float:
    """Largest difference from the XLA implementation, relative to the largest element."""
    arrays = case.arrays(_CHECKED)
    ours, expected = (
        np.asarray(case.function(**arrays, **case.options, implementation=name))
        for name in (None, "xla")
    )
    return float(np.abs(ours - expected).max() / np.abs(expected).max())


def measure(name: str, case: Case, length: int, rounds: int, backward: bool) -> Row:
    """Measures a case and exact attention in turns."""
    error = error_of(case)
    if not error < TOLERANCE:
        raise ValueError(f"{name} differs from XLA by {error:.1e}")
    arrays = {key: jnp.asarray(x) for key, x in case.arrays(length).items()}
    programs = (
        _program(case.function, arrays, backward, **case.options),
        _program(_exact, arrays, backward),
    )
    times: list[list[float]] = [[], []]
    # The first call is slower.
    for number in range(rounds + 1):
        for program, seconds in zip(programs, times, strict=True):
            time.sleep(PAUSE)
            start = time.perf_counter()
            jax.block_until_ready(program(arrays))
            if number:
                seconds.append(time.perf_counter() - start)
    ratios = [exact / own for own, exact in zip(*times, strict=True)]
    sizes = f"{case.heads} heads of {case.size} and {case.value_size}, {case.key_heads} of keys"
    options = "".join(f", {key} {value}" for key, value in case.options.items())
    medians = map(statistics.median, (*times, ratios))
    return Row(name, sizes + options, error, *medians)


def markdown(about: dict[str, Any], length: int, backward: bool, rows: Sequence[Row]) -> str:
    """Returns the table."""
    lines = [
        f"Time of a call, {'forward + backward' if backward else 'forward'}, on {length:,} tokens, "
        f"float32: {about['cpu']}, {about['cores']} cores, jax {about['versions']['jax']}, load "
        f"average {about['load_average'][0]} at the start.",
        "",
        "| mechanism | sizes | ms | exact, ms | times as fast |",
        "|---|---|---:|---:|---:|",
        *(
            f"| `{row.mechanism}` | {row.sizes} | {1e3 * row.seconds:,.0f} | "
            f"{1e3 * row.exact_seconds:,.0f} | {row.ratio:.2f} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chosen",
        description="Measures attention to chosen keys at the papers' sizes, beside exact causal "
        "attention with the same heads. Indexed attention needs 12 GB of memory.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--length", type=at_least(1), default=16384, metavar="TOKENS", help="default %(default)s"
    )
    parser.add_argument("--rounds", type=at_least(1), default=3, help="default %(default)s")
    parser.add_argument("--only", nargs="+", choices=cases(), default=[*cases()])
    parser.add_argument(
        "--share",
        type=int,
        choices=(1, 2, 4, 8, 16, 32, 64),
        default=1,
        help="indexed attention with 1/SHARE of its heads and index heads, to save memory",
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
    for name in options.only:
        case = cases(options.share)[name]
        rows.append(measure(name, case, options.length, options.rounds, options.backward))
        print(".", end="", flush=True)
    table = markdown(about, options.length, options.backward, rows)
    (options.output / "chosen.md").write_text(table, encoding="utf-8")
    settings = {
        "length": options.length,
        "rounds": options.rounds,
        "share": options.share,
        "backward": options.backward,
    }
    record = {"machine": about, **settings, "rows": [dataclasses.asdict(row) for row in rows]}
    (options.output / "chosen.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{table}\nwritten to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
