"""Cost on one GPU of partitioning kernels over devices, and implementations in float32.

python -m benchmarks.gpu.partitioned --help

On a machine with several GPUs every call is partitioned, also in a program for one of them. Here
the program for one GPU is compiled as on such a machine, and timed in turns with the direct call.
"""

import argparse
import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import effattn
from benchmarks.arguments import at_least, output_folder, reason_against
from benchmarks.gpu.device import about_device
from benchmarks.workloads import scalar_gate

SHAPE, TINY = (2, 8192, 16, 128), (1, 64, 2, 16)  # examples, tokens, heads, head size
SPEC = PartitionSpec("data", None, "tensor")
CALLS_A_ROUND = 5

Function = Callable[..., Any]


def _gated(query, key, value):
    return effattn.gated_linear_attention(query, key, value, log_decay=scalar_gate(key))


def _causal(query, key, value, **options):
    return effattn.dot_product_attention(query, key, value, is_causal=True, **options)


MECHANISMS: dict[str, Function] = {
    "causal": _causal,
    "window of 1024": functools.partial(
        effattn.sliding_window_attention, local_window_size=(1023, 0)
    ),
    "scalar gate": _gated,
}


def partitionings() -> dict[str, Callable[[], Any]]:
    """How a program for one GPU is compiled, by name: context managers around its trace."""
    return {
        "direct": contextlib.nullcontext,
        "compiler's rule": functools.partial(_on_a_mesh, AxisType.Auto),
        "explicit axes": functools.partial(_on_a_mesh, AxisType.Explicit),
    }


@contextlib.contextmanager
def _on_a_mesh(kind: Any) -> Iterator[None]:
    """A mesh of one device, as part of a machine with two."""
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), (kind, kind), devices=[_device()])
    with jax.set_mesh(mesh), mock.patch.object(jax, "device_count", lambda *_: 2):
        yield


def _device():
    return jax.config.jax_default_device or jax.devices()[0]


def gradients(function: Function) -> Function:
    """The output, and the gradients of the sum of its products with the last operand."""

    def run(query, key, value, weights):
        out, pull_back = jax.vjp(function, query, key, value)
        return out, pull_back(weights)

    return run


PASSES = {
    "forward": lambda function: lambda *operands: function(*operands[:3]),
    "forward + backward": gradients,
}


def compiled(function: Function, operands: list[jax.Array], around: Any) -> tuple[Any, list[Any]]:
    """A compiled program and its operands, where they belong."""
    with around():
        mesh = jax.sharding.get_mesh()
        if not mesh.empty:
            operands = [jax.device_put(x, NamedSharding(mesh, SPEC)) for x in operands]
        return jax.jit(function).lower(*operands).compile(), operands


def in_turn(programs: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of a call of each program, for each round."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for count in range(rounds + 1):
        for name, (program, operands) in programs.items():
            begin = time.perf_counter()
            for _ in range(CALLS_A_ROUND):
                results = program(*operands)
            jax.block_until_ready(results)
            if count:  # the first round warms up
                seconds[name].append((time.perf_counter() - begin) / CALLS_A_ROUND)
    return seconds


def measured(
    comparison: str, which: str, programs: dict[str, Any], rounds: int
) -> list[dict[str, Any]]:
    """Rows of programs for the same call, with ratios of times to the first one's."""
    seconds = in_turn(programs, rounds)
    first = next(iter(seconds.values()))
    return [
        {
            "comparison": comparison, "which": which, "form": name,
            "seconds": statistics.median(times), "rounds": times,
            "ratio": statistics.median(a / b for a, b in zip(times, first, strict=True)),
        }
        for name, times in seconds.items()
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table and writes `partitioned.json`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.partitioned",
        description="Times the kernels partitioned for one GPU beside direct calls, and the "
        "implementations of softmax attention in float32.",
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=at_least(1), default=15, help="default %(default)s")
    parser.add_argument("--quick", action="store_true", help="tiny arrays, to test the program")
    parser.add_argument(
        "--output", type=output_folder, default=Path("runs/gpu"), help="default %(default)s"
    )
    options = parser.parse_args(argv)
    if reason := reason_against(options.output):
        print(reason, file=sys.stderr)
        return 2
    shape = TINY if options.quick else SHAPE
    keys = jax.random.split(jax.random.key(0), 4)
    drawn = [jax.random.normal(key, shape, jnp.float32) for key in keys]
    rows = []
    for which, with_pass in PASSES.items():
        operands = [x.astype(jnp.bfloat16) for x in drawn]
        for name, function in MECHANISMS.items():
            programs = {
                form: compiled(with_pass(function), operands, around)
                for form, around in partitionings().items()
            }
            rows += measured(f"{name}, bfloat16", which, programs, options.rounds)
        programs = {
            implementation: compiled(
                with_pass(functools.partial(_causal, implementation=implementation)),
                drawn,
                contextlib.nullcontext,
            )
            for implementation in ("xla", *(["triton"] if jax.default_backend() == "gpu" else []))
        }
        rows += measured("causal, float32", which, programs, options.rounds)
    print("| call | pass | form | ms | ratio |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['comparison']} | {row['which']} | {row['form']} | "
            f"{row['seconds'] * 1e3:.3f} | {row['ratio']:.3f} |"
        )
    report = {
        "machine": about_device(_device()),
        "shape": shape,
        "rounds": options.rounds,
        "rows": rows,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "partitioned.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
