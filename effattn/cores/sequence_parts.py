"""Sequences that the devices of a mesh axis hold in parts: device n has the n-th part.

`along` sets the mesh axis while a function of `effattn.parallel` runs. Mechanisms and modules then
call this module for the tokens before their own part, and for the positions in the whole sequence.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from effattn.arrays.segments import positions_from_segment_ids

Function = TypeVar("Function", bound=Callable[..., Any])

# The functions that each form takes, and modules that are known by their own name.
SUPPORTED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "pass_states": frozenset(
            {
                "linear_attention",
                "retention",
                "gated_linear_attention",
                "state_space_duality",
                "trapezoidal_scan",
                "delta_product_attention",
                "delta_rule_attention",
                "gated_delta_rule_2_attention",
                "mesa_attention",
                "mlstm_attention",
                "gated_slot_attention",
                "luna_attention",
                "rwkv6_attention",
                "rwkv7_attention",
                "selective_scan",
                "s4_convolution",
                "h3_mixing",
                "s5_scan",
                "rg_lru",
                "rwkv4_mixing",
                "attention_free",
                "Bidirectional",
                "CompressiveAttention",
                "DilatedConvolution",
                "GRU",
                "LSTM",
                "Mega",
                "SLSTM",
                "RWKV4ChannelMix",
                "RWKV6ChannelMix",
                "RWKV7ChannelMix",
                "RecurrentMemoryAttention",
                "ShortConvolution",
                "TransformerXLAttention",
            }
        ),
        "exchange_channels": frozenset(
            {
                "attention_free",
                "fourier_mixing",
                "hyena_convolution",
                "long_convolution",
                "spatial_gating",
                "S4",
            }
        ),
        "exchange_heads": frozenset(
            {
                "AdaptiveSpanSelfAttention",
                "AdditiveSelfAttention",
                "BasedSelfAttention",
                "BlockLinformerSelfAttention",
                "ConvolutionAttention",
                "DeltaNet",
                "ForgettingAttention",
                "DifferentialSelfAttention",
                "GatedDeltaNet",
                "GatedDeltaNet2",
                "GatedDeltaProduct",
                "GatedLinearAttention",
                "GatedSlotAttention",
                "GatedSelfAttention",
                "HedgehogSelfAttention",
                "InfiniSelfAttention",
                "KimiDeltaAttention",
                "LSHSelfAttention",
                "LatentAttention",
                "LearnedBlockSelfAttention",
                "LinformerSelfAttention",
                "LogLinearAttention",
                "LongShortSelfAttention",
                "NativeSparseSelfAttention",
                "LongformerSelfAttention",
                "LunaSelfAttention",
                "MLSTM",
                "MesaNet",
                "MixtureOfMechanisms",
                "PathAttention",
                "PerformerSelfAttention",
                "RandomFeatureSelfAttention",
                "RoutingSelfAttention",
                "SelectiveSelfAttention",
                "SelfAttention",
                "SinkhornSelfAttention",
                "StreamingSelfAttention",
                "Synthesizer",
                "TTTLinear",
                "TitansMemory",
            }
        ),
        "share_keys": frozenset(
            {
                "block_linformer_attention",
                "hierarchical_attention",
                "indexed_attention",
                "InducedSelfAttention",
                "linformer_attention",
                "nystrom_attention",
                "talking_heads_attention",
            }
        ),
    }
)
_INSTEAD = {
    "pass_states": "exchange_heads takes any function over heads, exchange_channels convolutions",
    "exchange_channels": "pass_states takes recurrences, exchange_heads functions over heads",
    "exchange_heads": "pass the function of its mechanism, or use one device",
    "share_keys": "exchange_heads takes any function over heads",
}


@dataclasses.dataclass(eq=False)
class Parts:
    """A sequence in parts along a mesh axis.

    Attributes:
      form: the function of `effattn.parallel` that runs, a key of `SUPPORTED`.
      axis_name: the mesh axis.
      calls: number of mechanisms that exchanged something.
    """

    form: str
    axis_name: str
    calls: int = 0

    @property
    def devices(self) -> int:
        """Number of parts, P."""
        return lax.axis_size(self.axis_name)

    @property
    def index(self) -> jax.Array:
        """Index of this device's part."""
        return lax.axis_index(self.axis_name)

    def sum(self, x: Any) -> Any:
        """The sum of the arrays of all parts; None stays None."""
        return lax.psum(x, self.axis_name)

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """The arrays of all parts, side by side."""
        return lax.all_gather(x, self.axis_name, axis=axis, tiled=True)

    def own(self, x: jax.Array, size: int, axis: int) -> jax.Array:
        """This part's `size` entries of an array for the whole sequence."""
        return lax.dynamic_slice_in_dim(x, self.index * size, size, axis)


