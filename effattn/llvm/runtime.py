"""Compilation of the kernels for this processor, registration with XLA, and layout of XLA's FFI.

A kernel is an XLA FFI handler. Handlers are registered when effattn is imported. A handler is
compiled when a program that calls it is lowered, or when a program that was compiled in another
process runs. Before that, the registered address is a jump to a Python function that compiles the
handler; afterwards it is a jump to the compiled code.
"""

import ctypes
import functools
import importlib
import importlib.util
import mmap
import os
import platform
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from effattn.llvm import machine_code

# XLA's C interface for foreign functions, `xla/ffi/api/c_api.h`: the fields that handlers read.
#
# Within a major version, structures only grow at their ends. Every call of a handler checks that
# the version and the sizes of the structures are those that the handler was written for, and that
# every buffer has the expected dtype and rank. A mismatch is an XLA error, not a wrong result.

VERSION = 0, 3  # version of the interface in jaxlib 0.10.2

# Offsets of fields, in bytes. A structure begins with its size and its extensions, 8 bytes each.
FRAME = {
    "extension": 8,
    "api": 16,
    "context": 24,
    "stage": 32,
    "argument count": 56,
    "arguments": 72,
    "result count": 96,
    "results": 112,
    "attribute count": 136,
    "attribute types": 144,
    "attributes": 160,
}
BUFFER = {"dtype": 16, "data": 24, "rank": 32, "sizes": 40}
SCALAR = {"dtype": 0, "value": 8}
ARRAY = {"dtype": 0, "size": 8, "data": 16}
EXTENSION = {"kind": 8, "metadata": 24}
METADATA = {"major": 24, "minor": 28, "traits": 32}
API = {
    "major": 32,
    "minor": 36,
    "create error": 48,
    "destroy error": 64,
    "schedule": 136,
    "count threads": 144,
}
# The smallest sizes of structures that contain all fields that are read.
SIZES = {"frame": FRAME["attributes"] + 8, "buffer": BUFFER["sizes"] + 8, "api": 152}

IS_METADATA, IS_EXECUTION = 1, 3
IS_ARRAY, IS_SCALAR = 1, 3  # kinds of attributes
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, FAILED_PRECONDITION = 3, 8, 9
DTYPE_CODES = {"int32": 4, "int64": 5, "float32": 11}


class Array(NamedTuple):
    """Declaration of an argument or result of a handler.

    Attributes:
      name: name of the array, for error messages and for `Job`.
      axes: number of axes besides the batch axes.
      dtype: dtype of the elements.
    """

    name: str
    axes: int
    dtype: str = "float32"


class Signature(NamedTuple):
    """The buffers and attributes of a handler.

    Attributes:
      arguments: arrays whose batch axes are those of the first result; a batch axis of length 1 is
        broadcast.
      results: the axes of the first result are the batch axes and its own axes.
      integers: number of elements of the attribute `limits`, an int64 array; 0 for a handler
        without attributes. The only other attribute is `scale`, a float32; attributes are sorted
        by name.
    """

    arguments: Sequence[Array]
    results: Sequence[Array]
    integers: int = 0


# Compilation.

# The handlers; for each, the module and the function that generate the code.
HANDLERS = (
    {
        f"effattn_{core}_{direction}": (f"effattn.llvm.{module}", f"write_{direction}")
        for core, module in (
            ("block_attention", "block_kernels"),
            ("linear_recurrence", "recurrence_kernels"),
            ("diagonal_recurrence", "diagonal_kernels"),
            ("native_sparse", "native_sparse_kernel"),
            ("chosen_keys", "chosen_key_kernels"),
        )
        for direction in ("forward", "backward")
    }
    | {
        f"effattn_{cell}_{direction}": ("effattn.llvm.cell_kernels", f"write_{cell}_{direction}")
        for cell in ("lstm", "gru", "slstm", "slstm_exp")
        for direction in ("forward", "backward")
    }
    | {
        f"effattn_{name}_forward": (f"effattn.llvm.{name}_kernel", "write_forward")
        for name in ("mesa", "key_choice")
    }
)
DTYPES = jnp.float32, jnp.int32  # dtypes of the arrays that handlers read

_lock = threading.Lock()
_kept: list[Any] = []  # keeps compiled code and callbacks alive


def refusal() -> str | None:
    """Reason why kernels do not run on this machine, or None."""
    if reason := _refusal_of_platform():
        return reason
    if not lanes():
        return f"needs a CPU with AVX2 and FMA, or with NEON, got {platform.machine()} without them"
    return None


def refusal_of(limits: Any, arrays: Sequence[jax.Array]) -> str | None:
    """Reason why kernels with these `effattn.dispatch.Limits` do not take the arrays, or None."""
    reasons = (limits.refusal(array.dtype) for array in arrays)
    return next((reason for reason in reasons if reason), None) or refusal()


