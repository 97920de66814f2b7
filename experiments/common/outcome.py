"""How a command ends: its exit status, and one sentence about what stopped it."""

import contextlib
import io
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from experiments.common.errors import UserError


def exit_status(work: Callable[[], None], stopped: str) -> int:
    """Does the work of a command; returns its exit status.

    Args:
      work: raises `UserError` or `OSError` if something is wrong, and what NumPy and JAX raise
        where memory is short.
      stopped: what to say after Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal has every character
    try:
        with _second_interrupt_kills():
            work()
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        reason = _out_of_memory(error)
        if reason is None:
            raise
        print(f"error: {reason}; choose smaller sizes", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 130
    return 0


def _out_of_memory(error: MemoryError | RuntimeError) -> str | None:
    """What the error says if it is that; JAX's is a `RuntimeError` as others are."""
    if isinstance(error, MemoryError):
        return f"out of memory ({error})"
    # The second is said of arrays whose number of elements is no int64.
    pattern = r"out of memory[^.;\n]*|overflow in static extent product"
    found = re.search(pattern, str(error), re.IGNORECASE)
    return found and found[0].lower()


@contextlib.contextmanager
def _second_interrupt_kills() -> Iterator[None]:
    """Ctrl-C ends the work in order, and once more at once, which does no harm to a run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
