"""Plans on paper: memory, operations, traffic and time of a model on a mesh of devices."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from effattn.analysis import liveness
from effattn.analysis.planning import counts, memory, report, settings, traffic
from effattn.analysis.planning.counts import Pass
from effattn.analysis.planning.hardware import Hardware, find
from effattn.analysis.planning.memory import Memory
from effattn.analysis.planning.settings import Setting
from effattn.analysis.planning.traffic import Transfer
from effattn.arrays import checks
from effattn.nn import TransformerConfig, TransformerLM

# Operations that one device for the whole model would not have.
WASTE = frozenset({"recomputed", "divided sequence"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan; `str` gives tables of 80 columns. Figures are those of one device and one step.

    Attributes:
      setting: the model, its sizes and the mesh.
      hardware: the device.
      training: whether the step trains; if not, it decodes one token of each sequence.
      memory: bytes by part.
      operations: operations by part. `WASTE` is recomputation, and the work of the mixers beyond
        an equal share on each of the devices that divide a sequence.
      transfers: transfers by kind.
      computing: seconds of computation: operations at the rate of the hardware, or the bytes of the
        memory at its bandwidth, if they take longer.
      waiting: seconds of transfers during which the device computes nothing.
      hidden: seconds of transfers that run during computation.
      bubble: share of the time in which the stages of a pipeline wait for each other.
    """

    setting: Setting
    hardware: Hardware
    training: bool
    memory: Memory
    operations: Mapping[str, float]
    transfers: tuple[Transfer, ...]
    computing: float
    waiting: float
    hidden: float
    bubble: float

    @property
    def fits(self) -> bool:
        """True if the memory of the device is enough."""
        return self.memory.total <= self.hardware.memory

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return (max(self.computing, self.hidden) + self.waiting) / (1 - self.bubble)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all devices together read or write in a second."""
        tokens = self.setting.context if self.training else 1
        return self.setting.batch * tokens / self.seconds

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation.

        The operations without `WASTE`, divided by the operations that the hardware could do in the
        time of the step.
        """
        useful = sum(n for name, n in self.operations.items() if name not in WASTE)
        return useful / (self.seconds * self.hardware.operations)

    def __str__(self) -> str:
        return report.text(self)


def plan(
    model: TransformerConfig | TransformerLM,
    mechanism: str | Mapping[str, Any] | None,
    context: int,
    mesh: Mapping[str, int],
    hardware: str | Hardware,
    *,
    batch: int = 1,
    microbatches: int = 1,
    precision: str = "mixed",
    remat: bool = True,
    training: bool = True,
    compiler: liveness.Compiler = liveness.ACCELERATOR,
) -> Plan:
    """Predicts memory, operations, traffic and time of a step, without running or compiling it.

    Operations, saved activations, decode states and the traffic of a divided sequence are counted
    in jaxprs of abstract arrays, so that models of any size need no memory.

    *Memory* follows the program's buffers over time (`effattn.analysis.liveness`). Not included are
    temporaries inside of kernels and libraries, alignment, fragmentation, and the program itself.
    With several stages, one device is charged with all embeddings and logits.

    *Time* is a roofline (Austin et al. 2025, "How to Scale Your Model"):

        (max(computing, hidden) + waiting) / (1 - bubble)

    Computation takes its operations at the peak rate of matrix products, or the bytes of its
    weights, states and saved activations at the bandwidth, if they take longer. Gradients, gathered
    weights and activations between stages are hidden behind it; the all-reduces of tensor
    parallelism and the exchanges of a divided sequence are waited for. A sequence is divided by the
    form of `effattn.parallel` that the models of `effattn.nn` use on the mesh. Devices of the axis
    `expert` gather the experts of a layer, as the models do under `jax.jit`. The bubble is
    (p - 1) / (m + p - 1) for p stages and m microbatches (Narayanan et al. 2021). Devices wait for
    no stragglers, latency is zero, and experts get equal loads. So with peak rates the time is a
    lower bound.

    Args:
      model: sizes; of a `TransformerLM` its configuration, so that it may be abstract
        (`nnx.eval_shape`).
      mechanism: a registered name, or a mapping with a name under "name" and options; None for the
        mixers of the model. One without key heads has none of the model's, and one of limited
        length has the context as its limit.
      context: T, tokens of a sequence.
      mesh: devices along axes of `effattn.parallel.AXES`, such as `{"fsdp": 8, "tensor": 4}`.
      hardware: a name of `HARDWARE`, or a `Hardware` with rates of your own.
      batch: sequences of a step, over all devices.
      microbatches: parts of the batch that one device computes one after another; 1 for decoding.
      precision: "mixed", 16-bit weights and gradients with float32 masters, or "float32".
      remat: whether the backward pass of training recomputes each layer.
      training: False for decoding one token of each sequence after T - 1 others. The time is that
        of the weights and the decode state, which are read once.
      compiler: rules by which training stores values. The rules `ACCELERATOR` have not been
        compared with compiled programs yet; the rules `liveness.CPU` have.

    Returns:
      `Plan`.

    Raises:
      ValueError: a wrong argument, a mesh that does not divide the heads, the context, the batch or
        the layers (the message has a sentence for each), or an axis `sequence` for a mixer that no
        form takes, whose tokens each device would gather.
    """
    device = find(hardware)
    setting = settings.make(
        model,
        mechanism,
        context,
        mesh,
        batch=batch,
        microbatches=microbatches,
        precision=precision,
        remat=remat,
    )
    if problems := list(setting.problems()):
        raise ValueError("; ".join(problems))
    if not checks.flag("training", training) and microbatches != 1:
        raise ValueError(f"microbatches must be 1 for decoding, got {microbatches}")
    return planned(setting, device, training, compiler)


