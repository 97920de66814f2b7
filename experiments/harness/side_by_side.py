"""Simultaneous calls of a function, in threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

from experiments.harness.errors import UserError

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
      stop: function that makes running calls raise soon. `call` calls `stop` at the first error or
        at a signal, starts no further calls, and raises the error when all running calls ended. A
        `UserError` of a call that was to end is raised in place of the signal.
    """
    futures: list[Future[Output]] = []
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for each in inputs:
                futures.append(pool.submit(function, each))
            for future in as_completed(futures):
                future.result()
        except BaseException as error:
            stop()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, KeyboardInterrupt):
                _raise_user_errors(futures)
            raise
    return [future.result() for future in futures]


def _raise_user_errors(futures: Sequence[Future[Any]]) -> None:
    """Raises the error of a call that could not end in order, for example on a full disk."""
    for future in futures:
        if not future.cancelled() and isinstance(error := future.exception(), UserError):
            raise error
