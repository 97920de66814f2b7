"""Kernel calls from XLA: the C interface, wrong buffers, lack of memory, and other processes."""

import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import effattn
from effattn.llvm import runtime
from tests.marks import slow_but_for

pytestmark = pytest.mark.skipif(
    runtime.refusal() is not None, reason=f"the kernels are not here: {runtime.refusal()}"
)
attend = functools.partial(effattn.dot_product_attention, implementation="llvm")


class Header:
    """Offsets of fields, sizes of structures and values of names in the C header of jaxlib."""

    def __init__(self):
        path = pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
        text = re.sub(r"//.*|/\*.*?\*/", "", path.read_text())
        text = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\);", r"void* \1;", text)
        self.defined = dict(re.findall(r"#define (\w+) (\d+)", text))
        self.named = dict(re.findall(r"\b(XLA_FFI_\w+) = (\d+)", text))
        self.enums = set(re.findall(r"typedef enum \{[^}]*\} (\w+);", text))
        self.fields = {}
        for name, body in re.findall(r"struct (\w+) \{\n([^}]*)\}", text):
            self.fields[name] = re.findall(
                r"^\s*(?:const )?(?:struct )?(\w+)(\**) ?(\w+);", body, re.M
            )

    def kind(self, kind, pointer):
        """(size, alignment) of a type."""
        if pointer or kind in ("size_t", "int64_t"):
            return 8, 8
        if kind in ("int", "int32_t", "uint32_t") or kind in self.enums or "Traits" in kind:
            return 4, 4
        return self.layout(kind)[1], 8

    def layout(self, structure):
        """(offsets by field, size) of a structure."""
        offsets, at = {}, 0
        for kind, pointer, field in self.fields[structure]:
            size, alignment = self.kind(kind, pointer)
            at = -(-at // alignment) * alignment
            offsets[field], at = at, at + size
        return offsets, -(-at // 8) * 8

    def offset(self, structure, path):
        """Offset of a field, or of a field within a field."""
        total = 0
        for field in path.split("."):
            offsets, _ = self.layout(structure)
            total += offsets[field]
            structure = next(k for k, _, name in self.fields[structure] if name == field)
        return total


def test_offsets_are_those_of_the_header():
    header = Header()
    frame = {
        "extension": "extension_start",
        "api": "api",
        "context": "ctx",
        "stage": "stage",
        "argument count": "args.size",
        "arguments": "args.args",
        "result count": "rets.size",
        "results": "rets.rets",
        "attribute count": "attrs.size",
        "attribute types": "attrs.types",
        "attributes": "attrs.attrs",
    }
    api = {
        "major": "api_version.major_version",
        "minor": "api_version.minor_version",
        "create error": "XLA_FFI_Error_Create",
        "destroy error": "XLA_FFI_Error_Destroy",
        "schedule": "XLA_FFI_ThreadPool_Schedule",
        "count threads": "XLA_FFI_ThreadPool_NumThreads",
    }
    metadata = {
        "major": "api_version.major_version",
        "minor": "api_version.minor_version",
        "traits": "traits",
    }
    extension = {"kind": "extension_base.type", "metadata": "metadata"}
    buffer = {"dtype": "dtype", "data": "data", "rank": "rank", "sizes": "dims"}
    for structure, paths, offsets in (
        ("XLA_FFI_CallFrame", frame, runtime.FRAME),
        ("XLA_FFI_Api", api, runtime.API),
        ("XLA_FFI_Metadata", metadata, runtime.METADATA),
        ("XLA_FFI_Metadata_Extension", extension, runtime.EXTENSION),
        ("XLA_FFI_Buffer", buffer, runtime.BUFFER),
        ("XLA_FFI_Scalar", {"dtype": "dtype", "value": "value"}, runtime.SCALAR),
        ("XLA_FFI_Array", {"dtype": "dtype", "size": "size", "data": "data"}, runtime.ARRAY),
    ):
        assert offsets == {name: header.offset(structure, path) for name, path in paths.items()}
    for structure, name in (
        ("XLA_FFI_CallFrame", "frame"),
        ("XLA_FFI_Buffer", "buffer"),
        ("XLA_FFI_Api", "api"),
    ):
        assert runtime.SIZES[name] <= header.layout(structure)[1]


def test_constants_are_those_of_the_header():
    header = Header()
    major, minor = (int(header.defined[f"XLA_FFI_API_{name}"]) for name in ("MAJOR", "MINOR"))
    assert major == runtime.VERSION[0] and minor >= runtime.VERSION[1]
    expected = {
        "XLA_FFI_Extension_Metadata": runtime.IS_METADATA,
        "XLA_FFI_ExecutionStage_EXECUTE": runtime.IS_EXECUTION,
        "XLA_FFI_AttrType_ARRAY": runtime.IS_ARRAY,
        "XLA_FFI_AttrType_SCALAR": runtime.IS_SCALAR,
        "XLA_FFI_Error_Code_INVALID_ARGUMENT": runtime.INVALID_ARGUMENT,
        "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED": runtime.RESOURCE_EXHAUSTED,
        "XLA_FFI_Error_Code_FAILED_PRECONDITION": runtime.FAILED_PRECONDITION,
        "XLA_FFI_DataType_S32": runtime.DTYPE_CODES["int32"],
        "XLA_FFI_DataType_S64": runtime.DTYPE_CODES["int64"],
        "XLA_FFI_DataType_F32": runtime.DTYPE_CODES["float32"],
    }
    assert {name: int(header.named[name]) for name in expected} == expected


QUERY = np.ones((2, 20, 2, 8), np.float32)
IDS, RANGES = np.ones((2, 20), np.int32), np.ones((2, 2), np.int32)
NO_STEPS = (np.zeros((1, 0), np.int32),) * 3
NO_BIAS = np.zeros((1, 1, 0, 0), np.float32)
KNOWN = NO_BIAS, IDS, IDS, RANGES, *NO_STEPS
LIMITS = np.array([9, 9, 0, 1, 0, 0, 1, 0], np.int64)
RIGHT = {
    "operands": (QUERY, QUERY, QUERY, *KNOWN),
    "results": (QUERY.shape, QUERY.shape[:-1], QUERY.shape[:-1]),
    "attributes": {"limits": LIMITS, "scale": np.float32(1)},
}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"operands": (QUERY, jnp.bfloat16(QUERY), QUERY, *KNOWN)}, "key must be float32"),
        (
            {"operands": (QUERY, QUERY, QUERY, NO_BIAS, IDS, np.uint8(IDS), RANGES, *NO_STEPS)},
            "key_ids must be int32",
        ),
        ({"operands": (QUERY, QUERY, QUERY[0], *KNOWN)}, "value must be float32 with 3 axes"),
        (
            {"operands": (QUERY, QUERY, QUERY, NO_BIAS, IDS[0], IDS, RANGES, *NO_STEPS)},
            "query_ids must be int32 with 1 axes",
        ),
        ({"operands": (QUERY, QUERY, QUERY)}, "needs 10 arguments"),
        ({"results": RIGHT["results"][:2]}, "needs 3 results"),
        ({"results": (QUERY.shape[:-1],) * 3}, "query must be float32 with 3 axes"),
        ({"attributes": {"scale": np.float32(1)}}, "needs the attributes limits"),
        ({"attributes": {"limits": LIMITS[:4], "scale": np.float32(1)}}, "needs the attributes"),
        ({"attributes": {"limits": np.int32(LIMITS), "scale": np.float32(1)}}, "8 int64"),
        ({"attributes": {"limits": LIMITS, "scale": np.float64(1)}}, "and scale, float32"),
        ({"attributes": {"limits": np.float32(1), "scale": LIMITS}}, "needs the attributes"),
    ],
)
def test_calls_that_a_kernel_was_not_written_for_are_errors_of_xla(wrong, message):
    given = RIGHT | wrong
    name = runtime.prepare("effattn_block_attention_forward")

    def call(*operands):
        results = [jax.ShapeDtypeStruct(shape, np.float32) for shape in given["results"]]
        return jax.ffi.ffi_call(name, results)(*operands, **given["attributes"])

    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{name}: .*{message}"):
        jax.block_until_ready(jax.jit(call)(*given["operands"]))


