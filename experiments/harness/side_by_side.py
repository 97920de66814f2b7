"""Simultaneous calls of a function, in threads."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from experiments.harness.errors import Stopped

Input = TypeVar("Input")
Output = TypeVar("Output")


def call(
    function: Callable[[Input], Output],
    inputs: Sequence[Input],
    at_once: int,
    stop: Callable[[], None],
) -> list[Output]:
    """Returns the outputs of `function` for all inputs, in order.

    Args:
      function: function to call, in other threads: Ctrl-C or SIGTERM reach the present thread, and
        so cannot interrupt a call where its state is inconsistent.
      inputs: inputs; calls start in this order.
      at_once: maximum number of simultaneous calls.
      stop: function that makes running calls raise `Stopped` soon. `call` calls `stop` at the first
        error or at a signal, starts no further calls, and raises the error when all running calls
        ended. Another error of a call that was to stop is raised in place of the signal.
    """
    futures: list[Future[Output]] = []
    begin, end = threading.Event(), threading.Event()

    def begun(each: Input) -> Output:
        begin.wait()
        if end.is_set():
            raise Stopped
        return function(each)

    with ThreadPoolExecutor(at_once) as pool:
        try:
            for each in inputs:
                futures.append(pool.submit(begun, each))
            # A signal may interrupt the start of a thread, which the pool then does not know and
            # does not wait for: no call begins before all threads have started.
            begin.set()
            left = set(futures)
            while left:
                # A signal just before a wait does not end the wait, so that no wait is long.
                done, left = wait(left, timeout=1, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
        except BaseException as error:
            end.set()
            begin.set()
            stop()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, KeyboardInterrupt):
                _raise_errors(futures)
            raise
    return [future.result() for future in futures]


def _raise_errors(futures: Sequence[Future[Any]]) -> None:
    """Raises the error of a call that could not end in order, for example on a full disk."""
    for future in futures:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, Exception) and not isinstance(error, Stopped):
            raise error
