"""A layer of every mechanism, compiled for a GPU that need not be there.

python -m benchmarks.gpu.compiled --help

Counts effattn's kernels, the temporary memory and the steps of loops, and times the compilation. It
needs JAX's compiler for GPUs and NVIDIA's assembler, but no GPU, driver or other library of CUDA.
VERSION is that of the installed JAX, and must be 0.12 or later:

pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION
pip install --no-deps nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-runtime nvidia-nvvm
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from benchmarks import machine
from benchmarks.arguments import output_folder, reason_against
from benchmarks.gpu.layers import Sizes, add_sizes, both, direction_of, message
from benchmarks.mixers import mixer_of
from effattn import registry
from effattn.dispatch import device as effattn_device

KERNELS = {"__gpu$xla.gpu.triton": "triton", "mosaic_gpu_v2": "mosaic_gpu"}
PACKAGES = ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "nvidia")


class Card(NamedTuple):
    """A GPU as XLA's compiler needs to know it; sizes in bytes.

    Attributes:
      name: as the driver gives it.
      capability: compute capability.
      processors: number of multiprocessors.
      threads: most threads of a multiprocessor at a time.
      shared: most shared memory of a program.
      shared_of_processor: shared memory of a multiprocessor.
      cache: L2 cache.
      memory: device memory.
      bandwidth: of the device memory, per second.
      gigahertz: clock rate.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    threads: int
    shared: int
    shared_of_processor: int
    cache: int
    memory: int
    bandwidth: int
    gigahertz: float

    def description(self) -> str:
        """XLA's configuration of the target."""
        major, minor = self.capability
        accelerated = "feature_extension: ACCELERATED_FEATURES" if major in (9, 10) else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              threads_per_core_limit: {self.threads}
              core_count: {self.processors}
              fpus_per_core: {64 if self.capability == (8, 0) else 128}
              block_dim_limit_x: {2**31 - 1}
              block_dim_limit_y: {2**16 - 1}
              block_dim_limit_z: {2**16 - 1}
              shared_memory_per_block: {48 * 1024}
              shared_memory_per_block_optin: {self.shared}
              shared_memory_per_core: {self.shared_of_processor}
              registers_per_core_limit: {2**16}
              registers_per_block_limit: {2**16}
              l2_cache_size: {self.cache}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.bandwidth}
              clock_rate_ghz: {self.gigahertz}
              cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            runtime_version {{ major: 13 minor: 0 patch: 0 }}
            device_description_str: "{self.name}"
        """


CARDS = {
    "a100": Card(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 2048, 166_912, 167_936, 41_943_040,
        85_100_068_864, 2_039_040_000_000, 1.41,
    ),
    "a10": Card(
        "NVIDIA A10", (8, 6), 72, 1536, 101_376, 102_400, 6_291_456,
        25_769_803_776, 600_096_000_000, 1.695,
    ),
    "h100": Card(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 2048, 232_448, 233_472, 52_428_800,
        84_942_979_072, 3_352_320_000_000, 1.98,
    ),
    "b200": Card(
        "NVIDIA B200", (10, 0), 148, 2048, 232_448, 233_472, 132_644_864,
        191_514_411_008, 7_672_320_000_000, 1.965,
    ),
    "rtx_pro_6000": Card(
        "NVIDIA RTX PRO 6000", (12, 0), 188, 1536, 101_376, 131_072, 134_217_728,
        103_079_215_104, 1_792_000_000_000, 2.6,
    ),
}  # fmt: skip


@dataclasses.dataclass
class Row:
    """Compiled layer of a mechanism; keys are "forward", and "backward" for both passes.

    Attributes:
      mechanism: registered name.
      direction: "causal" or "bidirectional".
      kernels: number of calls of effattn's kernels, by implementation.
      temporary_bytes: temporary memory of the program.
      steps: sum of the steps of all loops of known length; those of an inner loop are not
        multiplied by those of the outer one.
      seconds: time of compilation.
      failed: why the layer could not be compiled, or None.
    """

    mechanism: str
    direction: str
    kernels: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    temporary_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    steps: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    failed: str | None = None


class Compiler:
    """XLA's compiler for one GPU of a kind."""

    def __init__(self, card: Card):
        self._card = card
        described = {"target_config": card.description(), "topology": "1x1x1"}
        devices: Any = topologies.get_topology_desc(platform="cuda", **described).devices
        self._device = devices[0]
        self.sharding = jax.sharding.SingleDeviceSharding(self._device)

    @contextlib.contextmanager
    def _as_on_the_gpu(self) -> Iterator[None]:
        """Lets effattn and Pallas choose and lower kernels as on a machine with the GPU."""
        capability = ".".join(map(str, self._card.capability))
        gpu = types.SimpleNamespace(compute_capability=capability, client=self._device.client)
        kind = jax.sharding.AbstractDevice(
            self._card.name, num_cores=self._card.processors, platform="gpu"
        )
        axes = (jax.sharding.AxisType.Auto,)
        mesh = jax.sharding.AbstractMesh((1,), ("_",), axes, abstract_device=kind)
        with (
            mock.patch.object(effattn_device, "gpu", lambda: gpu),
            mock.patch.object(jax, "default_backend", lambda: "gpu"),
            jax.sharding.use_abstract_mesh(mesh),
        ):
            yield

    def __call__(self, function: Callable[..., Any], *shapes: Any) -> Any:
        """Returns the compiled program of a function of arrays."""

        def placed(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding)

        with self._as_on_the_gpu():
            traced = jax.jit(function).trace(*jax.tree.map(placed, shapes))
            lowered = traced.lower(lowering_platforms=("cuda",))
        return lowered.compile()


