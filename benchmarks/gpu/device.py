"""Description of the machine and its GPU."""

import subprocess
from typing import Any

import jax

from benchmarks import machine

PACKAGES = (
    *machine.PACKAGES, "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12", "triton", "flash-linear-attention", "jax-linear-attention",
)  # fmt: skip


def about_device(device: jax.Device) -> dict[str, Any]:
    """Returns the description of the machine, with its GPU under "device"."""
    return {**machine.describe(PACKAGES), "device": _describe(device)}


def _describe(device: jax.Device) -> dict[str, Any]:
    """Returns name and platform of the device, and driver and memory by nvidia-smi."""
    found: list[str | None] = [None, None]
    if device.platform == "gpu":
        query = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
        try:
            told = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
            found = [*told.stdout.splitlines()[0].split(", ")]
        except (OSError, subprocess.SubprocessError, IndexError):
            pass
    name = str(getattr(device, "device_kind", device))
    return {"name": name, "platform": device.platform, "driver": found[0], "memory": found[1]}
