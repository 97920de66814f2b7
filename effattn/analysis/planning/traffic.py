"""Bytes that devices send each other in a step, by kind of parallelism.

Sources: Rajbhandari et al. 2020 (ZeRO) for data and fsdp; Shoeybi et al. 2019 and Narayanan et al.
2021 (Megatron-LM) for tensor and stage. The bytes of the axis `sequence` are counted in programs of
`effattn.parallel`.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from effattn.analysis.planning import counts, memory, sequence
from effattn.analysis.planning.hardware import Hardware
from effattn.analysis.planning.settings import Setting
from effattn.parallel import AXES


class Transfer(NamedTuple):
    """Transfers of one kind in a step.

    Attributes:
      kind: kind of parallelism and what moves.
      operation: the collective.
      axes: mesh axes of the devices that take part.
      number: number of collectives.
      size: mean bytes of one collective's operand or result on a device, whichever is larger.
      sent: bytes that one device sends, in all of them.
      overlaps: whether computation goes on meanwhile.
    """

    kind: str
    operation: str
    axes: tuple[str, ...]
    number: int
    size: float
    sent: float
    overlaps: bool


def transfers(setting: Setting) -> tuple[Transfer, ...]:
    """All transfers of a training step."""
    return (*without_exchanges(setting), *_sequence(setting))


def without_exchanges(setting: Setting) -> tuple[Transfer, ...]:
    """The transfers of a training step, without those of the mixers of a divided sequence."""
    found = [
        *_gradients(setting),
        # Once more for the backward pass if layers are recomputed.
        *_gathered(setting, 2 if setting.config.remat else 1),
        *_tensor(setting),
        *_stages(setting),
    ]
    return tuple(each for each in found if each.number)


def decoding(setting: Setting) -> tuple[Transfer, ...]:
    """All transfers of a step that decodes one token of each sequence."""
    row, layers = _row(setting), 2 * setting.layers
    caches = [(round(count), size) for size, is_cache, count in memory.states(setting) if is_cache]
    found = (
        *_gathered(setting, 1),
        *_collectives(setting, "tensor: activations", "all-reduce", ("tensor",), layers, row),
        *_collectives(setting, "stage: activations", "send", ("stage",), 1, row),
        # Each device computes attention to the whole cache.
        *itertools.chain.from_iterable(
            _collectives(setting, "sequence: cache", "all-gather", ("sequence",), *cache)
            for cache in caches
        ),
    )
    return tuple(each for each in found if each.number)


def seconds(transfer: Transfer, setting: Setting, hardware: Hardware) -> float:
    """Time of the transfers alone.

    The last axes of the mesh lie inside an island. Gathers and sums between islands use the links
    of all their members in an island. In an exchange, a device sends what is for other islands by
    its own link. All devices send to a neighbour at once, so that the slowest link decides.
    """
    axes, sent = transfer.axes, transfer.sent
    nearer = math.prod(setting.mesh[axis] for axis in AXES[AXES.index(axes[-1]) + 1 :])
    span = math.prod(setting.mesh[axis] for axis in AXES[AXES.index(axes[0]) :])
    if span <= hardware.island:
        return sent / hardware.inside
    members = setting.size(*axes)
    together = max(1, min(members, hardware.island // nearer))
    if transfer.operation == "send":
        return sent / hardware.between
    if transfer.operation == "all-to-all":
        outside = sent * (members - together) / (members - 1)
        return max((sent - outside) / hardware.inside, outside / hardware.between)
    return sent / min(hardware.inside, together * hardware.between)


def _collectives(setting, kind, operation, axes, count, size, overlaps=False):
    """Collectives of one size; none on one device."""
    axes, devices = _larger(setting, axes), setting.size(*axes)
    if devices > 1:
        sent = count * size * sequence.SHARES[operation](devices)
        yield Transfer(kind, operation, axes, count, size, sent, overlaps)


def _row(setting: Setting, tokens: int = 1) -> float:
    """Bytes of the features of tokens of all sequences of a microbatch."""
    size = setting.rows * tokens * setting.config.features
    return size * setting.bytes_of["parameters"]


def _gradients(setting):
    """Each device has the sum over all tokens; ZeRO keeps the part of the gradients it stores."""
    number, each = memory.parameters(setting), setting.bytes_of["gradients"]
    groups = (
        ("gradients", number.layers + number.ends, ("fsdp",), ("data", "expert", "sequence")),
        ("gradients of experts", number.experts, ("fsdp", "expert"), ("data", "sequence")),
    )
    for what, count, stored, shared in groups:
        for axes, operation, times, size in (
            (stored, "reduce-scatter", setting.microbatches, count * each),
            (shared, "all-reduce", 1, count * each / setting.size(*stored)),
        ):
            kind = f"{', '.join(_larger(setting, axes))}: {what}"
            yield from _collectives(setting, kind, operation, axes, times * bool(size), size, True)


def _gathered(setting, times):
    """Gathers of the weights of all layers, several times, and of the embeddings."""
    number, size = memory.parameters(setting), setting.bytes_of["parameters"]
    experts = len(setting.mixtures) // setting.mesh["stage"]
    for what, axes, count, total in (
        ("layers", ("fsdp",), times * setting.layers, number.layers / setting.layers),
        ("experts", ("fsdp", "expert"), times * experts, number.experts / max(1, experts)),
        ("embeddings", ("fsdp",), 1, number.ends),
    ):
        kind, runs = f"{', '.join(_larger(setting, axes))}: {what}", setting.microbatches * count
        yield from _collectives(setting, kind, "all-gather", axes, runs, total * size, True)


def _larger(setting, axes):
    """The axes along which there are several devices."""
    return tuple(axis for axis in axes if setting.mesh[axis] > 1)


def _tensor(setting):
    """Two all-reduces a layer forward and two backward; recomputation repeats the mixer's.

    The embedding's rows are summed forward, and the gradient of the last features backward. Experts
    sum their slots.
    """
    row = _row(setting, setting.tokens)
    of_mixers = (3 if setting.config.remat else 2) * setting.layers
    experts = len(setting.mixtures) // setting.mesh["stage"]
    # Without a capacity, the axis `tensor` is refused.
    slots = sum((each.capacity_factor or 0) * each.experts_per_token for each in setting.mixtures)
    others = 2 * (setting.layers - experts) + 2
    for what, number, size in (
        ("activations", of_mixers + others, row),
        ("slots of experts", 2 * experts, slots / max(1, len(setting.mixtures)) * row),
    ):
        runs = setting.microbatches * number
        yield from _collectives(setting, f"tensor: {what}", "all-reduce", ("tensor",), runs, size)


def _sequence(setting):
    again = 2 if setting.config.remat else 1
    for _, count, each in exchanges(setting):
        runs = setting.microbatches * count // setting.mesh["stage"]
        for operation in {**each.forward, **each.backward}:
            forward, backward = (
                moved.get(operation, sequence.Moved()) for moved in (each.forward, each.backward)
            )
            moved = backward.plus(forward, again)
            number = round(runs * moved.number)
            kind, size = f"sequence: {each.form}", moved.size / moved.number
            yield from _collectives(setting, kind, operation, ("sequence",), number, size)


def exchanges(setting: Setting) -> Iterator[tuple[int, int, sequence.Exchange]]:
    """Yields layer, number of layers that are like it, and the exchange of a microbatch."""
    devices = setting.mesh["sequence"]
    if devices == 1:
        return
    sizes = devices, setting.context, setting.rows
    share = counts.at_length(setting.share, setting.context)
    for layer, count in counts.kinds(share).items():
        yield layer, count, sequence.exchange(share, layer, *sizes)


def _stages(setting):
    yield from _collectives(
        setting,
        "stage: activations",
        "send",
        ("stage",),
        2 * setting.microbatches,
        _row(setting, setting.tokens),
        overlaps=True,
    )
