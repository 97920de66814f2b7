"""Which implementation runs: the first named that takes the arguments where the program runs.

Implementations are forms of the same computation. Some run anywhere and some on one platform, which
is known only when the program is lowered; `on_platform` leaves the choice until then.
"""

import contextlib
import contextvars
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from effattn.dispatch import cache

# The platform of each; None is any, or what the library that it is handed to says.
PLATFORMS = {
    "xla": None,
    "cudnn": None,
    "llvm": "cpu",
    "mosaic_gpu": "cuda",
    "triton": "cuda",
    "mosaic_tpu": "tpu",
}
# Tokens from which on kernels are faster: of fewer, too much of their tiles is empty.
_FOR_GPU, _FOR_CPU = 128, 16
PALLAS = "mosaic_gpu", "triton", "mosaic_tpu"  # the first that takes the arguments is the fastest

_interpreted: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "effattn_interpreted", default=False
)


@contextlib.contextmanager
def interpreted(how: Any = True) -> Iterator[None]:
    """Kernels that are traced within run in Pallas's interpreter, on any device, and slowly.

    `how` is what `pallas_call` takes as `interpret`: True, for TPUs also `pltpu.InterpretParams`,
    and for Mosaic GPU, from jax 0.12 on, `plgpu.InterpretGPUParams`. The latter has a thread for
    each warpgroup, which wait for each other: on a CPU of few cores it waits for ever, unless XLA
    gets more threads, as by `jax.config.update("jax_num_cpu_devices", 8)` at the start.
    """
    token = _interpreted.set(how)
    try:
        yield
    finally:
        _interpreted.reset(token)


def is_interpreted() -> bool:
    """Whether kernels that are traced here will be interpreted."""
    return bool(_interpreted.get())


class _Recorder(NamedTuple):
    """What `recorded` gives calls, and what it lists.

    Attributes:
      names: for the calls that name no implementation.
      taken: for each call, the implementations that take it, with their limits.
    """

    names: tuple[str, ...]
    taken: list[Mapping[str, "Limits"]]


_recorder: contextvars.ContextVar[_Recorder | None] = contextvars.ContextVar(
    "effattn_recorder", default=None
)


@contextlib.contextmanager
def recorded(*names: str) -> Iterator[list[Mapping[str, "Limits"]]]:
    """Lists which implementations take each call that is traced within, with their limits.

    Calls that name no implementation name these. All of the calls run by XLA.
    """
    recorder = _Recorder(names, [])
    token = _recorder.set(recorder)
    try:
        yield recorder.taken
    finally:
        _recorder.reset(token)


class Chosen(NamedTuple):
    """Implementations to run.

    Attributes:
      names: in order; none comes after one that runs anywhere.
      interpreted: how kernels are interpreted, if they are; they run anywhere then.
      tiles: of the first, as `effattn.tune` found them.
    """

    names: tuple[str, ...]
    interpreted: Any = False
    tiles: cache.Tiles = ()

    def tile(self, implementation: str, kernel: str) -> tuple[int, ...] | None:
        """What was tuned of a kernel, if it was."""
        return dict(self.tiles).get(kernel) if implementation == self.names[0] else None


XLA = Chosen(("xla",))


class Limits(NamedTuple):
    """What an implementation takes, for its refusals and for `effattn.support`.

    Attributes:
      dtypes: of queries, keys and values.
      size: the largest head size, or number of features; None is any.
      others: what else it asks for.
    """

    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")
    size: int | None = None
    others: str = ""

    def refusal(self, dtype: Any, *sizes: int) -> str | None:
        """Why it does not take a dtype and head sizes, if so."""
        if str(dtype) not in self.dtypes:
            *most, last = self.dtypes
            names = f"{', '.join(most)} and {last}" if most else last
            return f"takes {names}, got {dtype}"
        if self.size is not None and max(sizes) > self.size:
            return f"takes head sizes up to {self.size}, got {' and '.join(map(str, sizes))}"
        return None


def requested(value: Any) -> tuple[str, ...] | None:
    """The names to try in order, of an argument `implementation`; None means any."""
    if value is None:
        recorder = _recorder.get()
        return None if recorder is None else recorder.names
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple | list) or not names:
        raise ValueError(f"implementation must be None, a name or a tuple of names, got {value!r}")
    known = ("pallas", *PLATFORMS)
    for name in names:
        if name not in known:
            raise ValueError(f"unknown implementation {name!r}; known are {known}")
    return tuple(names)


def asks_for_gpu_kernels(value: Any, suited: tuple[str, ...]) -> bool:
    """Whether an argument `implementation` names a kernel of Pallas, or nothing where one is taken.

    `suited` is what the call says of itself: see `Call`.
    """
    names = requested(value)
    if names is None:
        return "cuda" in suited and _gpu_kernels_are_faster()
    return any(name in ("pallas", *PALLAS) for name in names)


def suited(dtype: Any, tokens: Any) -> tuple[str, ...]:
    """The platforms whose kernels are faster for arrays of so many tokens: see `Call`."""
    if not isinstance(tokens, int):  # an exported program may leave them open
        return ()
    if jnp.dtype(dtype).itemsize == 2 and tokens >= _FOR_GPU:
        return ("cuda",)
    if dtype == jnp.float32 and tokens >= _FOR_CPU:
        return ("cpu",)
    return ()