def _refusal_of_platform():
    if os.name != "posix":
        return f"runs on POSIX systems, got {platform.system()}"
    if importlib.util.find_spec("llvmlite") is None:
        return "needs the package llvmlite: pip install llvmlite"
    return None


@functools.cache
def lanes() -> int:
    """Number of float32 in a vector; 0 if the processor has no fused multiply-add on vectors."""
    features = machine_code.features()
    if platform.machine() in ("arm64", "aarch64"):
        return 4
    if not features.get("fma"):
        return 0
    return 16 if features.get("avx512f") else 8 if features.get("avx2") else 0


def call(
    name: str, shapes: Sequence[tuple[int, ...]], operands: Sequence[jax.Array], **attributes: Any
) -> Sequence[jax.Array]:
    """Calls a handler; returns float32 results of the given shapes.

    Raises:
      TypeError: an operand is neither float32 nor int32.
    """
    for operand in operands:
        if operand.dtype not in DTYPES:
            raise TypeError(f"operands of {name} must be float32 or int32, got {operand.dtype}")
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.ffi.ffi_call(prepare(name), results)(*operands, **attributes)


def prepare(name: str) -> str:
    """Compiles a handler if it is not compiled yet; returns the handler's name."""
    with _lock:
        address = _compile(name, lanes())
        if name in _jumps:
            _jumps[name].value = address
        else:
            _register_compiled(name, address)
    return name


@functools.cache
def _compile(name: str, lanes: int) -> int:
    """Compiles a handler for vectors of `lanes` float32; returns the address of the code."""
    from llvmlite import ir

    module = ir.Module(name)
    where, write = HANDLERS[name]
    getattr(importlib.import_module(where), write)(module, name, lanes)
    engine = machine_code.engine(module)
    _kept.append(engine)
    return engine.get_function_address(name)


# Registration. A jump has 16 bytes: an instruction, and the address that it jumps to.

_JUMP = {
    "x86_64": b"\xff\x25\x02\x00\x00\x00\x90\x90",  # jmp [rip + 2]
    "AMD64": b"\xff\x25\x02\x00\x00\x00\x90\x90",
    "aarch64": b"\x50\x00\x00\x58\x00\x02\x1f\xd6",  # ldr x16, 8; br x16
}
_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

_jumps: dict[str, ctypes.c_uint64] = {}  # target addresses of the jumps


def register() -> None:
    """Registers all handlers without compiling them.

    Registers none if the system provides no memory for jumps: then `prepare` registers a handler.
    """
    jump = _JUMP.get(platform.machine())
    if jump is None or _refusal_of_platform() or _jumps:
        return
    try:
        memory = mmap.mmap(
            -1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        )
    except OSError:  # some systems forbid memory that is both writable and executable
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
    if not _are_visible(start, 16 * len(HANDLERS)):
        _jumps.clear()
        return
    for number, name in enumerate(HANDLERS):
        _register(name, start + 16 * number)


def _are_visible(start: int, size: int) -> bool:
    """Makes instructions in memory visible to the processor; returns whether it could.

    aarch64 has a cache of its own for instructions, which is cleared here.
    """
    if platform.machine() != "aarch64":
        return True
    try:
        clear = ctypes.CDLL("libgcc_s.so.1")["__clear_cache"]
    except (OSError, AttributeError):
        return False
    clear(ctypes.c_void_p(start), ctypes.c_void_p(start + size))
    return True


@functools.cache
def _register_compiled(name: str, address: int) -> None:
    _register(name, address)


def _register(name, address):
    capsule = jax.ffi.pycapsule(ctypes.CFUNCTYPE(None)(address))
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")


def _compile_and_call(name: str, frame: int) -> int | None:
    """Handles a call before the handler is compiled; returns an XLA error, or null."""
    if _answers_version(frame):
        return None
    try:
        prepare(name)
    except Exception as error:
        return _error(frame, f"{name} could not be compiled: {error}")
    return _HANDLER(_jumps[name].value)(frame)


def _answers_version(frame):
    """Answers XLA's request for the interface version; returns whether this call was one.

    XLA makes the request when a handler is registered.
    """
    extension = _pointer(frame + FRAME["extension"])
    if extension == 0 or _int32(extension + EXTENSION["kind"]).value != IS_METADATA:
        return False
    metadata = _pointer(extension + EXTENSION["metadata"])
    for offset, value in zip(METADATA.values(), (*VERSION, 0), strict=True):
        _int32(metadata + offset).value = value
    return True


def _error(frame, message):
    """Creates an XLA error, which copies the message; returns the error's address."""
    text = ctypes.create_string_buffer(message.encode())
    fields = 32, 0, ctypes.addressof(text), FAILED_PRECONDITION
    create = _HANDLER(_pointer(_pointer(frame + FRAME["api"]) + API["create error"]))
    return create(ctypes.addressof((ctypes.c_uint64 * 4)(*fields)))


def _pointer(address):
    return ctypes.c_uint64.from_address(address).value


def _int32(address):
    return ctypes.c_int32.from_address(address)
