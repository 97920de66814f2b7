"""Compiles Triton kernels for a GPU that need not exist, in a process of its own.

Triton and JAX each bring an LLVM, and the two do not always work in one process.

python compile_kernels.py CALLS CAPABILITY: prints the resources that each of the pickled calls
takes.
"""

import dataclasses
import importlib
import json
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from effattn.triton import elementwise

ALIGNED = [["tt.divisibility", 16]]


def stack_of(cubin: bytes) -> int:
    """Bytes of local memory of a thread: its stack, with spilled registers."""
    tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (found,) = re.findall(r"STACK:(\d+)", text)
    return int(found)


def compiled(capability, module, name, types, plan, texts, options):
    functions = {field: elementwise._compiled(*text) for field, text in texts.items()}
    plan = dataclasses.replace(plan, **functions)
    kernel = getattr(importlib.import_module(module), name)
    *operands, last = kernel.arg_names
    signature = dict(zip(operands, types, strict=True))
    constants = {operand: None for operand, of in signature.items() if of is None}
    signature |= dict.fromkeys(constants, "constexpr")
    pointers = {}
    for place, (operand, of) in enumerate(zip(operands, types, strict=True)):
        if isinstance(of, tuple):
            pointers |= {(place, inner): ALIGNED for inner in range(len(of))}
            signature[operand] = tuple(f"*{one}" for one in of)
        elif of is not None:
            pointers[place,] = ALIGNED
            signature[operand] = f"*{of}"
    source = ASTSource(kernel, signature | {last: "constexpr"}, constants | {last: plan}, pointers)
    found = compile(source, GPUTarget("cuda", capability, 32), options)
    products = re.findall(r"wgmma\.mma|mma\.sync|tcgen05\.mma", found.asm["ptx"])
    return [name, found.metadata.shared, stack_of(found.asm["cubin"]), len(products)]


if __name__ == "__main__":
    calls = pickle.loads(Path(sys.argv[1]).read_bytes())
    print(json.dumps([compiled(int(sys.argv[2]), *call) for call in calls]))
