"""Work and exchanges of devices that divide a sequence, counted in jaxprs of a layer's mixer."""

import collections
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.extend import core as jex_core

from effattn.analysis import cost
from effattn.analysis.planning import counts, parts
from effattn.analysis.planning.counts import Pass
from effattn.nn import TransformerConfig

# The part of an array that one of P devices sends in a collective.
SHARES: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda devices: 2 * (devices - 1) / devices,
    "all-gather": lambda devices: (devices - 1) / devices,
    "reduce-scatter": lambda devices: (devices - 1) / devices,
    "all-to-all": lambda devices: (devices - 1) / devices,
    "send": lambda devices: 1.0,
}
_OPERATIONS: Mapping[str, str] = {
    "ppermute": "send",
    "all_to_all": "all-to-all",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
}


class Moved(NamedTuple):
    """Collectives of one kind.

    Attributes:
      number: number of collectives.
      size: bytes of an operand or a result on one device, whichever is larger, in all of them.
    """

    number: float = 0.0
    size: float = 0.0

    def plus(self, other: "Moved", times: float = 1.0) -> "Moved":
        """The collectives of both, the other ones several times."""
        return Moved(self.number + times * other.number, self.size + times * other.size)


class Exchange(NamedTuple):
    """Work and exchanges of one device, for the sequences of a microbatch in a layer.

    Attributes:
      form: name of the function of `effattn.parallel`.
      forward: collectives of the forward pass by operation.
      backward: collectives of the backward pass, without sums of the gradients of parameters.
      operations: operations of the mixer; None for an equal share of those of one device.
    """

    form: str
    forward: Mapping[str, Moved]
    backward: Mapping[str, Moved]
    operations: Pass | None


@functools.lru_cache(maxsize=1024)
def exchange(
    config: TransformerConfig, layer: int, devices: int, length: int, rows: int
) -> Exchange:
    """Counts what devices compute and exchange in the mixer of a layer.

    Arguments and errors are those of `parts.forward`.
    """
    form, forward = parts.forward(config, layer, devices, length, rows)
    both = _both(config, layer, devices, length, rows, form)
    once, twice = (_moved(closed.jaxpr) for closed in (forward, both))
    backward = {name: moved.plus(once.get(name, Moved()), -1) for name, moved in twice.items()}
    # Gradients of what is computed from parameters alone, such as a filter, are summed in place of
    # those of the parameters. The latter are counted with all parameters.
    of_parameters = Moved(*counts.parameters_of_mixer(config, layer))
    sums = backward.pop("all-reduce", Moved()).plus(of_parameters, -1)
    if sums.size > 0:
        backward["all-reduce"] = Moved(max(1.0, sums.number), sums.size)
    operations = None
    if form.__name__ != "exchange_heads":  # which divides all the work equally
        one, two = (cost.operations(closed) for closed in (forward, both))
        operations = Pass(one, two - one)
    kept = {name: moved for name, moved in backward.items() if moved.number}
    return Exchange(form.__name__, once, kept, operations)


def _both(config, layer, devices, length, rows, form):
    """Jaxpr of one device's forward and backward pass."""
    graph, parameters, others = counts.split(config, layer, "mixer")
    x = jax.ShapeDtypeStruct((rows, length, config.features), config.dtype)

    def run(parameters, others, x):
        def forward(parameters, x):
            return form(nnx.merge(graph, parameters, others), parts.AXIS)(x)

        y, pull_back = jax.vjp(forward, parameters, x)
        return y, pull_back(y)

    given = parts.WHOLE, parts.WHOLE, parts.TOKENS
    found = parts.TOKENS, (parts.WHOLE, parts.TOKENS)
    return parts.of_device(run, devices, given, found, parameters, others, x)


def _moved(jaxpr) -> dict[str, Moved]:
    """The collectives of a jaxpr; of branches, those of the one that moves most."""
    found: dict[str, Moved] = collections.defaultdict(Moved)

    def add(inner, times=1):
        for name, moved in inner.items():
            found[name] = found[name].plus(moved, times)

    sums: set[Any] = set()
    for eqn in jaxpr.eqns:
        primitive = eqn.primitive.name
        if (name := _OPERATIONS.get(primitive)) is not None:
            add({name: Moved(1, max(_size(eqn.invars), _size(eqn.outvars)))})
        if name == "all-reduce":
            sums.update(eqn.outvars)
        elif primitive == "add_any" and sums.issuperset(_variables(eqn)):
            # Compilers add before they reduce.
            sums.update(eqn.outvars)
            add({"all-reduce": Moved(-1, -_size(eqn.outvars))})
        inside = [_moved(inner) for inner in cost.inner_jaxprs(eqn)]
        if primitive == "cond":
            inside = [max(inside, key=lambda each: sum(moved.size for moved in each.values()))]
        for each in inside:
            add(each, eqn.params["length"] if primitive == "scan" else 1)
    return dict(found)


def _variables(eqn):
    return [None if isinstance(v, jex_core.Literal) else v for v in eqn.invars]


def _size(variables):
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in variables)
