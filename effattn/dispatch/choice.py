"""Choice of implementation: the first one named that accepts the call on the program's platform.

All implementations of a mechanism compute the same results. Some run anywhere, others on one
platform. The platform is known only when the program is lowered, so `on_platform` defers the final
choice to lowering.
"""

import math
import platform
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.dispatch import cache, contexts
from effattn.dispatch.partition import MeshAxes, can_partition

# Platform of each implementation; None is any platform.
PLATFORMS = {
    "xla": None,
    "cudnn": "cuda",
    "llvm": "cpu",
    "mosaic_gpu": "cuda",
    "triton": "cuda",
    "jax_triton": "cuda",
    "mosaic_tpu": "tpu",
}
# Implementations that run only if they are named: cuDNN, and "jax_triton", which has not run on a
# GPU yet. A core may add others.
ONLY_BY_NAME = frozenset({"cudnn", "jax_triton"})
# Fewest tokens for which kernels are faster; below, most of a kernel's tile is empty.
_FOR_GPU, _FOR_CPU = 128, 16
# Ranges of the compute capabilities of GPUs.
HOPPER, FROM_AMPERE = (9.0, 9.9), (8.0, math.inf)
PALLAS = "mosaic_gpu", "triton", "mosaic_tpu"  # fastest first
# Kernels of GPUs and TPUs, which walk over the listed tiles of a layout.
TILED = (*PALLAS, "jax_triton")


class Chosen(NamedTuple):
    """Implementations to run, in order of preference.

    Attributes:
      names: names of the implementations. Only the last one may run on any platform.
      interpreted: the value of `interpreted`: False, or how Pallas interprets kernels. Interpreted
        kernels run on any platform.
      tiles: tuned tiles of the first implementation.
      places: mesh axes that partition the batch and the heads, where types carry shardings.
    """

    names: tuple[str, ...]
    interpreted: Any = False
    tiles: cache.Tiles = ()
    places: MeshAxes | None = None

    def tile(self, implementation: str, kernel: str) -> tuple[int, ...] | None:
        """The tuned tile of a kernel; None if it was not tuned."""
        return dict(self.tiles).get(kernel) if implementation == self.names[0] else None


XLA = Chosen(("xla",))


class Limits(NamedTuple):
    """Limits of an implementation, for its refusals and for `effattn.support`.

    Attributes:
      dtypes: accepted dtypes of queries, keys and values.
      size: the largest head dimension, or number of features; None is any.
      others: further requirements, as text.
    """

    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")
    size: int | None = None
    others: str = ""

    def refusal(self, dtype: Any, *sizes: int) -> str | None:
        """The reason why a dtype or head dimensions are not accepted; None if they are."""
        if str(dtype) not in self.dtypes:
            *most, last = self.dtypes
            names = f"{', '.join(most)} and {last}" if most else last
            return f"takes {names}, got {dtype}"
        if self.size is not None and max(sizes) > self.size:
            return f"takes head sizes up to {self.size}, got {' and '.join(map(str, sizes))}"
        return None


def requested(value: Any) -> tuple[str, ...] | None:
    """Validates an argument `implementation`: names to try in order, or None for any."""
    if value is None:
        recorder = contexts.recorder()
        return None if recorder is None else recorder.names
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple | list) or not names:
        raise ValueError(f"implementation must be None, a name or a tuple of names, got {value!r}")
    known = ("pallas", *PLATFORMS)
    for name in names:
        if name == "naive":
            raise NotImplementedError(
                "this function has no naive form, got implementation='naive'; effattn.naive lists "
                "the mechanisms that have one"
            )
        if name not in known:
            raise ValueError(f"unknown implementation {name!r}; known are {(*known, 'naive')}")
    return tuple(names)


def take_xla(function: str, value: Any) -> None:
    """Checks the argument `implementation` of a function that has no kernels.

    Raises:
      NotImplementedError: the argument names no implementation that the function has.
    """
    if "xla" not in (requested(value) or ("xla",)):
        raise NotImplementedError(
            f"{function} has the implementations 'xla' and 'naive', got implementation={value!r}"
        )
    recorder = contexts.recorder()
    if recorder is not None:
        recorder.taken.append({"xla": Limits()})


def asks_for_kernels(value: Any, suited: tuple[str, ...]) -> bool:
    """True if an argument `implementation` asks for a kernel for GPUs or TPUs.

    None asks for a kernel if block-attention kernels are the default for the call on this machine;
    `suited` is as in `Call`.
    """
    names = requested(value)
    if names is None:
        return "cuda" in suited and _is_default(FROM_AMPERE)
    return any(name in ("pallas", *TILED) for name in names)


