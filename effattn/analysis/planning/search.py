"""Search over the meshes of a number of devices."""

import collections
import dataclasses
import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from effattn.analysis import liveness
from effattn.analysis.planning import memory, report, settings
from effattn.analysis.planning.hardware import Hardware, find
from effattn.analysis.planning.plan import Plan, closer_seconds, least_seconds, planned
from effattn.analysis.planning.settings import Setting
from effattn.arrays import checks
from effattn.nn import TransformerConfig, TransformerLM
from effattn.parallel import AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meshes:
    """The fastest meshes; `str` gives a table.

    Attributes:
      plans: plans of meshes whose memory is enough, fastest first.
      refused: number of meshes by the reason against them, of those that the search has met.
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
    axes: Sequence[str] | None = None,
    count: int = 5,
    precision: str = "mixed",
    remat: bool = True,
) -> Meshes:
    """Finds the meshes of a number of devices on which a training step is predicted to be fastest.

    The search is exact. It considers all products of axes that give the number of devices, with the
    axis tensor inside one island, and returns the `count` meshes with the smallest `Plan.seconds`
    whose memory is enough. It is a best-first search: meshes wait in the order of a lower bound of
    their time, and a full plan is made only for the mesh with the smallest bound. With several
    stages, each microbatch has one sequence of a device.

    Args:
      model: as in `plan`.
      mechanism: as in `plan`.
      context: as in `plan`.
      devices: number of devices.
      hardware: as in `plan`.
      batch: as in `plan`.
      axes: axes of the mesh that may be larger than 1; default all, without expert for models that
        have no experts.
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
    if axes is not None and not 0 < len(set(axes)) == len(axes):
        raise ValueError(f"axes must be different axes of a mesh, one or more, got {axes!r}")
    whole = settings.make(
        model,
        mechanism,
        context,
        dict.fromkeys(axes or (), 1),
        batch=batch,
        microbatches=1,
        precision=precision,
        remat=remat,
    )
    if axes is None:
        axes = [axis for axis in AXES if axis != "expert" or whole.mixtures]
    refused: collections.Counter[str] = collections.Counter()
    # Heap of (seconds or a lower bound, place of the mesh in the order of all, setting or plan).
    open_: list[tuple[float, int, Any]] = []
    for place, mesh in enumerate(_meshes(devices, axes)):
        setting = _on_mesh(whole, mesh)
        if (reason := _reason_against(setting, device)) is None:
            bound = least_seconds(setting, device)
            heapq.heappush(open_, (bound, place, _Open(setting)))
        else:
            refused[reason] += 1
    plans: list[Plan] = []
    while open_ and len(plans) < count:
        _, place, entry = heapq.heappop(open_)
        if isinstance(entry, Plan):
            plans.append(entry)
            continue
        try:
            seconds, entry = _counted(entry, device)
        except ValueError as error:  # no form takes a mixer
            refused[str(error)] += 1
            continue
        if isinstance(entry, Plan) and not entry.fits:
            refused[_TOO_MUCH] += 1
        else:
            heapq.heappush(open_, (seconds, place, entry))
    if not plans:
        reasons = "; ".join(f"{reason} ({n} meshes)" for reason, n in refused.most_common())
        raise ValueError(f"no mesh of {devices} devices: {reasons}")
    return Meshes(plans=tuple(plans), refused=dict(refused))


def _reason_against(setting: Setting, device: Hardware) -> str | None:
    """A reason against the mesh for which nothing is counted in programs."""
    if setting.mesh["tensor"] > device.island:
        return f"tensor must be at most {device.island}, the devices of an island"
    if problem := next(setting.problems(), None):
        return problem
    return _TOO_MUCH if memory.least(setting) > device.memory else None


@dataclasses.dataclass(frozen=True)
class _Open:
    """A setting whose plan is not complete, with the least or the closer bound of its time."""

    setting: Setting
    is_close: bool = False


def _counted(entry: _Open, device: Hardware) -> tuple[float, "_Open | Plan"]:
    """A closer bound, or at last the time, and what it belongs to."""
    if not entry.is_close:
        return closer_seconds(entry.setting, device), _Open(entry.setting, is_close=True)
    found = planned(entry.setting, device, True, liveness.ACCELERATOR)
    return found.seconds, found


def _on_mesh(setting: Setting, mesh: Mapping[str, int]) -> Setting:
    """The setting on another mesh; with several stages, a microbatch has one sequence a device."""
    setting = dataclasses.replace(setting, mesh={axis: mesh.get(axis, 1) for axis in AXES})
    rows = setting.size("data", "fsdp", "expert")
    parts = max(1, setting.batch // rows) if setting.mesh["stage"] > 1 else 1
    return dataclasses.replace(setting, microbatches=parts)


_TOO_MUCH = "the memory of a device is too small"


def _meshes(devices: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yields all sizes of the axes whose product is the number of devices."""
    first, *others = axes
    if not others:
        yield {first: devices}
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            for rest in _meshes(devices // size, others):
                yield {first: size, **rest}
