"""Mixers of a model on a mesh whose axis `sequence` divides the tokens."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from effattn.cores import sequence_parts
from effattn.parallel.channels import exchange_channels
from effattn.parallel.heads import exchange_heads
from effattn.parallel.keys import share_keys
from effattn.parallel.states import pass_states

_SEQUENCE, _ROWS = "sequence", ("data", "fsdp", "expert")

# The form that moves least comes first.
_FORMS: dict[str, Callable[..., Any]] = {
    "pass_states": pass_states,
    "share_keys": share_keys,
    "exchange_channels": exchange_channels,
    "exchange_heads": exchange_heads,
}


def form_of(mixer: Any) -> Callable[..., Any] | None:
    """The first function of `_FORMS` that takes a mixer; None without one."""
    mechanism = getattr(getattr(mixer, "binding", None), "mechanism", None)
    called = None if mechanism is None else getattr(mechanism.function, "__name__", None)
    for name, form in _FORMS.items():
        if {type(mixer).__name__, called} & sequence_parts.TAKEN[name]:
            return form
    return None


def divided(mixer: Any, x: jax.Array) -> Callable[..., jax.Array]:
    """Returns the mixer for x `(B, T, D)`, whose tokens devices may hold in parts.

    In a mesh that is set by `jax.set_mesh`, the devices of an automatic axis `sequence` exchange
    what `form_of` says, and each calls the mixer on its part of the tokens. Rows are divided by the
    axes `data`, `fsdp` and `expert`. Otherwise, and if the devices cannot divide the tokens, this
    is the mixer itself, for which the compiler gathers all tokens.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    count = mesh.shape[_SEQUENCE] if types.get(_SEQUENCE) == AxisType.Auto else 1
    form = form_of(mixer)
    if count == 1 or form is None or x.shape[1] % count or not _divides_heads(mixer, form, count):
        return mixer
    # Kernels run inside where all axes are manual; a larger axis `tensor` divides the heads.
    inside = {name for name, size in mesh.shape.items() if name != "tensor" or size == 1}
    rows = tuple(name for name in _ROWS if types.get(name) == AxisType.Auto)
    size = 1
    for name in rows:
        size *= mesh.shape[name]
    rows = rows if x.shape[0] % size == 0 else ()
    specs = {
        "x": PartitionSpec(rows, _SEQUENCE),
        "segment_ids": PartitionSpec(rows, _SEQUENCE),
        "lengths": PartitionSpec(rows),
    }

    def run(x: jax.Array, **padding: Any) -> jax.Array:
        given = {name: array for name, array in padding.items() if array is not None}

        def on_device(mixer: Any, x: jax.Array, given: dict[str, jax.Array]) -> jax.Array:
            return form(mixer, _SEQUENCE)(x, **given)

        return jax.shard_map(
            on_device,
            in_specs=(PartitionSpec(), specs["x"], {name: specs[name] for name in given}),
            out_specs=specs["x"],
            axis_names=inside,
        )(mixer, x, given)

    return run


def _divides_heads(mixer: Any, form: Callable[..., Any], count: int) -> bool:
    if form is not exchange_heads:
        return True
    heads, key_heads = mixer.num_heads, mixer.num_kv_heads
    return heads % count == 0 and (key_heads % count == 0 or count % key_heads == 0)