def suited(dtype: Any, tokens: Any) -> tuple[str, ...]:
    """Platforms whose kernels are faster than XLA for this dtype and number of tokens."""
    if not isinstance(tokens, int):  # an exported program may leave them open
        return ()
    if jnp.dtype(dtype).itemsize == 2 and tokens >= _FOR_GPU:
        return ("cuda",)
    if dtype == jnp.float32 and tokens >= _FOR_CPU:
        return ("cpu",)
    return ()


def open_length(*lengths: Any) -> str | None:
    """The reason why kernels reject lengths that an exported program leaves open, or None."""
    left_open = [str(length) for length in lengths if not isinstance(length, int)]
    if not left_open:
        return None
    return f"takes lengths that are known when it is traced, got {' and '.join(left_open)}"


class Call(NamedTuple):
    """Description of a call, from which an implementation is chosen.

    Attributes:
      mechanism: name of the mechanism, for messages.
      refusals: for each implementation, a function that returns the reason why the implementation
        rejects the call, or None.
      signature: function that returns the key of the call in the tuning cache; None if
        `effattn.tune` does not tune such calls.
      tilings: function from an implementation to the tiles that `effattn.tune` tries besides the
        default ones, by kernel.
      differentiable: whether the call has gradients.
      suited: platforms on which kernels were measured to be faster than XLA for such calls: GPUs in
        16 bits, with enough tokens for a tile unless the call decodes; CPUs in float32.
      limits: function from an implementation to its limits.
      is_partitioned: whether kernels run on several devices, each for its part of the call.
      capabilities: range of the compute capabilities of GPUs on which kernels are the default.
      only_by_name: implementations that run only if they are named.
    """

    mechanism: str
    refusals: Mapping[str, Callable[[], str | None]]
    signature: Callable[[], str] | None = None
    tilings: Callable[[str], Mapping[str, tuple[tuple[int, ...], ...]]] = lambda _: {}
    differentiable: bool = True
    suited: tuple[str, ...] = ()
    limits: Callable[[str], Limits] = lambda _: Limits()
    is_partitioned: bool = True
    capabilities: tuple[float, float] = HOPPER
    only_by_name: frozenset[str] = ONLY_BY_NAME

    def with_implementation(
        self, name: str, refusal: Callable[[], str | None], limits: Limits
    ) -> "Call":
        """The call with one more implementation, which runs only if the caller names it."""
        return self._replace(
            refusals={**self.refusals, name: refusal},
            limits=lambda each: limits if each == name else self.limits(each),
        )

    def accepted(self) -> list[str]:
        """Implementations that accept the call, on any platform."""
        return [name for name, refusal in self.refusals.items() if refusal() is None]

    def candidates(self) -> dict[str, Mapping[str, tuple[tuple[int, ...], ...]]]:
        """Implementations that `effattn.tune` may try, with their tilings."""
        return {
            name: self.tilings(name) for name in self.accepted() if name not in self.only_by_name
        }


def choose(value: Any, call: Call, places: MeshAxes | None = None) -> Chosen:
    """Chooses the named implementations that exist and accept the call, in order.

    Args:
      value: the argument `implementation`. None means the fastest one that `effattn.tune` found for
        such calls on this device, or the result of `untuned`. "pallas" means all of `PALLAS`
        but those that run only by name. If a call with None takes no kernel on a GPU where it
        should, a warning gives the reason, once.
      call: description of the call.
      places: mesh axes that partition the batch and the heads, where types carry shardings.

    Raises:
      NotImplementedError: no named implementation accepts the call; the message gives each reason.
    """
    mechanism, refusals = call.mechanism, call.refusals
    names = requested(value)
    recorder = contexts.recorder()
    if recorder is not None:
        recorder.taken.append({name: call.limits(name) for name in call.accepted()})
        return XLA
    tiles: cache.Tiles = ()
    is_untuned = False
    if names is None:
        best = cache.look_up(call)
        is_untuned = best is None
        if best is None:
            names = untuned(call, places)
        elif _refused_devices(call, places) is None:
            names, tiles = (best.implementation, "xla"), best.tiles
        else:
            names = ("xla",)
    chosen: list[str] = []
    reasons = []
    for name in names:
        meant: tuple[str, ...] = (name,)
        if name == "pallas":
            meant = tuple(one for one in PALLAS if one not in call.only_by_name)
        if not refusals.keys() & {*meant}:
            reasons.append(f"{mechanism} has no {name!r} implementation")
        for one in meant:
            if one not in refusals:
                continue
            reason = refusals[one]()
            if reason is None:
                chosen.append(one)
                if PLATFORMS[one] is None:
                    if is_untuned and chosen == ["xla"]:
                        _warn_of_xla(call, places, reasons)
                    return _chosen(chosen, names, tiles, places)
            else:
                reasons.append(f"the {one!r} implementation of {mechanism} {reason}")
    if not chosen:
        raise NotImplementedError(
            "; ".join(reasons) + "; implementation='xla' takes these arguments"
        )
    return _chosen(chosen, names, tiles, places)


