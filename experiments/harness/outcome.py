"""End of a command: exit status, and one sentence about an error."""

import contextlib
import io
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from experiments.harness import processes
from experiments.harness.errors import Stopped, UserError


def exit_status(work: Callable[[], None], stopped: str) -> int:
    """Runs the work of a command and returns the exit status.

    Errors of the user, of the system and of memory are printed as one sentence; other errors are
    raised.

    Args:
      work: function to run.
      stopped: sentence to print after Ctrl-C or SIGTERM; the exit status is then 130 or 143, as in
        shells.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal has every character
    with processes.errors_end():
        status = _status(work, stopped)
        if status == 1:
            processes.end()
    return status


def _status(work: Callable[[], None], stopped: str) -> int:
    try:
        with _signals_end_in_order():
            work()
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        reason = out_of_memory(error)
        if reason is None:
            raise
        print(f"error: {reason}; choose smaller sizes", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(stopped, file=sys.stderr)
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    except Stopped:  # as all processes of the run have agreed
        print(stopped, file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


def out_of_memory(error: Exception) -> str | None:
    """Returns the reason if the error is a lack of memory, which JAX raises as a `RuntimeError`."""
    if isinstance(error, MemoryError):
        return f"out of memory ({error})"
    # JAX raises the second message for arrays with more than 2**63 elements.
    pattern = r"out of memory[^.;\n]*|overflow in static extent product"
    found = re.search(pattern, str(error), re.IGNORECASE)
    return found and found[0].lower()


@contextlib.contextmanager
def _signals_end_in_order() -> Iterator[None]:
    """Lets a first Ctrl-C or SIGTERM end the work in order, and a further Ctrl-C at once.

    Both are safe. The first signal is raised as a `KeyboardInterrupt` with its number. Programs
    such as `timeout` send SIGTERM twice, so that further ones are ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    signals = (signal.SIGINT, signal.SIGTERM)
    before = {each: signal.signal(each, interrupt) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
