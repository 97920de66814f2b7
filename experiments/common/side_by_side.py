"""Calls of a function beside each other, in threads."""

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
    """The outputs of `function` for each of `inputs`, in order.

    Args:
      function: called in the present thread if one at a time, otherwise in others.
      inputs: begun in order.
      at_once: how many of the calls may go on beside each other.
      stop: makes the calls under way raise soon. It is called at the first error of any, or at
        Ctrl-C; those not begun yet are left out, and the error is raised when none goes on.
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