def open_length(*lengths: Any) -> str | None:
    """Why a kernel does not take a call whose length an exported program leaves open, if so."""
    left_open = [str(length) for length in lengths if not isinstance(length, int)]
    if not left_open:
        return None
    return f"takes lengths that are known when it is traced, got {' and '.join(left_open)}"


class Call(NamedTuple):
    """A call that implementations are chosen for.

    Attributes:
      mechanism: for messages.
      refusals: of each implementation that there is, what says why it does not take the arguments,
        None if it does.
      signature: gives what `effattn.tune` tells calls apart by; None if it does not tune them.
      tilings: of an implementation, the tiles that it could have beside its own choice, by kernel.
      differentiable: it has gradients.
      suited: the platforms on which such calls were measured to be faster by kernels: GPUs, in 16
        bits and, unless it decodes, of tokens for a tile; CPUs, in float32.
      limits: of an implementation, by name.
    """

    mechanism: str
    refusals: Mapping[str, Callable[[], str | None]]
    signature: Callable[[], str] | None = None
    tilings: Callable[[str], Mapping[str, tuple[tuple[int, ...], ...]]] = lambda _: {}
    differentiable: bool = True
    suited: tuple[str, ...] = ()
    limits: Callable[[str], Limits] = lambda _: Limits()

    def candidates(self) -> dict[str, Mapping[str, tuple[tuple[int, ...], ...]]]:
        """The implementations that take it, on whatever platform, with their tilings."""
        takes = [name for name, refusal in self.refusals.items() if refusal() is None]
        return {name: self.tilings(name) for name in takes}


def choose(value: Any, call: Call) -> Chosen:
    """The implementations named that there are and that take the arguments, in order.

    Args:
      value: the argument `implementation`; None means what `effattn.tune` found the fastest here,
        or what `untuned` says; "pallas" means all of `PALLAS`.
      call: what it is for.

    Raises:
      NotImplementedError: there is none, with the reason of each.
    """
    mechanism, refusals = call.mechanism, call.refusals
    names = requested(value)
    recorder = _recorder.get()
    if recorder is not None:
        takes = [name for name, refusal in refusals.items() if refusal() is None]
        recorder.taken.append({name: call.limits(name) for name in takes})
        return XLA
    tiles: cache.Tiles = ()
    if names is None:
        best = cache.look_up(call)
        names = untuned(call) if best is None else (best.implementation, "xla")
        tiles = () if best is None else best.tiles
    chosen: list[str] = []
    reasons = []
    for name in names:
        meant = PALLAS if name == "pallas" else (name,)
        if not refusals.keys() & {*meant}:
            reasons.append(f"{mechanism} has no {name!r} implementation")
        for one in meant:
            if one not in refusals:
                continue
            reason = refusals[one]()
            if reason is None:
                chosen.append(one)
                if PLATFORMS[one] is None:
                    return _chosen(chosen, names, tiles)
            else:
                reasons.append(f"the {one!r} implementation of {mechanism} {reason}")
    if not chosen:
        raise NotImplementedError("; ".join(reasons) + "; implementation='xla' takes these")
    return _chosen(chosen, names, tiles)


def untuned(call: Call) -> tuple[str, ...]:
    """What a call takes that names nothing and was never tuned: the fastest where it was measured.

    That is a kernel on Hopper GPUs and on x86-64, where its program is for one device: compilers
    do not split kernels over several.
    """
    kernels: tuple[str, ...] = ()
    if "cuda" in call.suited and _gpu_kernels_are_faster():
        kernels = tuple(name for name in PALLAS if PLATFORMS[name] == "cuda")
    elif "cpu" in call.suited and _cpu_kernels_are_faster():
        kernels = ("llvm",)
    return (*(name for name in kernels if name in call.refusals), "xla")


def _cpu_kernels_are_faster():
    is_measured = platform.machine() in ("x86_64", "AMD64")
    return jax.default_backend() == "cpu" and is_measured and _for_one_device()


def _gpu_kernels_are_faster():
    if jax.default_backend() != "gpu" or not _for_one_device():
        return False
    from effattn.dispatch import device  # most programs have no kernels

    gpu = device.gpu()
    return gpu is not None and str(gpu.compute_capability).startswith("9.")


def _for_one_device():
    """Whether there is one alone, or what is traced is inside a `shard_map` over all axes."""
    axes = jax.sharding.get_abstract_mesh().axis_types
    return jax.device_count() == 1 or {jax.sharding.AxisType.Manual} == {*axes}


def _chosen(chosen, names, tiles):
    return Chosen(tuple(chosen), _interpreted.get(), tiles if chosen[0] == names[0] else ())


def on_platform(
    chosen: Chosen, mechanism: str, forms: Mapping[str, Callable[..., Any]], *operands: Any
) -> Any:
    """`form(*operands)` of the first name whose platform is that which the program is lowered for.

    Where there is none it is a `NotImplementedError` when the program is lowered.
    """
    names, interpreted, _ = chosen
    first = forms[names[0]]
    if PLATFORMS[names[0]] is None or interpreted:
        return first(*operands)
    branches: dict[str, Callable[..., Any]] = {}
    for name in names:
        branches.setdefault(PLATFORMS[name] or "default", forms[name])
    if "default" not in branches:
        kernels = " and ".join(f"{name!r} on {PLATFORMS[name]}" for name in names)
        message = f"{mechanism} runs by {kernels} alone; implementation='xla' runs anywhere"
        from effattn.dispatch.refused import refusing  # most programs have no kernels

        branches["default"] = refusing(message, jax.eval_shape(first, *operands))
    return lax.platform_dependent(*operands, **branches)
