"""Compiles kernels in Triton's intermediate form, in a process of its own.

Triton and JAX each bring an LLVM, and the two do not always work in one process.

python compile_ttir.py FOLDER CAPABILITY
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import compile


def usage(cubin: Path) -> dict[str, int]:
    """Registers and bytes of stack that a thread needs."""
    tool = Path(nvidia.__path__[0]) / "bin" / "cuobjdump"
    command = [tool, "--dump-resource-usage", cubin]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", text)}


def main(folder: Path, capability: int) -> None:
    """Prints the resources that each kernel of `kernels.json` needs."""
    found = []
    for number, (name, options) in enumerate(json.loads((folder / "kernels.json").read_text())):
        source = folder / f"{number}.ttir"
        kernel = compile(str(source), GPUTarget("cuda", capability, 32), options)
        cubin = folder / f"{number}.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        products = re.findall(r"wgmma\.mma|mma\.sync", kernel.asm["ptx"])
        stack = usage(cubin)["STACK"]
        found.append([name, kernel.metadata.shared, stack, len(products)])
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
