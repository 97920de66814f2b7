"""Machine that an experiment runs on."""

import functools
import gc
import os
import pathlib
import platform
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.harness.options import Options

_MAPPINGS, MOST_MAPPINGS = pathlib.Path("/proc/self/maps"), 30_000


def environment() -> dict[str, str]:
    """Returns machine and versions, for the report; with the commit in a clone of effattn."""
    import jax

    import effattn

    return {
        "effattn": effattn.__version__,
        **({"commit": found} if (found := commit()) else {}),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "processor": processor(),
        "cores": str(cores()),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


@functools.cache
def commit() -> str:
    """Returns the commit of the clone that has this file, with a + if files changed; or ""."""
    folder = pathlib.Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return ""
    try:
        asked = "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"
        found = subprocess.run(["git", *asked], cwd=folder, capture_output=True, text=True)
    except OSError:  # no git
        return ""
    return found.stdout.strip()


def processor() -> str:
    """Returns the name of the CPU."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def runs_at_once(options: "Options", runs: int) -> int:
    """Returns how many of the runs of a comparison are simultaneous."""
    return min(runs, options.at_once or (1 if options.mesh else default_at_once()))


def default_at_once() -> int:
    """Returns the default number of simultaneous runs.

    One small model leaves half of two CPU cores idle, and a third run uses the time that two runs
    leave. An accelerator has one run.
    """
    import jax

    return 3 if jax.default_backend() == "cpu" and cores() > 1 else 1


def is_full() -> bool:
    """Returns whether compiled programs take so many memory mappings that few are left.

    Linux allows a process 65,530 mappings. A compilation that needs one more ends the process. A
    small model takes about a thousand of them.
    """
    return _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS


def forget_programs() -> None:
    """Drops the compiled programs that nothing holds."""
    import jax

    jax.clear_caches()
    gc.collect()
