"""Kernels lowered for GPUs and TPUs on a machine without them, and compiled by their compilers."""

import contextlib
import importlib.util
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from jax import export

TRITON, MOSAIC_GPU, MOSAIC_TPU = "__gpu$xla.gpu.triton", "mosaic_gpu_v2", "tpu_custom_call"
KERNELS = TRITON, MOSAIC_GPU, MOSAIC_TPU


def kernels_of(function: Any, *arguments: Any, platform: str = "cuda") -> set[str]:
    """Names of the kernels that the program calls when lowered for a platform."""
    text = _lowered(function, *arguments, platform=platform)
    return set(re.findall(r"custom_call @([\w$.]+)", text)) & set(KERNELS)


def operands_of(function: Any, *arguments: Any) -> set[str]:
    """Operations that produce the operands of the program's kernels, lowered for an NVIDIA GPU."""
    given, found = {}, set()
    for line in _lowered(function, *arguments, platform="cuda").splitlines():
        if match := re.match(r"\s*(%\w+)(?::\d+)? = ([\w.]+)", line):
            given[match[1]] = match[2]
        if match := re.search(r"custom_call @([\w$.]+)\(([^)]*)\)", line):
            if match[1] in KERNELS:
                found |= {given[name.partition("#")[0]] for name in match[2].split(", ")}
    return found


def kernel_bytes(function: Any, *arguments: Any, platform: str = "cuda") -> int:
    """Bytes of all operands and results of the program's kernels, lowered for a platform."""
    total = 0
    for line in _lowered(function, *arguments, platform=platform).splitlines():
        if (match := re.search(r"custom_call @([\w$.]+)\(", line)) and match[1] in KERNELS:
            types = line[line.rindex(" : (") :]
            for sizes, bits in re.findall(r"tensor<((?:\d+x)*)b?[fi](\d+)>", types):
                total += math.prod(map(int, sizes.split("x")[:-1])) * int(bits) // 8
    return total


def _lowered(function, *arguments, platform):
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in KERNELS]
    with _a_device(platform):
        lower = export.export(jax.jit(function), platforms=[platform], disabled_checks=checks)
        return lower(*arguments).mlir_module()


def _a_device(platform):
    """Tells JAX which device the kernels are for, as newer versions of JAX ask for it."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh_of((1,), ("_",), platform))


DEVICES = {"cuda": ("NVIDIA H100 80GB HBM3", 132, "gpu"), "tpu": ("TPU v5 lite", 1, "tpu")}


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], platform: str) -> Any:
    """A mesh of abstract devices, which need not exist."""
    device = {}
    if hasattr(jax.sharding, "AbstractDevice"):
        kind, cores, of = DEVICES[platform]
        abstract = jax.sharding.AbstractDevice(kind, num_cores=cores, platform=of)
        device = {"abstract_device": abstract}
    axes = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.sharding.AbstractMesh(shape, names, axes, **device)


LEAST_SHARED = 99 * 1024  # bytes for a program on GPUs of capability 8.6, 8.9, 12


class Compiled(NamedTuple):
    """Resources of a multiprocessor that a Triton kernel uses.

    Attributes:
      name: the kernel's name.
      shared: bytes of shared memory of a program.
      stack: bytes that a thread keeps in memory because its registers do not hold them.
      tensor_cores: number of instructions that multiply matrices.
    """

    name: str
    shared: int
    stack: int
    tensor_cores: int


def compile_triton(capability: int, function: Any, *arguments: Any) -> list[Compiled]:
    """The Triton kernels of a program, compiled for a compute capability, such as 90."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs the triton package, which compiles the kernels")
    kernels = []
    with tempfile.TemporaryDirectory() as folder:
        for name, text, options in _triton_kernels(_lowered(function, *arguments, platform="cuda")):
            (Path(folder) / f"{len(kernels)}.ttir").write_text(text)
            kernels.append((name, options))
        (Path(folder) / "kernels.json").write_text(json.dumps(kernels))
        script = Path(__file__).with_name("compile_ttir.py")
        command = [sys.executable, script, folder, str(capability)]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Compiled(*each) for each in json.loads(done.stdout)]


def _triton_kernels(module: str):
    """Name, Triton's intermediate form and options of each kernel that a lowered program calls."""
    from jax._src.interpreters.mlir import make_ir_context
    from jax._src.lib import triton
    from jaxlib.mlir import ir

    def operations(operation):
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    yield inner
                    yield from operations(inner.operation)

    with make_ir_context():
        configurations = [
            {entry.name: entry.attr for entry in op.attributes["mhlo.backend_config"]}
            for op in operations(ir.Module.parse(module).operation)
            if op.operation.name == "stablehlo.custom_call"
            and ir.StringAttr(op.attributes["call_target_name"]).value == TRITON
        ]
        kernels = [
            (
                ir.StringAttr(each["name"]).value,
                ir.StringAttr(each["ir"]).value_bytes,
                {name: ir.IntegerAttr(each[name]).value for name in ("num_warps", "num_stages")},
            )
            for each in configurations
        ]
    context = ir.Context()
    triton.dialect.register_dialect(context)
    with context:
        for name, bytecode, options in kernels:
            module = ir.Module.parse(bytecode).operation
            yield name, module.get_asm(enable_debug_info=False), options
