"""Watch over the processes of a run: if one of them ends early, all others end with a sentence.

The first process has a connection to each other one. The system closes the connections of a process
that ends, however it ends. JAX notices a lost process only after missed heartbeats, and aborts.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

_GOODBYE = b"."
LOST = (
    "error: another process of this run ended early; see its error, then start all processes "
    "again: they resume from the last checkpoint"
)
_last_acts: list[Callable[[], None]] = []


def on_exit(act: Callable[[], None]) -> None:
    """Has a function called before `end_at_once` ends the process."""
    _last_acts.append(act)


def end_at_once() -> None:
    """Ends this process with status 1: in order, it would wait for the others."""
    for act in _last_acts:
        act()
    sys.stderr.flush()
    os._exit(1)


def end_after_loss() -> None:
    """Says that another process has ended, and ends this one."""
    print(LOST, file=sys.stderr, flush=True)
    end_at_once()


class Watch:
    """Connections between the first process of a run and the others.

    Args:
      others: the connections of this process.
      lost: is called when another process has ended early.
    """

    def __init__(self, others: Sequence[socket.socket], lost: Callable[[], None] = end_after_loss):
        self._others, self._lost = others, lost
        for other in others:
            other.settimeout(None)
            threading.Thread(target=self._listen, args=(other,), daemon=True).start()

    @classmethod
    def of_first(cls, server: socket.socket, count: int, seconds: float) -> "Watch":
        """Waits for the other processes; `TimeoutError` if some of the `count` are missing."""
        end = time.monotonic() + seconds
        others: list[socket.socket] = []
        with server:
            while len(others) < count - 1:
                server.settimeout(max(end - time.monotonic(), 0.001))
                others.append(server.accept()[0])
        return cls(others)

    @classmethod
    def of_other(cls, host: str, port: int, seconds: float) -> "Watch":
        """Waits for the first process; `OSError` if it is missing."""
        end = time.monotonic() + seconds
        while True:
            try:
                return cls([socket.create_connection((host, port), seconds)])
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def close(self) -> None:
        """Tells the others that this process ends in order."""
        for other in self._others:
            try:
                other.sendall(_GOODBYE)
                other.shutdown(socket.SHUT_WR)
            except OSError:  # the other has ended too
                continue

    def _listen(self, other: socket.socket) -> None:
        try:
            said = other.recv(1)
        except OSError:
            said = b""
        if said != _GOODBYE:
            self._lost()


def own_address() -> str:
    """An address of this host that other hosts can reach, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # sends nothing: it asks for the route
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