def test_operands_of_other_dtypes_are_refused_as_they_are_traced():
    with pytest.raises(TypeError, match="operands of .* must be float32 or int32, got bfloat16"):
        runtime.call("effattn_linear_recurrence_forward", [], [jnp.bfloat16(QUERY)])


# Under vmap, an unmapped array has one entry for all calls.


def some_mapped(arrays, quick):
    """All choices of mapped axes for a number of arrays, except the choice without any."""
    return slow_but_for(quick, list(itertools.product([0, None], repeat=arrays))[:-1])


@pytest.mark.parametrize(
    "mapped", some_mapped(4, [(0, 0, 0, 0), (0, None, None, None), (None, 0, None, 0)])
)
def test_vmap_of_some_arrays_agrees_with_xla(mapped):
    """Query, key, value and lengths in two levels of vmap; the inner level maps only queries."""
    rng = np.random.default_rng(0)
    shapes = {"query": (2, 20, 4, 8), "key": (2, 30, 2, 8), "value": (2, 30, 2, 5)}
    arrays = [
        rng.normal(size=(*([3] if axis == 0 else []), *([7] if name == "query" else []), *shape))
        for (name, shape), axis in zip(shapes.items(), mapped, strict=False)
    ]
    arrays = [x.astype(np.float32) for x in arrays]
    lengths = np.array([[30, 11], [3, 0], [29, 30]])[: 3 if mapped[3] == 0 else 1]
    lengths = lengths if mapped[3] == 0 else lengths[0]

    def results(implementation):
        def one(query, key, value, lengths):
            out, lse = effattn.dot_product_attention(
                query,
                key,
                value,
                key_value_seq_lengths=lengths,
                implementation=implementation,
                return_residual=True,
            )
            return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

        inner = jax.vmap(jax.value_and_grad(one, (0, 1, 2)), (0, None, None, None))
        return jax.jit(jax.vmap(inner, mapped))(*arrays, lengths)

    for ours, theirs in zip(*map(jax.tree.leaves, (results("llvm"), results("xla"))), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mapped", some_mapped(3, [(0, None, None), (None, 0, 0)]))
def test_vmap_of_some_arrays_of_a_recurrence_agrees_with_xla(mapped):
    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=(*([3] if axis == 0 else []), 2, 40, 2, 5)).astype(np.float32)
        for axis in mapped
    ]

    def results(implementation):
        def one(*arrays):
            call = functools.partial(effattn.linear_attention, is_causal=True)
            return (call(*arrays, implementation=implementation) ** 2).sum()

        return jax.jit(jax.vmap(jax.value_and_grad(one, (0, 1, 2)), mapped))(*arrays)

    for ours, theirs in zip(*map(jax.tree.leaves, (results("llvm"), results("xla"))), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_vmap_copies_no_array_that_it_does_not_map():
    query = jax.ShapeDtypeStruct((64, 1, 16, 1, 32), np.float32)
    key = jax.ShapeDtypeStruct((1, 8192, 1, 32), np.float32)
    run = jax.jit(jax.vmap(attend, (0, None, None)))
    used = run.lower(query, key, key).compile().memory_analysis().temp_size_in_bytes
    assert used < 64 * 16 * 32 * 4


# Other processes.


def run_python(code, *arguments):
    # XLA cannot serialise a program that it has itself read from the cache of compiled programs.
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )


