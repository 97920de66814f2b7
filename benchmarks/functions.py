"""Benchmark of functions at 16,384 tokens, beside exact causal attention, on the CPU.

python -m benchmarks.functions --help

Recurrences have 4 heads of 64 features, or 256 channels; attention to chosen keys has the sizes of
its papers. Exact attention has 4 heads of 64 features, or the papers' heads.
"""

import argparse
import dataclasses
import functools
import inspect
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
_HEADS, _SIZE = 4, 64  # of the recurrences
_WIDTH = _HEADS * _SIZE


class Draw(NamedTuple):
    """Shape and values of an array.

    Attributes:
      shape: shape beside the batch and the tokens; of a parameter, the whole shape.
      values: "normal"; "positive", their absolute values; "unit", normal vectors of length 1;
        "uniform", in [0, 1); "above one", in [1, 2); "log decay", in (-1/20, 0].
      of: "tokens"; "batch", an axis of one row before the tokens; or "parameter".
    """

    shape: tuple[int, ...]
    values: str = "normal"
    of: str = "tokens"

    def array(self, length: int, draws: np.random.Generator) -> np.ndarray:
        """The array, float32."""
        axes = {"tokens": (length,), "batch": (1, length), "parameter": ()}[self.of]
        shape = (*axes, *self.shape)
        ranges = {"uniform": (1, 0), "above one": (1, 1), "log decay": (-1 / 20, 0)}
        if self.values in ranges:
            factor, least = (np.float32(number) for number in ranges[self.values])
            return least + factor * draws.random(shape, np.float32)
        normal = draws.standard_normal(shape, np.float32)
        if self.values == "unit":
            return normal / np.linalg.norm(normal, axis=-1, keepdims=True)
        return np.abs(normal) if self.values == "positive" else normal


class Case(NamedTuple):
    """A mechanism and its arrays.

    Attributes:
      function: the mechanism.
      arrays: a `Draw` for each argument.
      options: static options.
      heads, key_heads, size, value_size: heads of exact attention, and features of keys and values.
    """

    function: Callable[..., jax.Array]
    arrays: dict[str, Draw]
    options: dict[str, Any] = {}
    heads: int = _HEADS
    key_heads: int = _HEADS
    size: int = _SIZE
    value_size: int = _SIZE

    def drawn(self, length: int) -> dict[str, np.ndarray]:
        """Draws the arrays."""
        draws = np.random.default_rng(0)
        return {name: draw.array(length, draws) for name, draw in self.arrays.items()}

    def heads_drawn(self) -> dict[str, Draw]:
        """Query, key and value of exact attention."""
        return {
            "query": Draw((self.heads, self.size)),
            "key": Draw((self.key_heads, self.size)),
            "value": Draw((self.key_heads, self.value_size)),
        }


def chosen_keys(share: int = 1) -> dict[str, Case]:
    """Attention to chosen keys.

    Indexed attention has 1/`share` of the paper's heads and of its index heads.
    """

    def case(function, heads, key_heads, size, value_size, options, **further):
        sizes = heads, key_heads, size, value_size
        arrays = Case(function, {}, options, *sizes).heads_drawn()
        return Case(function, arrays | further, options, *sizes)

    index_heads = 64 // share
    return {
        # Yuan et al. 2025: one of the four groups of heads, and the default sizes.
        "native_sparse": case(
            effattn.native_sparse_attention, 16, 1, 192, 128, {}, gates=Draw((16, 3), "positive")
        ),
        # Lu et al. 2025, scaling laws: blocks of 512 tokens, of which a query chooses three.
        "moba": case(effattn.moba_attention, 4, 4, 128, 128, {"block_size": 512, "top_k": 3}),
        # DeepSeek-AI 2025: all heads read one latent of 512 features and 64 rotary ones.
        "indexed": case(
            effattn.indexed_attention,
            128 // share,
            1,
            576,
            512,
            {"top_k": 2048},
            index_query=Draw((index_heads, 128)),
            index_key=Draw((128,)),
            index_weights=Draw((index_heads,), "positive"),
        ),
    }


