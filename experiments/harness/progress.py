"""Progress display: bars on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Progress:
    """Context manager that shows the progress of several runs of equal length.

    Runs may be simultaneous, in threads.

    Args:
      runs: number of runs.
      steps: steps of each run.
    """

    def __init__(self, runs: int, steps: int):
        self.runs, self.steps = runs, steps
        self._begun = self._done = self._taken = 0
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.live = sys.stdout.isatty()
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(file=sys.stdout),
            speed_estimate_period=120,
            expand=True,
            disable=not self.live,
        )
        self._all = self.bars.add_task("all runs", total=runs * steps, detail="")

    def __enter__(self) -> "Progress":
        if self.live:
            self.bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self.bars.stop()

    def say(self, text: str) -> None:
        """Prints a line."""
        if self.live:
            self.bars.console.print(text, highlight=False, markup=False)
        else:
            with self._lock:
                print(text, flush=True)

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self.say(f"warning: {text}")

    def begin(self, name: str, step: int) -> "RunProgress":
        """Starts the display of the next run, which resumes after `step` steps."""
        with self._lock:
            self._begun += 1
            description = f"{name} ({self._begun} of {self.runs})"
        self.advance(step, taken=False)
        return RunProgress(self, description, step)

    def advance(self, steps: int, *, taken: bool) -> None:
        """Counts further steps as done; steps of an earlier session are not `taken` now."""
        with self._lock:
            self._done += steps
            self._taken += steps * taken
            self.bars.update(self._all, completed=self._done)

    def stop(self) -> None:
        """Makes all runs write a checkpoint at their next step, and end."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        """True after a call of `stop`."""
        return self._stopping.is_set()

    @property
    def time_left(self) -> str:
        """Remaining minutes and seconds at the speed so far."""
        with self._lock:
            per_step = (time.monotonic() - self._start) / max(1, self._taken)
            left = per_step * (self.runs * self.steps - self._done)
        minutes, seconds = divmod(round(left), 60)
        return f"{minutes}:{seconds:02d}"


class RunProgress:
    """Context manager that shows the progress of one run; at the exit the run counts as done.

    Args:
      whole: progress display of all runs.
      description: name of this run.
      step: number of steps that are done at the start.
    """

    def __init__(self, whole: Progress, description: str, step: int):
        self._whole, self._description, self._step = whole, description, step
        self._detail = ""
        self._bar = whole.bars.add_task(description, total=whole.steps, completed=step, detail="")

    def __enter__(self) -> "RunProgress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._whole.bars.remove_task(self._bar)
        self._whole.advance(self._whole.steps - self._step, taken=False)

    def step(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Shows that the run has done `step` steps."""
        taken, self._step = step - self._step, step
        self._detail = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s"
        self._whole.bars.update(self._bar, completed=step, detail=self._detail)
        self._whole.advance(taken, taken=True)

    def evaluated(self, headline: str, record: dict[str, Any]) -> None:
        """Prints the result of an evaluation, if no bars are shown."""
        if not self._whole.live:
            self._whole.say(
                f"{self._description}  step {self._step}/{self._whole.steps}  {self._detail}  "
                f"validation {headline.replace('_', ' ')} {record[headline]:.3f}  "
                f"{self._whole.time_left} left"
            )
