"""Accelerators: memory, arithmetic and links of one device, as their makers state them."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates of one device. With measured rates in place of peaks, predicted times are no bounds.

    Attributes:
      name: name in tables.
      memory: bytes.
      operations: floating-point operations a second of 16-bit matrix products, without sparsity.
      bandwidth: bytes a second between the device and its memory.
      inside: bytes a second that a device sends to others of its island, in one direction.
      between: bytes a second that a device sends to other islands.
      island: number of devices that the fast links connect: a host with GPUs, a pod of TPUs.
    """

    name: str
    memory: float
    operations: float
    bandwidth: float
    inside: float
    between: float
    island: int


# GPUs: NVIDIA's data sheets of A100 80 GB SXM, H100 SXM, H200 SXM and DGX B200. NVLink's figure is
# the sum of both directions. Between hosts: one adapter a GPU, as in NVIDIA's DGX systems, with 200
# Gb/s for the A100 and 400 Gb/s for the others.
# TPUs: pages v5e, v5p and v6e of Google Cloud's documentation, and chapter 2 of Austin et al. 2025,
# "How to Scale Your Model": two directions of one axis of the torus, and the host's network shared
# by its chips.
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        each.name: each
        for each in (
            Hardware(
                name="a100",
                memory=80e9,
                operations=312e12,
                bandwidth=2.039e12,
                inside=300e9,
                between=25e9,
                island=8,
            ),
            Hardware(
                name="h100",
                memory=80e9,
                operations=989e12,
                bandwidth=3.35e12,
                inside=450e9,
                between=50e9,
                island=8,
            ),
            Hardware(
                name="h200",
                memory=141e9,
                operations=989e12,
                bandwidth=4.8e12,
                inside=450e9,
                between=50e9,
                island=8,
            ),
            Hardware(
                name="b200",
                memory=180e9,
                operations=2250e12,
                bandwidth=8e12,
                inside=900e9,
                between=50e9,
                island=8,
            ),
            Hardware(
                name="v5e",
                memory=16e9,
                operations=197e12,
                bandwidth=0.81e12,
                inside=90e9,
                between=3.125e9,
                island=256,
            ),
            Hardware(
                name="v5p",
                memory=96e9,
                operations=459e12,
                bandwidth=2.8e12,
                inside=180e9,
                between=6.25e9,
                island=8960,
            ),
            Hardware(
                name="v6e",
                memory=32e9,
                operations=918e12,
                bandwidth=1.6e12,
                inside=180e9,
                between=12.5e9,
                island=256,
            ),
        )
    }
)


def find(hardware: str | Hardware) -> Hardware:
    """The hardware of a name; `ValueError` with the known names if there is none."""
    if isinstance(hardware, Hardware):
        return hardware
    if hardware not in HARDWARE:
        raise ValueError(
            f"hardware must be a Hardware or one of {', '.join(HARDWARE)}, got {hardware!r}"
        )
    return HARDWARE[hardware]
