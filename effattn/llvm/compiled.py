"""Kernels compiled for the processor that is here, and registered with XLA."""

import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import threading
from collections.abc import Callable
from typing import Any

import jax

_lock = threading.Lock()
_engines: list[Any] = []  # what they compiled lives as long as they do


def refusal() -> str | None:
    """Why kernels do not run on this machine, if so."""
    if os.name != "posix":
        return f"runs on POSIX systems, not on {platform.system()}"
    if importlib.util.find_spec("llvmlite") is None:
        return "needs llvmlite"
    if not lanes():
        return f"needs vectors with AVX2 and FMA, or NEON, which this {platform.machine()} has not"
    return None


@functools.cache
def _features() -> dict[str, bool]:
    from llvmlite import binding

    with contextlib.suppress(RuntimeError):  # of processors that LLVM does not know
        return dict(binding.get_host_cpu_features())
    return {}


@functools.cache
def lanes() -> int:
    """Numbers of float32 in a vector; 0 where products are not added to as they are made."""
    features = _features()
    if platform.machine() in ("arm64", "aarch64"):
        return 4
    if not features.get("fma"):
        return 0
    return 16 if features.get("avx512f") else 8 if features.get("avx2") else 0


def handler(name: str, write: Callable[..., None]) -> str:
    """The name, or one that begins so, of a handler that `write(module, name, lanes)` wrote.

    It is compiled, and registered with XLA, by the first who asks for it.
    """
    with _lock:
        return _handler(f"{name}_{lanes()}", write, lanes())


@functools.cache
def _handler(name, write, lanes):
    from llvmlite import binding, ir

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = ir.Module(name)
    module.triple = binding.get_process_triple()
    write(module, name, lanes)
    compiled = binding.parse_assembly(str(module))
    compiled.verify()
    # Code for some processors with vectors of 512 bits would use half of each.
    features = ",".join(
        f"{'+' if has and feature != 'prefer-256-bit' else '-'}{feature}"
        for feature, has in _features().items()
    )
    machine = binding.Target.from_triple(module.triple).create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features, opt=3, jit=True
    )
    # Loops are written in the vectors and pieces that they are to run in.
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(compiled, passes)
    engine = binding.create_mcjit_compiler(compiled, machine)
    engine.finalize_object()
    _engines.append(engine)
    address = ctypes.CFUNCTYPE(None)(engine.get_function_address(name))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
    return name
