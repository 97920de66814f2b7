"""Mixers of a model on a mesh whose axis `sequence` divides the tokens."""

import contextlib
import math
from collections.abc import Callable, Iterator
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


def forms_of(mixer: Any) -> list[Callable[..., Any]]:
    """The functions of `effattn.parallel` that know a mixer, in the order of `_FORMS`."""
    mechanism = getattr(getattr(mixer, "binding", None), "mechanism", None)
    called = None if mechanism is None else getattr(mechanism.function, "__name__", None)
    known = {type(mixer).__name__, called}
    return [form for name, form in _FORMS.items() if known & sequence_parts.SUPPORTED[name]]


_in_parts: Any = jax.make_user_context(False)


@contextlib.contextmanager
def tokens_in_parts() -> Iterator[None]:
    """Context for code inside `jax.shard_map` over `sequence`, where x has a device's tokens only.

    `divided` then calls the first form that takes the call, or raises `ValueError`.
    """
    with _in_parts(True):
        yield


def divided(mixer: Any, x: jax.Array) -> Callable[..., jax.Array]:
    """Returns the mixer for x `(B, T, D)`, whose tokens devices may hold in parts.

    In a mesh that is set by `jax.set_mesh`, the devices of an automatic axis `sequence` exchange
    what the first form needs that takes the call, and each calls the mixer on its part of the
    tokens. Rows are divided by the axes `data`, `fsdp` and `expert`. If no form takes the call, for
    example because the devices cannot divide the tokens or the heads, this is the mixer itself, for
    which the compiler gathers all tokens. A mixer that consists of mixers is returned unchanged,
    because it calls `divided` for each of them.
    """
    if getattr(mixer, "calls_each_alone", False):
        return mixer
    if _in_parts.value:
        return _on_parts(mixer)
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    count = mesh.shape[_SEQUENCE] if types.get(_SEQUENCE) == AxisType.Auto else 1
    forms = forms_of(mixer)
    if count == 1 or not forms or x.shape[1] % count:
        return mixer
    # Kernels run inside where all axes are manual; a larger axis `tensor` divides the heads.
    inside = {name for name, size in mesh.shape.items() if name != "tensor" or size == 1}
    rows = tuple(name for name in _ROWS if types.get(name) == AxisType.Auto)
    rows = rows if x.shape[0] % math.prod(mesh.shape[name] for name in rows) == 0 else ()
    of_rows, of_tokens = PartitionSpec(rows), PartitionSpec(rows, _SEQUENCE)
    specs = {"segment_ids": of_tokens, "global_mask": of_tokens, "lengths": of_rows}

    def run(x: jax.Array, **padding: Any) -> jax.Array:
        given = {name: array for name, array in padding.items() if array is not None}
        of_given = {name: specs[name] for name in given}
        for form in forms:

            def on_device(mixer: Any, x: Any, given: Any, form: Any = form) -> jax.Array:
                return form(mixer, _SEQUENCE)(x, **given)

            call = jax.shard_map(
                on_device,
                in_specs=(PartitionSpec(), of_tokens, of_given),
                out_specs=of_tokens,
                axis_names=inside,
            )
            try:
                return call(mixer, x, given)
            except ValueError:  # this form does not take the call
                continue
        return mixer(x, **padding)

    return run


def _on_parts(mixer):
    """The mixer for a device's part of the tokens, by the first form that takes the call."""

    def run(x: jax.Array, **padding: Any) -> jax.Array:
        reasons = []
        for form in forms_of(mixer):
            try:
                return form(mixer, _SEQUENCE)(x, **padding)
            except ValueError as error:
                reasons.append(str(error))
        why = "; ".join(dict.fromkeys(reasons)) or "no form of sequence parallelism is known for it"
        raise ValueError(f"{type(mixer).__name__} cannot be called on parts of the tokens: {why}")

    return run
