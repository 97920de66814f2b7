"""Memory of one device by part, for a training step or for decoding."""

from typing import NamedTuple

from effattn.analysis import liveness
from effattn.analysis.planning import counts, parts
from effattn.analysis.planning.settings import Setting


class Memory(NamedTuple):
    """Bytes of one device.

    Attributes:
      parameters: weights in the dtype of the computation.
      masters: float32 masters of 16-bit weights.
      optimiser: both moments of Adam.
      gradients: gradients at the step that needs most.
      saved: activations of the forward pass that the backward pass reads, of all layers.
      working: all other buffers at the step that needs most: logits, and one layer's temporaries.
      communication: weights that are gathered, and what is on its way.
      state: decode state (KV cache or recurrent state).
    """

    parameters: float
    masters: float = 0.0
    optimiser: float = 0.0
    gradients: float = 0.0
    saved: float = 0.0
    working: float = 0.0
    communication: float = 0.0
    state: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self)


class Parameters(NamedTuple):
    """Numbers of parameters that one device computes with.

    Attributes:
      layers: in its layers, without experts.
      experts: in the experts of its layers.
      ends: in embeddings, the last norm and the projection to logits.
    """

    layers: float
    experts: float
    ends: float

    @property
    def total(self) -> float:
        """All."""
        return self.layers + self.experts + self.ends


def parameters(setting: Setting) -> Parameters:
    """Parameters of one device, before they are divided by fsdp and expert.

    With several stages this is the device that has all ends: real stages have fewer.
    """
    share = counts.at_length(setting.share, setting.context)
    experts, _ = counts.parameters_of_experts(share)
    layers = counts.parameters_of_layers(share) - experts
    stages = setting.mesh["stage"]
    return Parameters(layers / stages, experts / stages, counts.parameters_of_ends(share))


def stored(setting: Setting) -> float:
    """Number of parameters that one device stores: fsdp divides all of them, expert the experts."""
    number = parameters(setting)
    experts = number.experts / setting.mesh["expert"]
    return (number.layers + number.ends + experts) / setting.mesh["fsdp"]


def training(setting: Setting, compiler: liveness.Compiler, moving: float) -> Memory:
    """Memory of a training step: `moving` are bytes that are on their way between devices."""
    sizes, number = setting.bytes_of, stored(setting)
    peak = _peak(setting, compiler)
    gradients = peak.gradients
    if setting.microbatches > 1:
        # The sum over microbatches is there all the time.
        gradients += number * sizes["gradients"]
    # With recomputation, the weights of one layer are there, and meanwhile those of the next one;
    # without, all weights stay gathered from the forward to the backward pass.
    together = 1 + compiler.overlaps if setting.config.remat else None
    return Memory(
        parameters=number * sizes["parameters"],
        masters=number * sizes["masters"],
        optimiser=number * sizes["optimiser"],
        gradients=gradients,
        saved=peak.saved * started(setting),
        working=peak.working,
        communication=moving + _gathered(setting, together),
    )


def started(setting: Setting) -> int:
    """Microbatches that the first of p stages has started before the first of them comes back."""
    return min(setting.mesh["stage"], setting.microbatches)


def least(setting: Setting) -> float:
    """Lower bound of the memory of a training step, for which nothing is counted in programs.

    It has the states of training and, at the step that computes the loss, the inputs of all layers
    and the float32 logits.
    """
    sizes, number = setting.bytes_of, stored(setting)
    states = sum(size for name, size in sizes.items() if name != "gradients")
    sums = sizes["gradients"] if setting.microbatches > 1 else 0
    tokens = setting.rows * setting.tokens
    inputs = tokens * setting.config.features * sizes["parameters"]
    logits = 4 * tokens * setting.share.vocab_size
    return number * (states + sums) + started(setting) * setting.layers * inputs + logits


