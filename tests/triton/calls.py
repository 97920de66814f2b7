"""Kernels that a program calls through jax-triton, compiled for GPUs that need not exist."""

import dataclasses
import importlib.util
import json
import linecache
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from effattn.triton import launch
from tests.pallas.lowering import Compiled

ROOT = Path(__file__).parents[2]
NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32", "int8": "i8"}
NAMES["bool"] = "i1"


def calls_of(function: Any, *arguments: Any) -> list[Any]:
    """Module, name, types, plan, functions and options of each kernel that a program calls."""
    calls = []

    def record(kernel, plan, grid, operands, types, warps, stages):
        named = jax.tree.map(lambda x: NAMES[jnp.dtype(x.dtype).name], [*operands, *types])
        options = {"num_warps": warps, "num_stages": stages}
        # Functions of the user are handed on as texts.
        texts = {
            field: (value.fn.__name__, "".join(linecache.getlines(value.fn.__code__.co_filename)))
            for field, value in vars(plan).items()
            if hasattr(value, "fn")
        }
        plan = dataclasses.replace(plan, **dict.fromkeys(texts))
        name = kernel.fn.__module__, kernel.fn.__name__
        calls.append((*name, named, plan, texts, options))
        return [jnp.zeros(each.shape, each.dtype) for each in types]

    _lower(record, function, *arguments)
    assert calls, "the program calls no kernel"
    return list({repr(call): call for call in calls}.values())


def bytes_of_calls(function: Any, *arguments: Any) -> int:
    """Bytes of all operands and results of the kernels that a program calls."""
    moved = []

    def record(kernel, plan, grid, operands, types, warps, stages):
        moved.extend(x.size * x.dtype.itemsize for x in jax.tree.leaves((operands, types)))
        return [jnp.zeros(each.shape, each.dtype) for each in types]

    _lower(record, function, *arguments)
    assert moved, "the program calls no kernel"
    return sum(moved)


def _lower(record, function, *arguments):
    """Lowers a program, with `record` in place of the calls of kernels."""
    jax.clear_caches()  # functions that are traced already would call no kernel
    with (
        mock.patch.object(launch, "_on_gpu", record),
        mock.patch.object(launch, "refusal", no_refusal),
    ):
        # A call of a kernel is a JAX primitive; only its lowering calls `launch._on_gpu`.
        jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def no_refusal() -> None:
    """No refusal, whether jax-triton is installed or not."""


def compile_calls(capability: int, function: Any, *arguments: Any) -> list[Compiled]:
    """The kernels of a program, compiled for a compute capability, such as 90."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs the triton package, which compiles the kernels")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls"
        path.write_bytes(pickle.dumps(calls_of(function, *arguments)))
        script = Path(__file__).with_name("compile_kernels.py")
        command = [sys.executable, script, path, str(capability)]
        # The key of Triton's cache has the fields of a plan, not its properties: an empty cache.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": folder}
        environment["TRITON_DEFAULT_FP_FUSION"] = "1"
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [Compiled(*each) for each in json.loads(done.stdout)]
