"""Program that trains a small model in a folder and kills itself: `FOLDER STEPS STEP DELAY`.

It trains for STEPS steps. The kill comes DELAY seconds after STEP steps of this process.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from experiments.harness.schedules import Schedule
from experiments.harness.training import Run, train
from tests.experiments.conftest import Lines
from tests.experiments.counting import Counting
from tests.experiments.test_training import programs_of


class Killer(Lines):
    """Replacement of the progress display that kills this process."""

    def __init__(self, step, delay):
        super().__init__()
        self._step, self._delay = step, delay

    def kill_at(self, step):
        if step == self._step:
            kill = threading.Timer(self._delay, os.kill, (os.getpid(), signal.SIGKILL))
            kill.daemon = True
            kill.start()

    def begin(self, name, step):
        self.kill_at(0)
        return self

    def step(self, step, loss, tokens_per_second):
        super().step(step, loss, tokens_per_second)
        self.kill_at(len(self.steps))


def train_in(folder, steps, lines):
    schedule, task = Schedule(steps, 4, 1, 7), Counting(lengths=(12, 8))
    run = Run("bigram", folder, "identity", seed=1, learning_rate=0.01)
    return train(run, schedule, programs_of(task=task, schedule=schedule), task, lines)


if __name__ == "__main__":
    folder, steps, step, delay = sys.argv[1:]
    train_in(Path(folder), int(steps), Killer(int(step), float(delay)))
