"""Bytes that devices send each other in a step, by kind of parallelism.

Sources: Rajbhandari et al. 2020 (ZeRO) for data and fsdp; Shoeybi et al. 2019 and Narayanan et al.
2021 (Megatron-LM) for tensor and stage. The bytes of the axis `sequence` are counted in programs of
`effattn.parallel`.
"""

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
    found = [
        *_gradients(setting),
        *_weights(setting),
        *_tensor(setting),
        *_sequence(setting),
        *_stages(setting),
        *_experts(setting),
    ]
    return tuple(each for each in found if each.number)


def decoding(setting: Setting) -> tuple[Transfer, ...]:
    """All transfers of a step that decodes one token of each sequence."""
    number, layers = memory.parameters(setting), setting.layers
    of_layer = (number.layers + number.experts) / layers * setting.bytes_of["parameters"]
    row = _row(setting)
    return (
        *_collectives(setting, "fsdp: layers", "all-gather", ("fsdp",), layers, of_layer, True),
        *_collectives(setting, "tensor: activations", "all-reduce", ("tensor",), 2 * layers, row),
    )


def seconds(transfer: Transfer, setting: Setting, hardware: Hardware) -> float:
    """Time of the transfers alone."""
    return transfer.sent / rate(transfer.axes, setting, hardware)


def rate(axes: tuple[str, ...], setting: Setting, hardware: Hardware) -> float:
    """Bytes a second that one device sends to devices along mesh axes.

    The last axes of the mesh lie inside an island. A collective between islands uses the links of
    all its members in an island.
    """
    nearer = math.prod(setting.mesh[axis] for axis in AXES[AXES.index(axes[-1]) + 1 :])
    members = setting.size(*axes)
    first = AXES.index(axes[0])
    span = math.prod(setting.mesh[axis] for axis in AXES[first:])
    if span <= hardware.island:
        return hardware.inside
    together = max(1, min(members, hardware.island // nearer))
    return min(hardware.inside, together * hardware.between)


def _collectives(setting, kind, operation, axes, count, size, overlaps=False):
    """Collectives of one size; none on one device."""
    devices = setting.size(*axes)
    if devices > 1:
        sent = count * size * sequence.SHARES[operation](devices)
        yield Transfer(kind, operation, axes, count, size, sent, overlaps)


def _row(setting: Setting, tokens: int = 1) -> float:
    """Bytes of the features of tokens of all sequences of a microbatch."""
    size = setting.rows * tokens * setting.config.features
    return size * setting.bytes_of["parameters"]


def _gradients(setting):
    """Each device has the sum over all tokens; ZeRO keeps an fsdp-th of the gradients."""
    number, each = memory.parameters(setting), setting.bytes_of["gradients"]
    yield from _collectives(
        setting,
        "fsdp: gradients",
        "reduce-scatter",
        ("fsdp",),
        setting.microbatches,
        number.total * each,
        overlaps=True,
    )
    shared, experts = (number.layers + number.ends) * each, number.experts * each
    groups = {("data", "expert", "sequence"): shared, ("data", "sequence"): experts}
    if setting.mesh["expert"] == 1:
        groups = {("data", "sequence"): shared + experts}
    for axes, size in groups.items():
        axes = tuple(axis for axis in axes if setting.mesh[axis] > 1)
        if axes and size:
            size /= setting.mesh["fsdp"]
            kind = f"{', '.join(axes)}: gradients"
            yield from _collectives(setting, kind, "all-reduce", axes, 1, size, overlaps=True)


def _weights(setting):
    """Gathered forward, and once more for the backward pass if layers are recomputed."""
    number, size = memory.parameters(setting), setting.bytes_of["parameters"]
    times = (2 if setting.config.remat else 1) * setting.microbatches
    layer = (number.layers + number.experts) / setting.layers
    for kind, count, total in (
        ("layers", times * setting.layers, layer),
        ("embeddings", setting.microbatches, number.ends),
    ):
        yield from _collectives(
            setting, f"fsdp: {kind}", "all-gather", ("fsdp",), count, total * size, overlaps=True
        )


def _tensor(setting):
    """Two all-reduces a layer forward and two backward; recomputation repeats the mixer's.

    The embedding's rows are summed forward, and the gradient of the last features backward.
    """
    each = 5 if setting.config.remat else 4
    yield from _collectives(
        setting,
        "tensor: activations",
        "all-reduce",
        ("tensor",),
        setting.microbatches * (each * setting.layers + 2),
        _row(setting, setting.tokens),
    )


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
            kind, size = f"sequence: {each.form}", moved.size / moved.number * setting.rows
            yield from _collectives(setting, kind, operation, ("sequence",), number, size)


def exchanges(setting: Setting) -> Iterator[tuple[int, int, sequence.Exchange]]:
    """Yields layer, number of layers that are like it, and exchange of one sequence."""
    devices = setting.mesh["sequence"]
    if devices == 1:
        return
    share = counts.at_length(setting.share, setting.context)
    for layer, count in counts.kinds(share).items():
        yield layer, count, sequence.exchange(share, layer, devices, setting.context)


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


def _experts(setting):
    """To the experts and back, forward and backward; recomputation repeats the forward ones."""
    each = 6 if setting.config.remat else 4
    _, chosen = setting.experts
    yield from _collectives(
        setting,
        "expert: tokens",
        "all-to-all",
        ("expert",),
        each * setting.microbatches * setting.layers,
        chosen * _row(setting, setting.tokens),
    )
