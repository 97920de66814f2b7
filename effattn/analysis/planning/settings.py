"""A training step on a mesh: the model, its sizes, and the share of one device."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from effattn.analysis.planning import counts
from effattn.arrays import checks
from effattn.nn import Experts, TransformerConfig, TransformerLM, build
from effattn.parallel import AXES

# Bytes a parameter: weight, gradient, float32 master, moments of Adam. Rajbhandari et al. 2020.
PRECISIONS: Mapping[str, Mapping[str, int]] = {
    "float32": {"parameters": 4, "gradients": 4, "masters": 0, "optimiser": 8},
    "mixed": {"parameters": 2, "gradients": 2, "masters": 4, "optimiser": 8},
}
_DTYPES = {"float32": "float32", "mixed": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A step of a model on a mesh.

    Attributes:
      config: the whole model, with the dtypes of the precision.
      context: T, tokens of a sequence.
      batch: sequences of a step, over all devices.
      mesh: devices along each axis of `effattn.parallel.AXES`.
      microbatches: parts of the batch that one device computes one after another.
      precision: a key of `PRECISIONS`.
    """

    config: TransformerConfig
    context: int
    batch: int
    mesh: Mapping[str, int]
    microbatches: int
    precision: str

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.mesh.values())

    def size(self, *axes: str) -> int:
        """Number of devices along these axes."""
        return math.prod(self.mesh[axis] for axis in axes)

    @property
    def rows(self) -> int:
        """Sequences of one microbatch on one device."""
        return self.batch // (self.size("data", "fsdp", "expert") * self.microbatches)

    @property
    def tokens(self) -> int:
        """Tokens of a sequence on one device."""
        return self.context // self.mesh["sequence"]

    @property
    def layers(self) -> int:
        """Layers of one device."""
        return self.config.num_layers // self.mesh["stage"]

    @property
    def mixtures(self) -> list[Experts]:
        """The experts of each layer that has some."""
        found = [self.config.layer_experts(layer) for layer in range(self.config.num_layers)]
        return [each for each in found if each is not None]

    @property
    def bytes_of(self) -> Mapping[str, int]:
        """Bytes of each state of a parameter."""
        return PRECISIONS[self.precision]

    @property
    def share(self) -> TransformerConfig:
        """The layers as one device computes them: its heads, hidden features and vocabulary."""
        return _share(self.config, self.mesh["tensor"])

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each number that does not divide."""
        mesh, config = self.mesh, self.config
        rows = self.size("data", "fsdp", "expert") * self.microbatches
        parts = mesh["tensor"]
        key_heads = config.num_kv_heads or config.num_heads
        divided = [
            (rows, self.batch, "data * fsdp * expert * microbatches", "the batch"),
            (mesh["sequence"], self.context, "sequence", "the context"),
            (mesh["stage"], config.num_layers, "stage", "the number of layers"),
            (parts, config.num_heads, "tensor", "the number of heads"),
            (parts, counts.hidden_features(config), "tensor", "the hidden features"),
        ]
        mixtures = self.mixtures
        for number in {each.num_experts for each in mixtures}:
            divided.append((mesh["expert"], number, "expert", "the number of experts"))
        for divisor, number, name, noun in divided:
            if number % divisor:
                yield f"{name} must divide {noun}, {number}, got {divisor}"
        if mesh["expert"] > 1 and not mixtures:
            yield f"expert must be 1 for a model without experts, got {mesh['expert']}"
        if key_heads % parts and parts % key_heads:
            noun = f"the number of key heads, {key_heads}"
            yield f"tensor must divide {noun}, or be a multiple of it, got {parts}"
        if mesh["sequence"] > 1 and mixtures:
            reason = "because each device would compute the experts of all tokens"
            yield f"sequence must be 1 with experts, {reason}, got {mesh['sequence']}"
        if parts > 1 and any(each.capacity_factor is None for each in mixtures):
            reason = "whose hidden features each device would gather"
            yield f"tensor must be 1 for experts without a capacity, {reason}, got {parts}"
        for name in sorted(self._without_heads()) if parts > 1 else ():
            reason = f"because the mixer of {name!r} has no heads to divide"
            yield f"tensor must be 1, {reason}, got {parts}"

    def _without_heads(self):
        layers = counts.kinds(self.config)
        return {
            str(self.config.layer_mixer(layer)[0]["name"])
            for layer in layers
            if not counts.has_heads(counts.at_length(self.config, self.context), layer)
        }


@functools.lru_cache(maxsize=1024)
def _share(config, parts):
    if parts == 1:
        return config
    head_dim = config.head_dim or config.features // config.num_heads
    return dataclasses.replace(
        config,
        vocab_size=-(-config.vocab_size // parts),
        num_heads=config.num_heads // parts,
        # Fewer key heads than devices are repeated.
        num_kv_heads=config.num_kv_heads and max(1, config.num_kv_heads // parts),
        head_dim=head_dim,
        hidden_features=counts.hidden_features(config) // parts,
    )


def make(
    model: TransformerConfig | TransformerLM,
    mechanism: Any,
    context: int,
    mesh: Mapping[str, int],
    *,
    batch: int,
    microbatches: int,
    precision: str,
    remat: bool,
) -> Setting:
    """Makes a setting of checked arguments, as `plan` describes them."""
    config = model.config if isinstance(model, TransformerLM) else model
    if not isinstance(config, TransformerConfig):
        raise ValueError(f"model must be a TransformerConfig or a TransformerLM, got {model!r}")
    if config.keys_from is not None:
        raise ValueError(
            "model must have keys_from=None: plans do not count keys and values that layers share"
        )
    if config.reversible:
        raise ValueError(
            "model must have reversible=False: plans do not count layers that compute their inputs "
            "from their outputs"
        )
    for name, number in (("context", context), ("batch", batch), ("microbatches", microbatches)):
        checks.at_least(name, number, 1)
    for axis, size in mesh.items():
        if axis not in AXES:
            raise ValueError(f"the axes of a mesh are {', '.join(AXES)}; got {axis!r}")
        checks.at_least(f"mesh[{axis!r}]", size, 1, "devices")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if mechanism is not None:
        config = _with_mixer(config, mechanism)
    config = dataclasses.replace(
        config,
        dtype=_DTYPES[precision],
        param_dtype=_DTYPES[precision],
        remat=checks.flag("remat", remat),
        dropout_rate=0.0,
    )
    sizes = {axis: mesh.get(axis, 1) for axis in AXES}
    return Setting(config, context, batch, sizes, microbatches, precision)


def _with_mixer(config, mechanism):
    """The model with this mechanism in all layers; its key heads are left out for one without."""
    config = dataclasses.replace(config, mixer=mechanism)
    mixers = (build.mechanism(group["name"]) for group in config.layer_mixer(0))
    takes = all(mixer.mixer_takes("num_kv_heads") for mixer in mixers)
    return config if takes else dataclasses.replace(config, num_kv_heads=None)