_current: Any = jax.make_user_context(None)


def current() -> Parts | None:
    """The sequence in parts whose function runs; None outside of `along`."""
    return _current.value


@contextlib.contextmanager
def along(form: str, axis_name: str) -> Iterator[Parts]:
    """Context in which mechanisms of a form exchange along a mesh axis, and others are refused."""
    parts = Parts(form, axis_name)
    with _current(parts):
        yield parts


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Context in which mechanisms run as on one device, as it has all tokens that they need."""
    with _current(None):
        yield


def check_whole_rows(units: str) -> None:
    """Raises `ValueError` within `along`, as `units` count from the start of each document."""
    if current() is not None:
        raise ValueError(
            f"segment_ids need whole rows, because {units} count from the start of each document, "
            "got a part of a row on each device; leave segment_ids out, or call exchange_heads, "
            "which gives each device whole rows"
        )


def refuse(name: str) -> None:
    """Raises `ValueError` within `along`: its form does not take `name`."""
    parts = current()
    if parts is None:
        return
    raise ValueError(
        f"{parts.form} takes {', '.join(sorted(SUPPORTED[parts.form]))} and their modules, got "
        f"{name}; {_INSTEAD[parts.form]}"
    )


def check_mixer(mixer: Any) -> None:
    """Raises `ValueError` if the form that runs does not know the mixer.

    A mixer may mix its tokens beside the function that it calls.
    """
    parts, name = current(), type(mixer).__name__
    if parts is None:
        return
    mechanism = getattr(getattr(mixer, "binding", None), "mechanism", None)
    called = None if mechanism is None else getattr(mechanism.function, "__name__", None)
    if not {name, called} & SUPPORTED[parts.form]:
        refuse(name)


def parts_for(name: str, form: str) -> Parts | None:
    """The sequence in parts, for a call that supports the form; None outside of `along`.

    It counts the call, so that `along` can tell a function that ignored the parts.

    Raises:
      ValueError: another form runs.
    """
    parts = current()
    if parts is not None:
        if parts.form != form or name not in SUPPORTED[form]:
            refuse(name)
        parts.calls += 1
    return parts


def with_tokens_before(x: jax.Array, count: int) -> jax.Array:
    """x `(B, T, ...)` after the `count` tokens before it: `(B, count + T, ...)`.

    These are the last tokens of the device before this one; zeros on the first device and outside
    of `along`.

    Raises:
      ValueError: a device has fewer than `count` tokens.
    """
    parts, tokens = current(), x.shape[1]
    if parts is None or not count:
        return jnp.pad(x, ((0, 0), (count, 0), *[(0, 0)] * (x.ndim - 2)))
    if tokens < count:
        raise ValueError(
            f"each device must have at least the {count} tokens that a token reads before it, got "
            f"{tokens}; choose fewer devices for the mesh axis {parts.axis_name!r}"
        )
    parts.calls += 1
    pairs = [(n, n + 1) for n in range(parts.devices - 1)]
    before = lax.ppermute(x[:, tokens - count :], parts.axis_name, pairs)
    return jnp.concatenate([before, x], 1)


def with_neighbours(x: jax.Array, count: int, axis: int) -> jax.Array:
    """x with the `count` tokens before and after it; zeros past the ends of the sequence."""
    parts, tokens = current(), x.shape[axis]
    if parts is None:
        return jnp.pad(x, [(count, count) if n == axis else (0, 0) for n in range(x.ndim)])
    if tokens < count:
        raise ValueError(
            f"each device must have at least the {count} tokens that a token reads on each side, "
            f"got {tokens}; choose fewer devices for the mesh axis {parts.axis_name!r}"
        )
    forwards = [(n, n + 1) for n in range(parts.devices - 1)]
    last = lax.slice_in_dim(x, tokens - count, tokens, axis=axis)
    first = lax.slice_in_dim(x, 0, count, axis=axis)
    before = lax.ppermute(last, parts.axis_name, forwards)
    after = lax.ppermute(first, parts.axis_name, [(m, n) for n, m in forwards])
    return jnp.concatenate([before, x, after], axis)


def check_blocks(what: str, size: int, tokens: int) -> None:
    """Raises `ValueError` if a device has a part of a block of `size` tokens."""
    parts = current()
    if parts is not None and tokens % size:
        raise ValueError(
            f"the {tokens} tokens of each device must be whole {what} of {size} tokens; choose "
            f"another size, or other devices for the mesh axis {parts.axis_name!r}"
        )


def all_tokens(count: int) -> int:
    """Number of tokens of the whole sequence, from that of this device."""
    parts = current()
    return count if parts is None else count * parts.devices


def positions(count: int, segment_ids: jax.Array | None = None) -> jax.Array:
    """Positions of this device's tokens in the whole sequence `(T,)`, or in documents `(B, T)`."""
    parts = current()
    if segment_ids is None:
        place = jnp.arange(count)
        return place if parts is None else place + parts.index * count
    if parts is None:
        return positions_from_segment_ids(segment_ids)
    place = jnp.arange(count, dtype=jnp.int32) + parts.index.astype(jnp.int32) * count
    before = with_tokens_before(segment_ids, 1)[:, :-1]
    starts = jnp.where(segment_ids != before, place, 0)
    starts = lax.cummax(starts, axis=1)
    every = lax.all_gather(starts[:, -1], parts.axis_name)  # (P, B)
    is_earlier = jnp.arange(len(every))[:, None] < parts.index
    earlier = jnp.where(is_earlier, every, 0).max(0)
    return place - jnp.maximum(starts, earlier[:, None])


