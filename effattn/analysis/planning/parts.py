"""Programs of one of the devices that divide a sequence, with the forms that models use."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from effattn.nn import TransformerConfig
from effattn.nn.block import Block
from effattn.parallel.mixers import forms_of, tokens_in_parts

AXIS = "sequence"
TOKENS, WHOLE = PartitionSpec(None, AXIS), PartitionSpec()


class InParts(nnx.Module):
    """A mixer whose tokens the devices of the mesh axis `sequence` hold in parts."""

    def __init__(self, mixer: Any, form: Callable[..., Any]):
        self.mixer, self.form = mixer, form

    def __call__(self, x: jax.Array, **padding: Any) -> jax.Array:
        """Maps this device's part of x `(B, T, D)`."""
        return self.form(self.mixer, AXIS)(x, **padding)


def of_device(
    function: Callable[..., Any], devices: int, in_specs: Any, out_specs: Any, *arguments: Any
) -> Any:
    """Jaxpr of what each device computes; the arguments are those of all devices, abstract."""
    mesh = AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
    run = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    (call,) = jax.make_jaxpr(run)(*arguments).jaxpr.eqns
    return jex_core.ClosedJaxpr(call.params["jaxpr"], ())


def forward(
    config: TransformerConfig, layer: int, devices: int, length: int, rows: int
) -> tuple[Callable[..., Any], Any]:
    """The first form that takes the mixer of a layer, and the jaxpr of one device's forward pass.

    Args:
      config: the model, as one device computes it.
      layer: index of the layer.
      devices: P, devices that divide the sequence.
      length: T, tokens of a whole sequence, a multiple of P.
      rows: sequences.

    Raises:
      ValueError: no form of `effattn.parallel` takes the mixer, so that models would give all
        tokens to each device.
    """
    form, found = _forward(config, layer, devices, length, rows)
    if form is None:
        name = config.layer_mixer(layer)[0]["name"]
        raise ValueError(
            f"sequence must be 1 for the mixer {name!r}, whose tokens each device would gather, "
            f"got {devices}: {found}"
        )
    return form, found


def each_of_several(mixer: Any, axis_name: str) -> Callable[..., Any]:
    """The form of a mixer that consists of mixers: each exchanges by its own form."""

    def run(x: jax.Array, **padding: Any) -> jax.Array:
        with tokens_in_parts():
            return mixer(x, **padding)

    return run


@functools.lru_cache(maxsize=1024)
def _forward(config, layer, devices, length, rows):
    """A form and its jaxpr, or None and the reason."""
    if config.value_residual:
        return None, "no form passes on the values of the first layer"
    mixer = nnx.eval_shape(lambda: Block(config, layer, rngs=nnx.Rngs(0)).mixer)
    x = jax.ShapeDtypeStruct((rows, length, config.features), config.dtype)
    reason = f"no form of effattn.parallel takes {type(mixer).__name__}"
    calls_each = getattr(mixer, "calls_each_alone", False)
    for form in [each_of_several] if calls_each else forms_of(mixer):

        def run(mixer: Any, x: Any, form: Any = form) -> Any:
            return form(mixer, AXIS)(x)

        try:
            return form, of_device(run, devices, (WHOLE, TOKENS), TOKENS, mixer, x)
        except ValueError as error:
            reason = str(error)
    return None, reason
