"""Machine code of the kernels: LLVM's compiler, and a folder of what it has compiled.

Machine code is stored under a hash of all that it depends on: the kernel's LLVM IR, the processor
and its features, the version of LLVM and the options of the compiler. So it is never out of date.
"""

import contextlib
import functools
import hashlib
from pathlib import Path
from typing import Any

from effattn.dispatch import cache

# Options of the compiler. The generated loops are already vectorised and unrolled.
_CODE_LEVEL, _SPEED_LEVEL = 3, 2
_OFF = "loop_vectorization", "slp_vectorization", "loop_unrolling"


@functools.cache
def features() -> dict[str, bool]:
    """Features of this processor by LLVM's names; empty if LLVM does not know the processor."""
    from llvmlite import binding

    with contextlib.suppress(RuntimeError):
        return dict(binding.get_host_cpu_features())
    return {}


def engine(module: Any) -> Any:
    """An engine with the compiled functions of an `llvmlite.ir.Module`."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module.triple = binding.get_process_triple()
    # With prefer-256-bit, LLVM would use half of each 512-bit register on some processors.
    signs = {True: "+", False: "-"}
    names = ",".join(
        f"{signs[has and feature != 'prefer-256-bit']}{feature}"
        for feature, has in features().items()
    )
    processor = binding.get_host_cpu_name()
    machine = binding.Target.from_triple(module.triple).create_target_machine(
        cpu=processor, features=names, opt=_CODE_LEVEL, jit=True
    )
    text = str(module)
    path = _path(module.name, processor, names, binding.llvm_version_info, text)
    stored = _read(path)
    compiled = binding.parse_assembly(text)
    if stored is None:
        compiled.verify()
        options = binding.create_pipeline_tuning_options(speed_level=_SPEED_LEVEL)
        for name in _OFF:
            setattr(options, name, False)
        passes = binding.create_pass_builder(machine, options)
        passes.getModulePassManager().run(compiled, passes)
    made = binding.create_mcjit_compiler(compiled, machine)
    # The engine takes the stored machine code in place of compiling the module.
    made.set_object_cache(lambda _, code: _write(path, code), lambda _: stored)
    made.finalize_object()
    return made


def _path(name: str, *dependencies: Any) -> Path | None:
    """File for machine code with these dependencies."""
    where = cache.folder()
    key = repr((dependencies, _CODE_LEVEL, _SPEED_LEVEL, _OFF))
    return where and where / "kernels" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _read(path: Path | None) -> bytes | None:
    """The machine code in a file; None if there is none, or if the file is damaged."""
    try:
        stored = b"" if path is None else path.read_bytes()
    except OSError:
        return None
    digest, code = stored[:32], stored[32:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write(path: Path | None, code: bytes) -> None:
    """Stores machine code, if this user may write there."""
    if path is not None:
        with contextlib.suppress(OSError):
            cache.write(path, hashlib.sha256(code).digest() + code)