def over_channels(
    tokens: tuple[str, ...], channels: Mapping[str, int] | None = None, name: str | None = None
) -> Callable[[Function], Function]:
    """Decorator for functions whose channels are independent: a token mixer of each channel.

    Where `exchange_channels` runs, an all-to-all gives the function all tokens of D / P
    channels, and a second one gives back this device's tokens of all channels.

    Args:
      tokens: names of arrays `(*B, T, D)`.
      channels: names of arrays with an axis of channels, or of groups of channels, and that axis.
      name: name in `SUPPORTED`; default, that of the function.
    """
    form = "exchange_channels"

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        known = name or function.__name__

        @functools.wraps(function)
        def run(*args, **kwargs):
            parts = current()
            if parts is None or parts.form != form and known in SUPPORTED[parts.form]:
                return function(*args, **kwargs)
            parts_for(known, form)
            given = signature.bind(*args, **kwargs)
            arguments = given.arguments
            for name in tokens:
                arguments[name] = _all_tokens(name, arguments[name], parts)
            for name, axis in (channels or {}).items():
                x = arguments.get(name)
                if x is not None and not isinstance(x, tuple | list):
                    arguments[name] = _own_channels(name, jnp.asarray(x), axis, parts)
            if arguments.get("lengths") is not None:
                # The lengths of all parts add up to those of the sequence.
                arguments["lengths"] = parts.sum(arguments["lengths"])
            for name in ("segment_ids", "initial_state"):
                if arguments.get(name) is not None:
                    raise ValueError(f"exchange_channels has no {name}; leave it out")
            with alone():
                y = function(*given.args, **given.kwargs)
            if not isinstance(y, jax.Array):
                raise ValueError(
                    "exchange_channels returns the output alone; leave return_state out"
                )
            return lax.all_to_all(y, parts.axis_name, y.ndim - 2, y.ndim - 1, tiled=True)

        return cast(Function, run)

    return decorate


def _all_tokens(name, x, parts):
    x = jnp.asarray(x)
    if x.shape[-1] % parts.devices:
        raise ValueError(
            f"the {parts.devices} devices of the mesh axis {parts.axis_name!r} must divide the "
            f"{x.shape[-1]} channels of {name}; choose a smaller mesh axis or more channels"
        )
    return lax.all_to_all(x, parts.axis_name, x.ndim - 1, x.ndim - 2, tiled=True)


def _own_channels(name, x, axis, parts):
    axis, devices = axis % x.ndim, parts.devices
    count = x.shape[axis]
    if count % devices and devices % count:
        raise ValueError(
            f"{name} must have a number of channels that divides the {devices} devices of the mesh "
            f"axis {parts.axis_name!r}, or is a multiple of them, got {count}"
        )
    if count < devices:
        x, count = jnp.repeat(x, devices // count, axis), devices
    return parts.own(x, count // devices, axis)
