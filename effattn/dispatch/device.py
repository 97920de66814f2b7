"""What kernels for NVIDIA GPUs ask of the GPU, where a program is traced beside one."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax

from effattn import dispatch

Arrays = TypeVar("Arrays")


def gpu() -> jax.Device | None:
    """The first of this process, whatever its default device; None where there is none to ask.

    So it is on a machine without, which may lower programs for another, and where kernels are
    interpreted, which is anywhere.
    """
    if dispatch.is_interpreted():
        return None
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # JAX has no such backend here
        return None


def refusal(takes: Callable[[int], bool], capabilities: str) -> str | None:
    """Why kernels do not run on the GPU that is here, if so.

    Args:
      takes: of the first number of a compute capability, whether they run on such GPUs.
      capabilities: which these are.
    """
    device = gpu()
    if device is None:
        return None
    found = str(device.compute_capability)
    if takes(int(found.split(".")[0])):
        return None
    return f"runs on GPUs of compute capability {capabilities}, got {found}"


def triton_refusal() -> str | None:
    """The same of Triton, whose kernels are written for the tensor cores and copies of Ampere."""
    return refusal(lambda major: major >= 8, "8.0 and later (Ampere)")


def aligned(arrays: Arrays) -> Arrays:
    """The arrays as kernels take them: each begins where an allocation may begin.

    XLA hands a contiguous slice to a kernel in place, wherever in the whole array it begins. Mosaic
    GPU refuses what does not begin at a multiple of 256 bytes, and code of Triton takes multiples
    of 32 for granted. It does not look through a barrier for slices.
    """
    return lax.optimization_barrier(arrays)
