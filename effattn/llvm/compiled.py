"""Kernels compiled for the processor at hand, and registered with XLA.

Handlers are registered when effattn is imported, and compiled when a program that calls them is
lowered, or when one that was compiled in another process is run. Until then a handler is a jump to
a Python function that compiles it; after that, a jump to the compiled code.
"""

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import mmap
import os
import platform
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from effattn.llvm.interface import (
    API,
    EXTENSION,
    FAILED_PRECONDITION,
    FRAME,
    IS_METADATA,
    METADATA,
    VERSION,
)

# The handlers, and what writes their code.
HANDLERS = {
    f"effattn_{core}_{direction}": (f"effattn.llvm.{module}", f"write_{direction}")
    for core, module in (
        ("block_attention", "block_kernels"),
        ("linear_recurrence", "recurrence_kernels"),
    )
    for direction in ("forward", "backward")
}
DTYPES = jnp.float32, jnp.int32  # of the arrays that handlers read

_lock = threading.Lock()
_kept: list[Any] = []  # compiled code, and Python functions that C calls, live as long as these


def refusal() -> str | None:
    """Why kernels do not run on this machine, if so."""
    if reason := _refusal_of_platform():
        return reason
    if not lanes():
        return f"needs vectors with AVX2 and FMA, or NEON, which this {platform.machine()} has not"
    return None


def _refusal_of_platform():
    if os.name != "posix":
        return f"runs on POSIX systems, not on {platform.system()}"
    if importlib.util.find_spec("llvmlite") is None:
        return "needs llvmlite"
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


def call(
    name: str, shapes: Sequence[tuple[int, ...]], operands: Sequence[jax.Array], **attributes: Any
) -> Sequence[jax.Array]:
    """The float32 results, of these shapes, of a handler.

    Raises:
      TypeError: an operand whose dtype no handler reads.
    """
    for operand in operands:
        if operand.dtype not in DTYPES:
            raise TypeError(f"{name} reads arrays of float32 and int32, got {operand.dtype}")
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.ffi.ffi_call(prepare(name), results)(*operands, **attributes)


def prepare(name: str) -> str:
    """Compiles a handler, unless that was done, and returns its name."""
    with _lock:
        address = _compile(name, lanes())
        if name in _jumps:
            _jumps[name].value = address
        else:
            _register_compiled(name, address)
    return name


@functools.cache
def _compile(name: str, lanes: int) -> int:
    """The address of a handler's code, in vectors of so many numbers."""
    from llvmlite import binding, ir

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = ir.Module(name)
    module.triple = binding.get_process_triple()
    where, write = HANDLERS[name]
    getattr(importlib.import_module(where), write)(module, name, lanes)
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
    _kept.append(engine)
    return engine.get_function_address(name)


# Registration. A jump is 16 bytes: an instruction that jumps to the address after it.

_JUMP = {
    "x86_64": b"\xff\x25\x02\x00\x00\x00\x90\x90",  # jmp [rip + 2]
    "AMD64": b"\xff\x25\x02\x00\x00\x00\x90\x90",
    "aarch64": b"\x50\x00\x00\x58\x00\x02\x1f\xd6",  # ldr x16, 8; br x16
}
_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

_jumps: dict[str, ctypes.c_uint64] = {}  # the addresses that handlers jump to


def register() -> None:
    """Registers all handlers, where memory for jumps is to be had; compiles none."""
    jump = _JUMP.get(platform.machine())
    if jump is None or _refusal_of_platform() or _jumps:
        return
    try:
        memory = mmap.mmap(
            -1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        )
    except OSError:  # systems may forbid memory that is written and executed
        return
    _kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for number, name in enumerate(HANDLERS):
        first_call = _HANDLER(functools.partial(_compile_and_call, name))
        _kept.append(first_call)
        at = 16 * number
        memory[at : at + 8] = jump
        _jumps[name] = ctypes.c_uint64.from_buffer(memory, at + 8)
        _jumps[name].value = ctypes.cast(first_call, ctypes.c_void_p).value or 0
        _register(name, start + at)


@functools.cache
def _register_compiled(name: str, address: int) -> None:
    _register(name, address)


def _register(name, address):
    capsule = jax.ffi.pycapsule(ctypes.CFUNCTYPE(None)(address))
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")


def _compile_and_call(name: str, frame: int) -> int | None:
    """A call before the handler is compiled: an error of XLA, or null."""
    if _answers_version(frame):
        return None
    try:
        prepare(name)
    except Exception as error:
        return _error(frame, f"{name} could not be compiled: {error}")
    return _HANDLER(_jumps[name].value)(frame)


def _answers_version(frame):
    """Whether XLA asked for the interface's version, as it does when it registers a handler."""
    extension = _pointer(frame + FRAME["extension"])
    if extension == 0 or _int32(extension + EXTENSION["kind"]).value != IS_METADATA:
        return False
    metadata = _pointer(extension + EXTENSION["metadata"])
    for offset, value in zip(METADATA.values(), (*VERSION, 0), strict=True):
        _int32(metadata + offset).value = value
    return True


def _error(frame, message):
    """The address of an error of XLA, which copies the message."""
    text = ctypes.create_string_buffer(message.encode())
    fields = 32, 0, ctypes.addressof(text), FAILED_PRECONDITION
    create = _HANDLER(_pointer(_pointer(frame + FRAME["api"]) + API["create error"]))
    return create(ctypes.addressof((ctypes.c_uint64 * 4)(*fields)))


def _pointer(address):
    return ctypes.c_uint64.from_address(address).value


def _int32(address):
    return ctypes.c_int32.from_address(address)
