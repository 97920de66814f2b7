"""Context managers for calls that are traced within: interpreted kernels, and recorded choices."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_interpreted: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "effattn_interpreted", default=False
)


@contextlib.contextmanager
def interpreted(how: Any = True) -> Iterator[None]:
    """Runs kernels that are traced within in Pallas's interpreter: on any device, and slowly.

    `how` is the argument `interpret` of `pallas_call`: True, for TPUs also `pltpu.InterpretParams`,
    and for Mosaic GPU, from jax 0.12 on, `plgpu.InterpretGPUParams`. `InterpretGPUParams` runs each
    warpgroup in a thread, and the threads wait for each other. On a CPU with few cores this can
    deadlock, unless XLA gets more threads, for example by
    `jax.config.update("jax_num_cpu_devices", 8)` at the start of the program.
    """
    token = _interpreted.set(how)
    try:
        yield
    finally:
        _interpreted.reset(token)


def how_interpreted() -> Any:
    """The argument of `interpreted` for kernels that are traced now; False outside of it."""
    return _interpreted.get()


def is_interpreted() -> bool:
    """True if kernels that are traced now will run in the interpreter."""
    return bool(how_interpreted())


class Recorder(NamedTuple):
    """Request and results of `recorded`.

    Attributes:
      names: the implementations for calls with `implementation=None`.
      taken: for each call, the implementations that accept the call, with their limits.
    """

    names: tuple[str, ...]
    taken: list[Mapping[str, Any]]


_recorder: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar(
    "effattn_recorder", default=None
)


@contextlib.contextmanager
def recorded(*names: str) -> Iterator[list[Mapping[str, Any]]]:
    """Records, for each call traced within, the implementations that accept it, with their limits.

    Calls with `implementation=None` ask for `names`. Every recorded call is traced in XLA.
    """
    new = Recorder(names, [])
    token = _recorder.set(new)
    try:
        yield new.taken
    finally:
        _recorder.reset(token)


def recorder() -> Recorder | None:
    """The recorder of calls that are traced now; None outside of `recorded`."""
    return _recorder.get()
