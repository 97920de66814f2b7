"""Machine code is stored, read again, and compiled anew where it cannot be read."""

import ctypes

import pytest

from effattn.dispatch import cache
from effattn.llvm import machine_code, runtime

pytestmark = pytest.mark.skipif(
    runtime.refusal() is not None, reason=f"the kernels are not here: {runtime.refusal()}"
)


def adder(number):
    """A module with a function that adds a number to an int32."""
    from llvmlite import ir

    module = ir.Module("adder")
    int32 = ir.IntType(32)
    function = ir.Function(module, ir.FunctionType(int32, [int32]), "adder")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(builder.add(function.args[0], int32(number)))
    return module


def result(number):
    """The sum of 1 and a number, by machine code."""
    engine = machine_code.engine(adder(number))
    return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)(engine.get_function_address("adder"))(1)


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """The folder of the machine code, which is empty."""
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    return tmp_path / "kernels"


@pytest.fixture
def compiled(monkeypatch):
    """The files that machine code was written to, so far."""
    written, write = [], machine_code._write
    monkeypatch.setattr(
        machine_code, "_write", lambda path, code: (written.append(path), write(path, code))
    )
    return written


def test_a_module_is_compiled_once(kernels, compiled):
    assert result(41) == result(41) == 42
    assert result(2) == 3
    assert len(compiled) == 2 and sorted(compiled) == sorted(kernels.iterdir())


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:40] + b"?" + b[41:], lambda b: b""]
)
def test_a_damaged_file_is_replaced(kernels, compiled, damage):
    assert result(41) == 42
    (file,) = kernels.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert result(41) == 42
    assert len(compiled) == 2 and file.read_bytes() == whole


def test_code_of_another_processor_is_not_read(kernels, compiled, monkeypatch):
    assert result(41) == 42
    monkeypatch.setattr(machine_code, "features", lambda: {"sse2": True})
    assert result(41) == 42
    assert len(compiled) == len(list(kernels.iterdir())) == 2


@pytest.mark.parametrize("where", ["none", "not writable"])
def test_without_a_folder_code_is_compiled_each_time(tmp_path, monkeypatch, compiled, where):
    (tmp_path / "kernels").touch()  # a file where the folder would be
    monkeypatch.setattr(cache, "folder", lambda: None if where == "none" else tmp_path)
    assert result(41) == result(41) == 42
    assert len(compiled) == 2