def untuned(call: Call, places: MeshAxes | None = None) -> tuple[str, ...]:
    """Default implementations of a call with `implementation=None` that was never tuned.

    On x86-64 CPUs and Hopper GPUs kernels were measured to be faster, and block attention has them
    from Ampere on. They are the default there, and on several of these devices if each of them can
    run the kernel for its part.
    """
    kernels: tuple[str, ...] = ()
    if _refused_devices(call, places) is not None:
        return ("xla",)
    if "cuda" in call.suited and _is_default(call.capabilities):
        kernels = tuple(
            name for name in PALLAS if PLATFORMS[name] == "cuda" and name not in call.only_by_name
        )
    elif "cpu" in call.suited and jax.default_backend() == "cpu":
        kernels = ("llvm",) if platform.machine() in ("x86_64", "AMD64") else ()
    return (*(name for name in kernels if name in call.refusals), "xla")


def _warn_of_xla(call, places, refusals):
    """Warns, once for each reason, that a call takes XLA on a GPU whose kernels are faster."""
    if jax.default_backend() != "gpu" or "cuda" not in call.suited:
        return
    reason = _refused_devices(call, places) or "; ".join(refusals)
    if not _is_default(call.capabilities):
        known = " to ".join(str(n) for n in call.capabilities if n < math.inf)
        reason = (
            f"kernels are the default from compute capability {known}, got {_capability()}; "
            "effattn.tune measures which is faster"
        )
    if reason:
        cache.warn_once(
            f"{call.mechanism} runs in XLA on this GPU, where a kernel may be several times "
            f"faster: {reason}. implementation='xla' chooses XLA without this warning"
        )


def _is_default(capabilities):
    """True if kernels are the default on this machine's GPU, if it has one."""
    if jax.default_backend() != "gpu":
        return False
    found = _capability()
    return found is not None and capabilities[0] <= found <= capabilities[1]


def _capability():
    """The compute capability of the GPU, as a number such as 9.0; None without a GPU."""
    from effattn.dispatch import device  # imported on first use: most programs run no kernels

    gpu = device.gpu()
    return None if gpu is None else float(gpu.compute_capability)


def _refused_devices(call, places):
    """The reason why the default takes no kernels in a program for these devices, or None."""
    if _for_one_device():
        return None
    if not call.is_partitioned:
        return f"its kernels are not partitioned over the {jax.device_count()} devices here"
    if not can_partition(places):
        return (
            "kernels are not partitioned inside a jax.shard_map over some of the mesh axes, or "
            "inside a mechanism that places explicit mesh axes itself"
        )
    return None


def _for_one_device():
    """True if there is one device only, or the trace is inside a `shard_map` over all mesh axes."""
    axes = jax.sharding.get_abstract_mesh().axis_types
    return jax.device_count() == 1 or {jax.sharding.AxisType.Manual} == {*axes}


def _chosen(chosen, names, tiles, places):
    tiles = tiles if chosen[0] == names[0] else ()
    return Chosen(tuple(chosen), contexts.how_interpreted(), tiles, places)


def on_platform(
    chosen: Chosen, mechanism: str, forms: Mapping[str, Callable[..., Any]], *operands: Any
) -> Any:
    """Runs the first chosen implementation for the platform that the program is lowered for.

    Args:
      chosen: the result of `choose`.
      mechanism: name of the mechanism, for the message.
      forms: function of the operands for each implementation.
      operands: pytrees of arrays.

    Raises:
      NotImplementedError: when the program is lowered for a platform without an implementation.
    """
    names, interpreted, *_ = chosen
    first = forms[names[0]]
    if PLATFORMS[names[0]] is None or interpreted:
        return first(*operands)
    branches: dict[str, Callable[..., Any]] = {}
    for name in names:
        branches.setdefault(PLATFORMS[name] or "default", forms[name])
    if "default" not in branches:
        kernels = " and ".join(f"{name!r} on {PLATFORMS[name]}" for name in names)
        message = f"{mechanism} runs by {kernels} alone; implementation='xla' runs anywhere"
        from effattn.dispatch.refused import refusing  # imported on first use

        branches["default"] = refusing(message, jax.eval_shape(first, *operands))
    return lax.platform_dependent(*operands, **branches)