def planned(
    setting: Setting, device: Hardware, training: bool, compiler: liveness.Compiler
) -> Plan:
    """The plan of a setting without problems."""
    return _trained(setting, device, compiler) if training else _decoded(setting, device)


def least_seconds(setting: Setting, device: Hardware) -> float:
    """Lower bound of the time of a training step, for which only the whole model is counted.

    Each of t devices of the axis tensor has at least 1 / t of the heads, of the hidden features and
    of the vocabulary, and so at least 1 / t of the operations. The bound leaves out what devices
    exchange and compute more than once because they divide a sequence, and saved activations.
    """
    parts = setting.mesh["tensor"]
    whole = dataclasses.replace(setting, mesh={**setting.mesh, "tensor": 1})
    operations = {name: number / parts for name, number in _operations(whole).items()}
    return _seconds(operations, traffic.without_exchanges(setting), setting, device)


def closer_seconds(setting: Setting, device: Hardware) -> float:
    """Lower bound of the time of a training step, which leaves out saved activations alone."""
    operations = _operations(setting) | _waste(setting)
    return _seconds(operations, traffic.transfers(setting), setting, device)


def _seconds(operations, transfers, setting, device):
    computing = _computing(operations, _moved(setting), device)
    times = _waits(transfers, setting, device)
    return (max(computing, times["hidden"]) + times["waiting"]) / (1 - _bubble(setting))


def _bubble(setting):
    stages = setting.mesh["stage"]
    return (stages - 1) / (setting.microbatches + stages - 1)


def _computing(operations, moved, device):
    return max(sum(operations.values()) / device.operations, moved / device.bandwidth)


def _moved(setting, saved=0.0):
    """Bytes between a device and its memory; `saved` are those of a microbatch's activations.

    Weights are read forward, backward and in recomputation. States of training and activations are
    read and written once.
    """
    sizes = setting.bytes_of
    passes = (3 if setting.config.remat else 2) * setting.microbatches
    weights = passes * memory.parameters(setting).total * sizes["parameters"]
    states = memory.stored(setting) * (sum(sizes.values()) - sizes["gradients"])
    return weights + 2 * (states + saved * setting.microbatches)


def _trained(setting, device, compiler):
    operations, transfers = _operations(setting) | _waste(setting), traffic.transfers(setting)
    moving = max((t.size for t in transfers if t.kind.startswith("stage")), default=0.0)
    used = memory.training(setting, compiler, moving)
    moved = _moved(setting, used.saved / memory.started(setting))
    return Plan(
        setting=setting,
        hardware=device,
        training=True,
        memory=used,
        operations=operations,
        transfers=transfers,
        computing=_computing(operations, moved, device),
        **_waits(transfers, setting, device),
        bubble=_bubble(setting),
    )


def _decoded(setting, device):
    transfers = traffic.decoding(setting)
    used = memory.decoding(setting)
    weights = memory.parameters(setting)
    # Each weight is read once, and multiplied and added for each sequence that uses it.
    _, of_token = counts.parameters_of_experts(counts.at_length(setting.share, setting.context))
    of_token /= setting.mesh["stage"]
    others = weights.layers + weights.ends
    operations = {"weights": 2.0 * setting.rows * (others + of_token)}
    read = others + min(weights.experts, setting.rows * of_token)
    # Each of the devices that divide a cache reads the whole cache.
    states = sum(size * count for size, _, count in memory.states(setting))
    moved = read * setting.bytes_of["parameters"] + states
    return Plan(
        setting=setting,
        hardware=device,
        training=False,
        memory=used,
        operations=operations,
        transfers=transfers,
        computing=_computing(operations, moved, device),
        **_waits(transfers, setting, device),
        # A token passes the stages one after another.
        bubble=1 - 1 / setting.mesh["stage"],
    )


def _waits(transfers, setting, device):
    times = [(t.overlaps, traffic.seconds(t, setting, device)) for t in transfers]
    return {
        "waiting": sum(time for overlaps, time in times if not overlaps),
        "hidden": sum(time for overlaps, time in times if overlaps),
    }


def _operations(setting) -> dict[str, float]:
    """Operations of one device by part."""
    share, rows = setting.share, setting.rows * setting.microbatches
    stages = setting.mesh["stage"]
    runs = rows / (stages * setting.mesh["sequence"])
    mixers, feed_forward, others = (
        part.times(runs) for part in counts.operations_of_layers(share, setting.context)
    )
    ends = counts.operations_of_ends(share).times(rows * setting.tokens)
    found: dict[str, Pass] = {
        "mixers": mixers,
        "feed-forward layers": feed_forward,
        "norms and sums": others,
        "logits and loss": ends,
    }
    named = {f"{name}, forward": part.forward for name, part in found.items()}
    named |= {f"{name}, backward": part.backward for name, part in found.items()}
    if setting.config.remat:
        named["recomputed"] = sum(part.forward for part in (mixers, feed_forward, others))
    return named


def _waste(setting):
    """Operations of the mixers beyond an equal share of each device that divides the sequence."""
    share = counts.at_length(setting.share, setting.context)
    runs = setting.microbatches / setting.mesh["stage"]
    again, waste = 2 if setting.config.remat else 1, 0.0
    for layer, count, each in traffic.exchanges(setting):
        if each.operations is not None:
            equal = counts.operations_of_mixer(share, layer, setting.context)
            more = each.operations.minus(equal.times(setting.rows / setting.mesh["sequence"]))
            forward, backward = (max(0.0, x) for x in more)
            waste += count * runs * (again * forward + backward)
    return {"divided sequence": waste} if waste else {}
