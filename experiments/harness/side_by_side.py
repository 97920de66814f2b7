"""Simultaneous calls of a function, in threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

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
      function: function to call; with `at_once=1` in the present thread, otherwise in other
        threads.
      inputs: inputs; calls start in this order.
      at_once: maximum number of simultaneous calls.
      stop: function that makes running calls raise soon. `call` calls `stop` at the first error or
        at Ctrl-C, starts no further calls, and raises the error when all running calls have ended.
    """
    if at_once == 1:
        return [function(each) for each in inputs]
    with ThreadPoolExecutor(at_once) as pool:
        try:
            futures = [pool.submit(function, each) for each in inputs]
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]