SAVE = """
import pickle, sys, jax, numpy as np, effattn
from jax.experimental import serialize_executable

x = jax.random.normal(jax.random.key(0), (2, 40, 2, 8))
def loss(x):
    softmax = effattn.dot_product_attention(x, x, x, is_causal=True, implementation="llvm")
    linear = effattn.linear_attention(x, x, x, is_causal=True, implementation="llvm")
    return (softmax * linear).sum()
program = jax.jit(jax.value_and_grad(loss)).lower(x).compile()
with open(sys.argv[1], "wb") as file:
    pickle.dump((serialize_executable.serialize(program), x, program(x)), file)
"""

LOAD = """
import pickle, sys, jax, numpy as np, effattn
from jax.experimental import serialize_executable

with open(sys.argv[1], "rb") as file:
    saved, x, wanted = pickle.load(file)
found = serialize_executable.deserialize_and_load(*saved)(x)
jax.tree.map(np.testing.assert_array_equal, found, wanted)
"""


def test_a_compiled_program_runs_in_a_process_that_imports_effattn(tmp_path):
    for code in (SAVE, LOAD):
        done = run_python(code, tmp_path / "program")
        assert done.returncode == 0, done.stderr


OUT_OF_MEMORY = """
import resource, jax, numpy as np, effattn

x = np.ones((1, 16, 1, 2**19), np.float32)  # a tile of it takes gigabytes
run = jax.jit(lambda x: effattn.dot_product_attention(x, x, x, implementation="llvm"))
program = run.lower(x).compile()
small = np.ones((1, 16, 1, 8), np.float32)
effattn.dot_product_attention(small, small, small, implementation="llvm")
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
try:
    jax.block_until_ready(program(x))
except jax.errors.JaxRuntimeError as error:
    assert "effattn_block_attention_forward: out of memory" in str(error), error
else:
    raise AssertionError("there was memory")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
out = effattn.dot_product_attention(small, small, small, implementation="llvm")
np.testing.assert_array_equal(out, small)
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_lack_of_memory_is_an_error_of_xla():
    done = run_python(OUT_OF_MEMORY)
    assert done.returncode == 0, done.stderr
