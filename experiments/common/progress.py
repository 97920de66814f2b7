"""Live progress: bars on a terminal, plain lines anywhere else."""

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Progress:
    """Shows where an experiment of several equally long runs stands; a context manager.

    Args:
      runs: how many runs there are.
      steps: of each run.
    """

    def __init__(self, runs: int, steps: int):
        self._runs, self._steps = runs, steps
        self._begun = self._done = self._taken = 0
        self._start = time.monotonic()
        self._live = sys.stdout.isatty()
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(file=sys.stdout),
            speed_estimate_period=120,
            expand=True,
            disable=not self._live,
        )
        self._all = self._bars.add_task("all runs", total=runs * steps, detail="")
        self._run = self._bars.add_task("", total=steps, detail="", visible=False)

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Prints a line of its own."""
        if self._live:
            self._bars.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def begin(self, name: str, step: int) -> None:
        """The next run starts, after `step` steps of an earlier session."""
        self._name, self._step = name, step
        self._begun += 1
        self._done = (self._begun - 1) * self._steps + step
        self._detail = ""
        description = f"{name} ({self._begun} of {self._runs})"
        self._bars.update(self._all, completed=self._done)
        self._bars.reset(self._run, description=description, completed=step, visible=True)

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """The present run has taken `step` steps."""
        self._taken += step - self._step
        self._done += step - self._step
        self._step = step
        self._detail = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"
        self._bars.update(self._run, completed=step, detail=self._detail)
        self._bars.update(self._all, completed=self._done)

    def evaluated(self, record: dict[str, Any]) -> None:
        """The present run was evaluated."""
        if not self._live:
            self.say(
                f"{self._name} ({self._begun} of {self._runs})  step {self._step}/{self._steps}  "
                f"{self._detail}  validation {record['bits_per_byte']:.3f} bits/byte  "
                f"{self._time_left()} left"
            )

    def _time_left(self) -> str:
        per_step = (time.monotonic() - self._start) / max(1, self._taken)
        minutes, seconds = divmod(round(per_step * (self._runs * self._steps - self._done)), 60)
        return f"{minutes}:{seconds:02d}"
