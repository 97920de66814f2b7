"""Exchanges between devices that divide a sequence, counted in jaxprs of a layer's mixer."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from effattn import parallel
from effattn.analysis import cost
from effattn.analysis.planning import counts
from effattn.nn import TransformerConfig
from effattn.nn.block import Block

_AXIS = "sequence"
# Tokens of a device at which the operations of recurrences are counted.
_FEW = 1024

FORMS: Mapping[str, Callable[[Any], Any]] = {
    "ring": lambda function: functools.partial(parallel.ring_attention, axis_name=_AXIS),
    "states": lambda function: parallel.pass_states(function, _AXIS),
    "heads": lambda function: parallel.exchange_heads(function, _AXIS),
}
# Entries of a collective's operand that a device sends, for P devices.
_SENT: Mapping[str, Callable[[int], float]] = {
    "ppermute": lambda devices: 1.0,
    "all_to_all": lambda devices: (devices - 1) / devices,
    "all_gather": lambda devices: devices - 1.0,
    "all_gather_invariant": lambda devices: devices - 1.0,
    "reduce_scatter": lambda devices: (devices - 1) / devices,
}


@functools.lru_cache(maxsize=256)
def form_of(config: TransformerConfig, layer: int, devices: int) -> str:
    """The form that divides the sequence of a layer: the first that its mechanism takes.

    Raises:
      ValueError: no form takes the attention function of the layer's mixer, or it has none.
    """
    names = [group["name"] for group in config.layer_mixer(layer)]
    # Exact and windowed attention in rings; the others pass states if they can.
    forms = [*(["ring"] if names[0] in ("softmax", "sliding_window") else []), "states", "heads"]
    reasons = []
    for form in forms:
        try:
            _programs(config, layer, devices, devices * 128, form)
        except (ValueError, NotImplementedError) as error:
            reasons.append(str(error))
        else:
            return form
    raise ValueError(
        f"sequence must be 1, because plan cannot count the mixer of {names[0]!r} on a divided "
        f"sequence, got {devices}: {reasons[-1]}"
    )


class Exchange(NamedTuple):
    """Exchanges of one device, for one sequence of a layer.

    Attributes:
      forward: bytes that it sends in the forward pass.
      backward: bytes that it sends in the backward pass.
      held: most bytes that arrive together.
      slowdown: operations of the slowest device, relative to an equal share of the mixer on one
        device.
    """

    forward: float
    backward: float
    held: float
    slowdown: float


@functools.lru_cache(maxsize=256)
def exchange(
    config: TransformerConfig, layer: int, devices: int, length: int, form: str
) -> Exchange:
    """Counts what a form exchanges in the mixer of a layer.

    Args:
      config: the model, as one device computes it.
      layer: index of the layer.
      devices: P, devices that divide the sequence.
      length: T, tokens of the whole sequence, a multiple of P.
      form: a key of `FORMS`.
    """
    forward, both = _programs(config, layer, devices, length, form)
    once, twice = (_sent(closed.jaxpr, devices) for closed in (forward, both))
    slowdown = 1.0
    if form == "ring" and config.is_causal and _reaches_all(config, layer):
        slowdown = 2 - 1 / devices  # the last of the consecutive parts sees all keys
    elif form == "states":
        tokens = min(length // devices, _FEW)
        _, divided = _programs(config, layer, devices, devices * tokens, form)
        _, alone = counts.programs(config, layer, "mixer", tokens)
        slowdown = cost.operations(divided) / cost.operations(alone)
    return Exchange(once, twice - once, _held(both.jaxpr), slowdown)


def _reaches_all(config, layer):
    return all(group["name"] == "softmax" for group in config.layer_mixer(layer))


def _programs(config, layer, devices, length, form):
    """Jaxprs of the forward pass, and of the forward and backward pass, of a divided sequence."""

    def build():
        mixer = Block(config, layer, rngs=nnx.Rngs(0)).mixer
        if not hasattr(mixer, "attention"):
            raise ValueError(f"{type(mixer).__name__} has no function over heads")
        mixer.attention = FORMS[form](mixer.attention)
        return mixer

    split: tuple[Any, ...] = nnx.split(nnx.eval_shape(build), nnx.Param, ...)
    graph, parameters, others = split
    tokens, none = PartitionSpec(None, _AXIS), PartitionSpec()

    def forward(parameters, others, x):
        return nnx.merge(graph, parameters, others)(x)

    def both(parameters, others, x):
        y, pull_back = jax.vjp(lambda p, x: forward(p, others, x), parameters, x)
        return y, pull_back(y)

    mesh = AbstractMesh((devices,), (_AXIS,), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((1, length, config.features), config.dtype)

    def traced(function, out):
        run = jax.shard_map(function, mesh=mesh, in_specs=(none, none, tokens), out_specs=out)
        return jax.make_jaxpr(run)(parameters, others, x)

    return traced(forward, tokens), traced(both, (tokens, (none, tokens)))


def _sent(jaxpr, devices):
    """Bytes that the collectives of a jaxpr send; sums of gradients are not counted."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if (entries := _SENT.get(eqn.primitive.name)) is not None:
            total += entries(devices) * _size(eqn.invars)
        repeats = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inside = [_sent(inner, devices) for inner in cost.inner_jaxprs(eqn)]
        total += repeats * (max(inside, default=0) if eqn.primitive.name == "cond" else sum(inside))
    return total


def _held(jaxpr):
    """Most bytes that the collectives of one jaxpr, such as the body of a loop, receive."""
    own = sum(_size(eqn.outvars) for eqn in jaxpr.eqns if eqn.primitive.name in _SENT)
    inside = (_held(inner) for eqn in jaxpr.eqns for inner in cost.inner_jaxprs(eqn))
    return max([own, *inside])


def _size(variables):
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in variables)
