"""Runs a Triton kernel on NumPy arrays, one program after the other, and finds races.

Triton has an interpreter, which needs PyTorch for the arrays that a kernel gets. This module hands
it the addresses of NumPy arrays. Every load and store is checked: it must lie within an array, a
program may read operands and what it has written itself, and no two programs may write the same
entry. The order of the programs of a GPU is unknown, so anything else would be a race.
"""

import contextlib
import dataclasses
import functools
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

_NAMES = {
    np.dtype("float32"): "fp32",
    np.dtype("float16"): "fp16",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype("float64"): "fp64",
    np.dtype("int32"): "i32",
    np.dtype("int8"): "i8",
    np.dtype("bool"): "i1",
}
_NOBODY = -1
# The interpreter replaces functions of `triton.language` while it runs, and XLA calls it from
# several threads.
_lock = threading.Lock()


def run(
    kernel: JITFunction,
    grid: Sequence[int],
    operands: Sequence[Any],
    results: Sequence[np.ndarray],
    **constants: Any,
) -> None:
    """Runs `kernel(*operands, *results, **constants)` for all programs of a grid.

    Args:
      kernel: function with the decorator `triton.jit`.
      grid: numbers of programs.
      operands: contiguous arrays, which no program may write, None, or tuples of arrays.
      results: contiguous arrays, which programs write.
      **constants: arguments that are known when a kernel is compiled.

    Raises:
      RuntimeError: a race, or an address outside of the arrays.
    """
    with _lock:
        function = _interpreted(kernel)
        memory = _Memory(jax.tree.leaves(list(operands)), results)
        pointers = jax.tree.map(
            lambda array: interpreter._implicit_cvt(_Pointer(array)), [*operands, *results]
        )
        constants = {name: _in_interpreter(value) for name, value in constants.items()}
        sizes = (*grid, 1, 1)[:3]
        with _watched(function, memory):
            interpreter.interpreter_builder.set_grid_dim(*sizes)
            for program, index in enumerate(np.ndindex(*sizes)):
                interpreter.interpreter_builder.set_grid_idx(*index)
                memory.program = program
                function.rewrite()(*pointers, **constants)


class _Pointer:
    """An array in the form in which Triton takes operands."""

    def __init__(self, array: np.ndarray):
        self.dtype, self._array = _NAMES[array.dtype], array

    def data_ptr(self) -> int:
        return self._array.ctypes.data


def _interpreted(kernel: JITFunction) -> Any:
    """The kernel, for the interpreter."""
    return _names(_Scope(kernel.fn.__globals__))[kernel.fn.__name__]


class _Scope:
    """The global names of a function, compared by identity: a key for a cache."""

    def __init__(self, names: dict[str, Any]):
        self.names = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Scope) and self.names is other.names

    def __hash__(self) -> int:
        return id(self.names)


def _in_interpreter(plan: Any) -> Any:
    """A plan, whose functions in the Triton language become functions for the interpreter."""
    if not dataclasses.is_dataclass(plan) or isinstance(plan, type):
        return plan
    functions = {
        name: _interpreted(value)
        for name, value in vars(plan).items()
        if isinstance(value, JITFunction)
    }
    return dataclasses.replace(plan, **functions)


@functools.cache
def _names(scope: _Scope) -> dict[str, Any]:
    """The names of a file, with its functions and constants in the form for the interpreter.

    Functions are copied, as the interpreter changes their global names. To the interpreter,
    constants are plain numbers.
    """
    names = {**scope.names}
    for name, value in names.items():
        if isinstance(value, tl.constexpr):
            names[name] = value.value
        elif isinstance(value, JITFunction) and value.fn.__globals__ is not scope.names:
            names[name] = _interpreted(value)
        elif isinstance(value, JITFunction):
            copy = types.FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
            copy.__annotations__ = value.fn.__annotations__
            names[name] = interpreter.InterpretedFunction(copy)
    return names


class _Memory:
    """Records which program has written each entry of the results."""

    def __init__(self, arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]):
        self.program = 0
        distinct = {x.ctypes.data: x for x in arrays}.values()
        self._parts: list[Any] = [(x.ctypes.data, x.itemsize, x.size, None) for x in distinct]
        for x in results:
            writers = np.full(x.size, _NOBODY, np.int64)
            self._parts.append((x.ctypes.data, x.itemsize, x.size, writers))

    def read(self, addresses: np.ndarray) -> None:
        for index, writers in self._found(addresses):
            if writers is not None and (writers[index] != self.program).any():
                raise RuntimeError("a program reads what it has not written")

    def write(self, addresses: np.ndarray) -> None:
        for index, writers in self._found(addresses):
            if writers is None:
                raise RuntimeError("a program writes to an operand")
            if ((writers[index] != _NOBODY) & (writers[index] != self.program)).any():
                raise RuntimeError("two programs write the same entry")
            writers[index] = self.program

    def _found(self, addresses: np.ndarray) -> Iterator[Any]:
        left: Any = addresses.size
        for start, itemsize, size, writers in self._parts:
            offset = addresses.astype(np.int64) - start
            inside = (offset >= 0) & (offset < size * itemsize)
            if inside.any():
                left -= np.count_nonzero(inside)
                yield offset[inside] // itemsize, writers
        if left:
            raise RuntimeError("an address lies outside of all arrays")


@contextlib.contextmanager
def _watched(function: Any, memory: _Memory) -> Iterator[None]:
    """Lets `memory` see all loads and stores, and restores `triton.language` afterwards.

    The interpreter keeps bfloat16 as 16-bit integers. It would multiply matrices of these integers,
    and it cuts float32 off, where a GPU rounds to the nearest number.
    """
    builder: Any = interpreter.interpreter_builder
    kind = type(builder)

    def load(pointers, mask, *others):
        memory.read(pointers.data[mask.data])
        return kind.create_masked_load(builder, pointers, mask, *others)

    def store(pointers, value, mask, *others):
        memory.write(pointers.data[mask.data])
        return kind.create_masked_store(builder, pointers, value, mask, *others)

    def cast(x, to):
        if x.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            rounded = x.data.astype(ml_dtypes.bfloat16).view(np.uint16)
            return interpreter.TensorHandle(rounded, tl.bfloat16)
        return kind.cast_impl(builder, x, to)

    def wide(x):
        return cast(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def dot(left, right, *others):
        return kind.create_dot(builder, wide(left), wide(right), *others)

    patched = interpreter._patch_lang(function.fn)
    for module in (tl, tl.standard):  # functions that are written in the language
        for name, value in vars(module).copy().items():
            if isinstance(value, JITFunction):
                patched.set_attr(module, name, _interpreted(value))
    ours = {
        "create_masked_load": load,
        "create_masked_store": store,
        "cast_impl": cast,
        "create_dot": dot,
    }
    vars(builder).update(ours)
    try:
        yield
    finally:
        for name in ours:
            delattr(builder, name)
        patched.restore()