def decoding(setting: Setting) -> Memory:
    """Memory of decoding one token of each sequence."""
    weights = stored(setting) * setting.bytes_of["parameters"]
    parts, found = setting.mesh["sequence"], states(setting)
    each = [count * size / (parts if is_cache else 1) for size, is_cache, count in found]
    # The compiler gathers the parts of a cache, one layer at a time.
    cache = max((size for size, is_cache, _ in found if is_cache and parts > 1), default=0)
    return Memory(
        parameters=weights,
        communication=cache + _gathered(setting, 2),
        state=sum(each),
    )


def states(setting: Setting) -> list[tuple[int, bool, float]]:
    """For each kind of layers: bytes of a decode state, whether it is a cache, number of layers.

    A cache has an entry for each token, so that the axis `sequence` can divide it.
    """
    share = counts.at_length(setting.share, setting.context)
    found = []
    for layer, count in counts.kinds(share).items():
        size, half = (
            counts.state_bytes(share, layer, setting.rows, length)
            for length in (setting.context, max(1, setting.context // 2))
        )
        found.append((size, size > half, count / setting.mesh["stage"]))
    return found


def _gathered(setting, together):
    """Bytes of weights that fsdp and expert have gathered.

    These are the weights of some layers that are there together, or of the ends; None for all.
    """
    number, size = parameters(setting), setting.bytes_of["parameters"]
    is_divided = setting.mesh["fsdp"] > 1
    of_layers = (is_divided or setting.mesh["expert"] > 1) * number.experts
    of_layers += is_divided * number.layers
    ends = is_divided * number.ends
    if together is None:
        return (of_layers + ends) * size
    return max(min(1, together / setting.layers) * of_layers, ends) * size


class _Peak(NamedTuple):
    gradients: float
    saved: float
    working: float


def _peak(setting: Setting, compiler) -> _Peak:
    """The step that needs most memory, of one microbatch.

    Memory is counted for a model of four layers, and continued in straight lines: each more layer
    adds its saved activations or its gradients. Layers that differ are counted in full, and then
    saved activations are not told from working ones.
    """
    share = counts.at_length(setting.share, setting.context)
    shards = parameters(setting).total / stored(setting) if compiler.scatters else 1
    devices, forms = setting.mesh["sequence"], _forms(share, setting)

    def segments(layers):
        config = counts.first_layers(share, layers)
        sizes = setting.rows, setting.tokens, compiler
        steps = counts.steps(config, *sizes, forms[:1] * layers if alike else forms, devices)
        return [_most(steps.timeline, start, end, shards) for start, end in _bounds(steps)]

    alike = len(counts.kinds(share)) == 1
    if not alike:
        return _labelled(segments(setting.layers), 0, setting.layers)
    last, third, second, first, end = segments(4)
    saved, gradients = third[1] - second[1], second[0] - third[0]
    if setting.layers < 4:
        return _labelled(segments(setting.layers), saved, setting.layers)
    more = setting.layers - 4
    grown = [(last[0], last[1] + more * saved)]
    grown += [(each[0] + more * gradients, each[1]) for each in (first, end)]
    return _labelled(grown, saved, setting.layers)


def _forms(share, setting):
    """The form of each layer's mixer that divides the sequence; none on one device."""
    sizes = setting.mesh["sequence"], setting.context, setting.rows
    if setting.mesh["sequence"] == 1:
        return ()
    return tuple(parts.forward(share, layer, *sizes)[0] for layer in counts.alike(share))


def _bounds(steps):
    """Segments of the program: all up to the last layer's gradients, other layers, the end."""
    ends = [*steps.layers[::-1], len(steps.timeline.live) - 1]
    return list(zip([0, *(end + 1 for end in ends[:-1])], [end + 1 for end in ends], strict=True))


def _most(timeline, start, end, shards):
    """Gradients and other bytes at the step of a segment that needs most."""
    rows = zip(timeline.results[start:end], timeline.live[start:end], strict=True)
    return max(((r / shards, live - r) for r, live in rows), key=sum, default=(0.0, 0.0))


def _labelled(segments, saved, layers):
    gradients, others = max(segments, key=sum)
    kept = min(others, saved * layers)
    return _Peak(gradients, kept, others - kept)