def compile_layer(compiler: Compiler, row: Row, sizes: Sizes) -> None:
    """Compiles both passes of a layer in bfloat16 with parameters in float32."""

    def mixer():
        return mixer_of(
            row.mechanism, sizes.length, row.direction == "causal",
            features=sizes.features, heads=sizes.heads, dtype=jnp.bfloat16,
        )  # fmt: skip

    graph, state = nnx.split(nnx.eval_shape(mixer))
    x = jax.ShapeDtypeStruct((sizes.rows, sizes.length, sizes.features), jnp.bfloat16)

    def forward(state, x):
        return nnx.merge(graph, state)(x)

    def backward(state, x):
        return both(state, x, forward=forward)

    for which, function in {"forward": forward, "backward": backward}.items():
        start = time.perf_counter()
        program = compiler(function, state, x)
        row.seconds[which] = time.perf_counter() - start
        row.temporary_bytes[which] = program.memory_analysis().temp_size_in_bytes
        text = program.as_text()
        called = Counter(re.findall(r'custom_call_target="([^"]+)"', text))
        row.kernels[which] = {
            name: called[target] for target, name in KERNELS.items() if called[target]
        }
        counts = re.findall(r'"known_trip_count":\{"n":"(\d+)"', text)
        row.steps[which] = sum(map(int, counts))


def table(card: Card, sizes: Sizes, rows: Sequence[Row]) -> str:
    """Returns the table in the order of the registry."""
    lines = [
        f"A layer of {sizes.features} features and {sizes.heads} heads with projections, on "
        f"{sizes.rows} sequences of {sizes.length:,} tokens, bfloat16, parameters in float32, "
        f"compiled for {card.name} by jax {jax.__version__}. Pairs are forward, and forward and "
        "backward.",
        "",
        "| mechanism | direction | kernels | temporaries | steps of loops | compilation | |",
        "|---|---|---|---:|---:|---:|---|",
    ]

    def pair(values, shown):
        return ", ".join(map(shown, values.values()))

    def calls(kernels):
        return " + ".join(f"{number} {name}" for name, number in kernels.items()) or "none"

    for row in rows:
        cells = [
            f"`{row.mechanism}`", row.direction,
            pair(row.kernels, calls),
            pair(row.temporary_bytes, lambda size: f"{size / 1e6:,.0f} MB"),
            pair(row.steps, lambda steps: f"{steps:,}"),
            pair(row.seconds, lambda seconds: f"{seconds:.1f} s"),
            row.failed or "",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.compiled",
        description="Compiles a layer of every mechanism for a GPU, which need not be there.",
        allow_abbrev=False,
    )
    parser.add_argument("--only", nargs="+", choices=registry.names(), help="default: all")
    parser.add_argument("--card", default="h100", choices=CARDS, help="default %(default)s")
    add_sizes(parser)
    parser.add_argument("--output", type=output_folder, default=Path("runs/gpu-compiled"))
    return parser.parse_args(argv)


def missing() -> list[str]:
    """Names of the modules that the compiler needs and that are not installed."""
    absent = []
    for name in PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # of a parent package
            found = None
        if found is None:
            absent.append(name)
    return absent


def prepare() -> None:
    """Settings of XLA and JAX, before the first computation."""
    places = importlib.util.find_spec("nvidia").submodule_search_locations  # type: ignore[union-attr]
    folder = next((f for place in places or () for f in Path(place).glob("cu1*")), Path())
    # Without a GPU there is nothing on which to try which product of matrices is the fastest.
    flags = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={folder}"
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # libraries that only a GPU would run
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    jax.config.update("jax_platforms", "cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints a table, and writes `compiled.md` and `compiled.json`."""
    options = parse(argv)
    if reason := reason_against(options.output):
        print(reason, file=sys.stderr)
        return 2
    if jax.__version_info__ < (0, 12):
        print(
            f"compiling for another device needs jax 0.12, got {jax.__version__}", file=sys.stderr
        )
        return 2
    if absent := missing():
        print(
            f"XLA's compiler for GPUs is not installed (no {', '.join(absent)}); the docstring of "
            "benchmarks/gpu/compiled.py has the command",
            file=sys.stderr,
        )
        return 2
    prepare()
    card = CARDS[options.card]
    sizes = Sizes(options.rows, options.length, options.features, options.heads)
    compiler, rows = Compiler(card), []
    for name in options.only or registry.names():
        row = Row(name, direction_of(name))
        try:
            compile_layer(compiler, row, sizes)
        except Exception as error:  # any failure is the result
            row.failed = message(error)
        rows.append(row)
        told = ", ".join(f"{which} {t:.1f} s" for which, t in row.seconds.items())
        print(f"{name}: {row.failed or told}", flush=True)
        record = {
            "machine": machine.describe((*machine.PACKAGES, "jax-cuda13-plugin")),
            "card": card._asdict(),
            "sizes": sizes._asdict(),
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        (options.output / "compiled.json").write_text(json.dumps(record, indent=1) + "\n")
        jax.clear_caches()
    text = table(card, sizes, rows)
    (options.output / "compiled.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {options.output}")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
