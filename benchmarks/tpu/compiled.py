"""The kernels for TPUs, compiled for TPUs on a machine without TPUs.

python -m benchmarks.tpu.compiled --help

Counts the bundles of each kernel's code, the use of the units, spills and memory. It needs the
compiler for TPUs, which is in the package libtpu, but no TPU: pip install libtpu
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import effattn
from benchmarks import machine
from benchmarks.arguments import output_folder, reason_against
from benchmarks.tpu import schedules
from benchmarks.tpu.schedules import Schedule

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
BATCH, LENGTH, HEADS = 4, 8192, 8


class Case(NamedTuple):
    """A call of a mechanism.

    Attributes:
      function: takes arrays by name.
      arrays: shapes besides batch and tokens.
      options: static options.
    """

    function: Callable[..., jax.Array]
    arrays: dict[str, tuple[int, ...]]
    options: dict[str, Any]


def _heads(size):
    return dict.fromkeys(("query", "key", "value"), (HEADS, size))


def _attention(size, **options):
    return Case(effattn.dot_product_attention, _heads(size), options)


def _recurrence(function, **more):
    return Case(function, _heads(128) | more, {})


CASES = {
    "causal, 128": _attention(128, is_causal=True),
    "causal, 64": _attention(64, is_causal=True),
    "bidirectional, 128": _attention(128),
    "window of 1024, 128": _attention(128, is_causal=True, local_window_size=(1023, 0)),
    "retention": _recurrence(effattn.retention),
    "decay of the token": _recurrence(effattn.gated_linear_attention, log_decay=(HEADS,)),
    "decay of features": _recurrence(effattn.gated_linear_attention, log_decay=(HEADS, 128)),
    "delta rule": _recurrence(effattn.delta_rule_attention, beta=(HEADS,)),
}


@dataclasses.dataclass
class Row:
    """A call compiled for a chip.

    Attributes:
      chip, case: their names.
      temporary_bytes: temporary memory of the forward and backward program.
      schedules: those of its kernels.
      failed: why it could not be compiled, or None.
    """

    chip: str
    case: str
    temporary_bytes: int | None = None
    schedules: list[Schedule] = dataclasses.field(default_factory=list)
    failed: str | None = None


def compile_case(topology: str, case: Case) -> int:
    """Compiles a call and its gradients in bfloat16; returns the bytes of temporary memory."""
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

    devices: Any = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    sharding = SingleDeviceSharding(devices[0])
    kind = AbstractDevice(devices[0].device_kind, num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("_",), (AxisType.Auto,), abstract_device=kind)

    def both(arrays):
        def call(arrays):
            return case.function(**arrays, **case.options, implementation="mosaic_tpu")

        out, pull_back = jax.vjp(call, arrays)
        return out, pull_back(out)

    arrays = {
        name: jax.ShapeDtypeStruct((BATCH, LENGTH, *shape), jnp.bfloat16, sharding=sharding)
        for name, shape in case.arrays.items()
    }
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(both).trace(arrays).lower(lowering_platforms=("tpu",))
    return lowered.compile().memory_analysis().temp_size_in_bytes


def compiled(chip: str, name: str) -> Row:
    """Compiles in a process of its own, whose compiler writes the schedules to a folder."""
    row = Row(chip, name)
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": flags,
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
        }
        command = [sys.executable, "-m", "benchmarks.tpu.compiled", "--alone", chip, name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            row.failed = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            return row
        row.temporary_bytes = int(done.stdout.split()[-1])
        row.schedules = schedules.read(Path(folder))
    return row


def table(rows: Sequence[Row]) -> str:
    """Returns the table: a line for each kernel."""
    lines = [
        f"Calls of {BATCH} sequences of {LENGTH:,} tokens, {HEADS} heads, bfloat16, forward and "
        f"backward, compiled by libtpu for jax {jax.__version__}. The bundles of a kernel are its "
        "code for one step of the grid; its body is the piece of it without jumps that has most of "
        "the matrix products. Bundles are the least cycles that code can take. Use is the share of "
        "the slots of a unit in the bundles of the body.",
        "",
        "A step of exact attention has 512 queries and up to 2,048 keys (in the kernel of keys, "
        "512 keys and up to 2,048 queries), and loops over tiles of 512. Its body is the code of a "
        "tile without the masks. A step of a recurrence has 512 tokens: four blocks, or eight with "
        "decays of features. With decays of features, loops have the code of two blocks.",
        "",
        "| chip | call | kernel | bundles | of the body | matrix unit | vector unit | loads "
        "| stores | exponentials | spills | VMEM |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if row.failed is not None:
            lines.append(f"| {row.chip} | {row.case} | {row.failed} |||||||||")
        for each in row.schedules:
            units = ("MATMUL", "VALU", "VLOAD", "VSTORE", "EUP")
            use = " | ".join(f"{each.use[unit]} %" for unit in units)
            lines.append(
                f"| {row.chip} | {row.case} | {each.kernel} | {each.bundles:,} | {each.body:,} | "
                f"{use} | {each.spills:,} | {each.vector_memory / 1e6:.1f} MB |"
            )
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tpu.compiled",
        description="Compiles the kernels for TPUs, on any machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=["v5e", "v6e"])
    parser.add_argument("--output", type=output_folder, default=Path("runs/tpu-compiled"))
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints a table, and writes `compiled.md` and `compiled.json`."""
    options = parse(argv)
    if importlib.util.find_spec("libtpu") is None:
        print("the compiler for TPUs is not installed: pip install libtpu", file=sys.stderr)
        return 2
    if options.alone is not None:
        chip, name = options.alone
        print(compile_case(TOPOLOGIES[chip], CASES[name]))
        return 0
    if reason := reason_against(options.output):
        print(reason, file=sys.stderr)
        return 2
    rows = []
    for chip in options.chips:
        for name in options.only:
            rows.append(compiled(chip, name))
            print(f"{chip}, {name}: {rows[-1].failed or 'compiled'}", flush=True)
            record = {
                "machine": machine.describe((*machine.PACKAGES, "libtpu")),
                "rows": [dataclasses.asdict(row) for row in rows],
            }
            (options.output / "compiled.json").write_text(json.dumps(record, indent=1) + "\n")
            (options.output / "compiled.md").write_text(table(rows), encoding="utf-8")
    print(f"\n{table(rows)}\nwritten to {options.output}")
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