def recurrences() -> dict[str, Case]:
    """The recurrent functions, most of them with 4 heads of 64 features."""
    of_head, per_feature, per_head = (
        (_HEADS, _SIZE),
        Draw((_HEADS, _SIZE)),
        Draw((_HEADS,), "uniform"),
    )
    plain = {"query": per_feature, "key": per_feature, "value": per_feature}
    unit = plain | dict.fromkeys(("query", "key"), Draw(of_head, "unit"))
    by_feature, by_head = Draw(of_head, "log decay"), Draw((_HEADS,), "log decay")
    uniform = Draw(of_head, "uniform")
    matrix = Draw((_HEADS, _SIZE, _SIZE), "unit", "parameter")
    of_norm = {
        name: Draw(of_head, "uniform", "parameter")
        for name in ("initial_bias", "norm_scale", "norm_bias")
    }
    of_channels = Draw((_WIDTH,), of="batch")
    of_gates = Draw((_WIDTH,), "uniform", "batch")

    def case(name, arrays, **further):
        function = effattn.registry.get(name).function
        assert function is not None
        return Case(function, arrays | further)

    one_head = {"query": Draw((1, 16)), "key": Draw((1, 16)), "value": Draw((1, _WIDTH))}
    return {
        "retention": case("retention", plain),
        "lightning": case("lightning", plain),
        "gated_linear": case("gated_linear", plain, log_decay=by_feature),
        "hgrn2": case("hgrn2", plain, log_decay=by_feature),
        "gated_slot": case("gated_slot", plain, log_decay=by_feature),
        "mlstm": case("mlstm", plain, log_input_gate=Draw((_HEADS,)), log_forget_gate=by_head),
        "mamba": case(
            "mamba",
            one_head,
            step_size=Draw((1, _WIDTH), "uniform"),
            rate=Draw((1, _WIDTH, 16), "log decay", "parameter"),
        ),
        "mamba2": case(
            "mamba2",
            plain,
            step_size=per_head,
            rate=Draw((_HEADS,), "log decay", "parameter"),
        ),
        "mamba3": case(
            "mamba3",
            plain,
            step_size=per_head,
            log_decay=by_head,
            trapezoid=per_head,
            angle=Draw((_HEADS, _SIZE // 2)),
        ),
        "rwkv4": case(
            "rwkv4",
            {"key": of_channels, "value": of_channels},
            decay=Draw((_WIDTH,), "uniform", "parameter"),
            bonus=Draw((_WIDTH,), of="parameter"),
        ),
        "rwkv6": case("rwkv6", plain, log_decay=by_feature, bonus=Draw(of_head, of="parameter")),
        "rwkv7": case(
            "rwkv7",
            plain,
            log_decay=by_feature,
            removal_key=Draw(of_head, "unit"),
            learning_rate=uniform,
        ),
        "rg_lru": case(
            "rg_lru",
            {"x": of_channels, "recurrence_gate": of_gates, "input_gate": of_gates},
            log_decay=Draw((_WIDTH,), "log decay", "parameter"),
        ),
        "delta_net": case("delta_net", unit, beta=per_head),
        "gated_delta_net": case("gated_delta_net", unit, beta=per_head, log_decay=by_head),
        "gated_delta_net_2": case(
            "gated_delta_net_2", unit, log_decay=by_feature, erase=uniform, write=uniform
        ),
        "kimi_delta": case("kimi_delta", unit, beta=per_head, log_decay=by_feature),
        "delta_product": case(
            "delta_product",
            unit,
            beta=Draw((_HEADS, 2), "uniform"),
            later_keys=Draw((_HEADS, 1, _SIZE), "unit"),
            later_values=Draw((_HEADS, 1, _SIZE)),
            log_decay=by_head,
        ),
        "log_linear": case(
            "log_linear", plain, log_decay=by_head, levels=Draw((_HEADS, 15), "uniform")
        ),
        "mesa": case(
            "mesa",
            unit,
            beta=per_head,
            log_decay=by_head,
            regulariser=Draw(of_head, "above one", "parameter"),
        ),
        "ttt_linear": case(
            "ttt_linear", unit, learning_rate=per_head, initial_weights=matrix, **of_norm
        ),
        "titans": case(
            "titans", unit, learning_rate=per_head, momentum=per_head, log_decay=by_head
        ),
    }


def cases(share: int = 1) -> dict[str, Case]:
    """All cases, by name."""
    return recurrences() | chosen_keys(share)


@dataclasses.dataclass
class Row:
    """A mechanism beside exact attention.

    Attributes:
      mechanism: name of the case.
      sizes: the heads of exact attention and the options, as text.
      error: what `error_of` returns.
      seconds, exact_seconds: medians of the rounds.
      ratio: exact attention's time over the mechanism's in the same round, the median.
    """

    mechanism: str
    sizes: str
    error: float
    seconds: float
    exact_seconds: float
    ratio: float


def _exact(query, key, value):
    return effattn.dot_product_attention(query, key, value, is_causal=True)


def _program(function, arrays, backward: bool, **options):
    """Compiles a function of arrays."""

    def both(arrays):
        out, pull_back = jax.vjp(lambda arrays: function(**arrays, **options), arrays)
        return out, pull_back(out)

    def forward(arrays):
        return function(**arrays, **options)

    return jax.jit(both if backward else forward).lower(arrays).compile()


def error_of(case: Case) -> float:
    """Largest difference from XLA, relative to the largest element.

    A function without kernels is compared with itself in float64.
    """

    def result(arrays, **options):
        call = functools.partial(case.function, **case.options, **options)
        return np.asarray(jax.jit(lambda arrays: call(**arrays))(arrays))

    arrays = case.drawn(_CHECKED)
    ours = result(arrays)
    if "implementation" in inspect.signature(case.function).parameters:
        expected = result(arrays, implementation="xla")
    else:
        with jax.enable_x64(True):
            expected = result({name: x.astype(np.float64) for name, x in arrays.items()})
    return float(np.abs(ours - expected).max() / np.abs(expected).max())


def measure(name: str, case: Case, length: int, rounds: int, backward: bool) -> Row:
    """Measures a case and exact attention in turns."""
    error = error_of(case)
    if not error < TOLERANCE:
        raise ValueError(f"{name} differs from its reference by {error:.1e}")
    programs = []
    for each in (case, Case(_exact, case.heads_drawn())):
        arrays = {key: jnp.asarray(x) for key, x in each.drawn(length).items()}
        programs.append((_program(each.function, arrays, backward, **each.options), arrays))
    times: list[list[float]] = [[], []]
    # The first call is slower.
    for number in range(rounds + 1):
        for (program, arrays), seconds in zip(programs, times, strict=True):
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
        "| mechanism | heads of exact attention, options | ms | exact, ms | times as fast |",
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
        prog="python -m benchmarks.functions",
        description="Measures recurrences, and attention to chosen keys at the papers' sizes, "
        "beside exact causal attention. Indexed attention needs 12 GB of memory.",
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
    (options.output / "functions.md").write_text(table, encoding="utf-8")
    settings = {
        "length": options.length,
        "rounds": options.rounds,
        "share": options.share,
        "backward": options.backward,
    }
    record = {"machine": about, **settings, "rows": [dataclasses.asdict(row) for row in rows]}
    (options.output / "functions.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{table}\nwritten to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
