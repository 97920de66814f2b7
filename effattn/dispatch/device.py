"""Requirements of kernels for NVIDIA GPUs, checked if the tracing machine has a GPU."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax

from effattn import dispatch

Arrays = TypeVar("Arrays")


def gpu() -> jax.Device | None:
    """The first NVIDIA GPU of this process, whatever its default device, or None.

    None on a machine without a GPU (which may lower programs for another machine), and if kernels
    are interpreted.
    """
    if dispatch.is_interpreted():
        return None
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # JAX has no such backend here
        return None


def refusal(takes: Callable[[int], bool], capabilities: str) -> str | None:
    """The reason why kernels do not run on this machine's GPU; None if they do, or without GPU.

    Args:
      takes: function from the major compute capability to whether the kernels run on such GPUs.
      capabilities: the accepted compute capabilities, for the message.
    """
    device = gpu()
    if device is None:
        return None
    found = str(device.compute_capability)
    if takes(int(found.split(".")[0])):
        return None
    return f"runs on GPUs of compute capability {capabilities}, got {found}"


def triton_refusal() -> str | None:
    """`refusal` of Triton kernels, which use tensor cores and asynchronous copies of Ampere."""
    return refusal(lambda major: major >= 8, "8.0 and later (Ampere)")


def aligned(arrays: Arrays) -> Arrays:
    """Makes XLA copy slices, so that each array starts at the alignment of an allocation.

    XLA passes a contiguous slice to a kernel in place, at any start address. Mosaic GPU rejects
    arrays that do not start at a multiple of 256 bytes, and Triton kernels assume multiples of 32.
    XLA does not pass slices in place through an optimization barrier.
    """
    return lax.optimization_barrier(arrays)
