"""Search over the meshes of a number of devices."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from effattn.analysis import liveness
from effattn.analysis.planning import memory, report, settings
from effattn.analysis.planning.hardware import Hardware, find
from effattn.analysis.planning.plan import Plan, least_seconds, planned
from effattn.arrays import checks
from effattn.nn import TransformerConfig, TransformerLM
from effattn.parallel import AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meshes:
    """The fastest meshes; `str` gives a table.

    Attributes:
      plans: plans of meshes whose memory is enough, fastest first.
      refused: number of meshes by the reason against them.
    """

    plans: tuple[Plan, ...]
    refused: Mapping[str, int]

    @property
    def best(self) -> Plan:
        """The fastest plan."""
        return self.plans[0]

    def __str__(self) -> str:
        return report.meshes(self.plans, self.refused)


def best_mesh(
    model: TransformerConfig | TransformerLM,
    mechanism: str | Mapping[str, Any] | None,
    context: int,
    devices: int,
    hardware: str | Hardware,
    *,
    batch: int = 1,
    axes: Sequence[str] = AXES,
    count: int = 5,
    precision: str = "mixed",
    remat: bool = True,
) -> Meshes:
    """Finds the meshes of a number of devices on which a training step is predicted to be fastest.

    All products of axes that give the number of devices are tried, with tensor parallelism inside
    an island alone. With several stages, each microbatch has one sequence of a device.

    Args:
      model: as in `plan`.
      mechanism: as in `plan`.
      context: as in `plan`.
      devices: number of devices.
      hardware: as in `plan`.
      batch: as in `plan`.
      axes: axes of the mesh that may be larger than 1.
      count: number of plans.
      precision: as in `plan`.
      remat: as in `plan`.

    Returns:
      `Meshes`.

    Raises:
      ValueError: a wrong argument, or no mesh divides the numbers and has enough memory; the
        message has the reasons.
    """
    device = find(hardware)
    checks.at_least("devices", devices, 1)
    checks.at_least("count", count, 1)
    refused: collections.Counter[str] = collections.Counter()
    found = []
    for mesh in _meshes(devices, axes):
        if mesh.get("tensor", 1) > device.island:
            refused[f"tensor must be at most {device.island}, the devices of an island"] += 1
            continue
        setting = settings.make(
            model,
            mechanism,
            context,
            mesh,
            batch=batch,
            microbatches=1,
            precision=precision,
            remat=remat,
        )
        if mesh.get("stage", 1) > 1:
            parts = max(1, batch // setting.size("data", "fsdp", "expert"))
            setting = dataclasses.replace(setting, microbatches=parts)
        if reason := next(setting.problems(), None):
            refused[reason] += 1
        elif memory.least(setting) > device.memory:
            refused[_TOO_MUCH] += 1
        else:
            try:
                found.append((least_seconds(setting, device), setting))
            except ValueError as error:  # no form for a divided sequence
                refused[str(error)] += 1
    plans: list[Plan] = []
    for _, setting in sorted(found, key=lambda pair: pair[0]):
        each = planned(setting, device, True, liveness.ACCELERATOR)
        if each.fits:
            plans.append(each)
        else:
            refused[_TOO_MUCH] += 1
        if len(plans) == count:
            break
    if not plans:
        reasons = "; ".join(f"{reason} ({n} meshes)" for reason, n in refused.most_common())
        raise ValueError(f"no mesh of {devices} devices: {reasons}")
    return Meshes(plans=tuple(sorted(plans, key=lambda p: p.seconds)), refused=dict(refused))


_TOO_MUCH = "the memory of a device is too small"


def _meshes(devices: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yields all sizes of the axes whose product is the number of devices."""
    *others, last = axes
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for sizes in itertools.product(divisors, repeat=len(others)):
        rest = devices
        for size in sizes:
            rest = rest // size if rest % size == 0 else 0
        if rest:
            yield {**dict(zip(others, sizes, strict=True)), last: rest}
