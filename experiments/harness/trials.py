"""Trials of a comparison: models are trained, measured and sampled, or read from their files."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.harness import machine, metrics, processes, report
from experiments.harness.errors import UserError
from experiments.harness.naming import folder_name
from experiments.harness.programs import Programs
from experiments.harness.progress import Progress
from experiments.harness.schedules import Schedule
from experiments.harness.training import Run, held_out, train
from experiments.tasks.task import Task

Key = tuple[str, float, int]


def key_of(run: Mapping[str, Any]) -> Key:
    """Returns mechanism, learning rate and seed of a result."""
    return run["mechanism"], run["learning_rate"], run["seed"]


def better(task: Task) -> Callable[[Mapping[str, Any]], tuple[float, ...]]:
    """Returns a sort key of results that is least for the best: the headline, then the loss."""
    sign = -1 if task.more_is_better else 1
    return lambda result: (sign * result[task.headline], result["loss"])


@dataclasses.dataclass(frozen=True)
class Trials:
    """Settings that are equal for all models of a comparison.

    Attributes:
      folder: folder of the comparison; every run has a folder in it.
      identity: text that identifies the configuration.
      schedule: number and size of the training steps.
      task: task to learn.
      compile: function from a mechanism's name to the compiled programs.
      progress: progress display.
      known: results of earlier runs whose folders may be gone.
    """

    folder: Path
    identity: str
    schedule: Schedule
    task: Task
    compile: Callable[[str], Programs]
    progress: Progress
    known: Mapping[Key, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def run(self, mechanism: str, learning_rate: float, seed: int) -> dict[str, Any]:
        """Returns the measurements of one model, which is trained if it was not trained before."""
        name = f"{folder_name(mechanism)}-rate{learning_rate}-seed{seed}"
        run = Run(name, self.folder / name, f"{self.identity} {name}", seed, learning_rate)
        path = run.folder / "result.json"
        earlier = self.known.get((mechanism, learning_rate, seed))
        if path.is_file():
            remedy = f"delete {path} to measure that run again"
            measures = dict.fromkeys(self.task.columns.values(), metrics.is_measure)
            earlier = metrics.read_json(path, {**report.OF_RUN, **measures}, remedy)
            if key_of(earlier) != (mechanism, learning_rate, seed):
                raise UserError(f"{path} is the result of another run; {remedy}")
        if earlier is not None:
            with self.progress.begin(name, self.schedule.steps):
                return earlier
        programs = self.compile(mechanism)
        params, record = train(run, self.schedule, programs, self.task, self.progress)
        result = {
            "mechanism": mechanism,
            "seed": seed,
            "learning_rate": learning_rate,
            "folder": name,
            **record,
            "tokens_per_second": record["tokens"] / record["seconds"],
            "parameters": programs.parameters,
            "state_bytes": programs.state_bytes,
            "held_out": held_out(programs, params, self.task, self.schedule),
            **self.task.sample(programs.model(processes.whole(params)), seed),
            "environment": machine.environment(),
            "curve": metrics.evaluations(
                run.folder / "metrics.jsonl", self.schedule, record["step"]
            ),
        }
        metrics.write_atomically(path, json.dumps(result, indent=2) + "\n")
        return result
