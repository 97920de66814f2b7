"""Options of the experiments on generated tasks, and their command lines."""

import argparse
import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import tyro

from experiments.harness import command, naming
from experiments.harness.errors import UserError
from experiments.harness.options import Options
from experiments.tasks.task import Task

# Sizes of each task, by task and preset.
Tasks = Mapping[str, Mapping[str, Task]]

# Types of the values of options.
LITERALS = (bool, int, float, str, tuple)


@dataclasses.dataclass(frozen=True)
class TaskOptions(Options):
    """Options of an experiment on tasks by name."""

    preset: Literal["small", "published"] = "small"  # defaults of the other options
    task: str = ""  # NAME, or NAME,OPTION=VALUE with sizes of the task

    tasks: ClassVar[Tasks] = {}

    @property
    def label(self) -> str:
        return f"{self.preset}-{naming.folder_name(self.task)}"

    def check(self) -> None:
        super().check()
        _ = self._task  # raises an error for a wrong task

    @functools.cached_property
    def _task(self) -> Task:
        try:
            name, given = naming.options_of(self.task)
        except ValueError as error:
            raise UserError(f"--task: {error}") from None
        if name not in self.tasks:
            raise UserError(f"--task must be one of {', '.join(self.tasks)}, got {name!r}")
        task = self.tasks[name][self.preset]
        known = {field.name: _example(task, field) for field in dataclasses.fields(task)}
        known = {key: value for key, value in known.items() if isinstance(value, LITERALS)}
        for option, value in given.items():
            if option not in known:
                raise UserError(
                    f"--task {name} has no option {option!r}; its options are "
                    f"{', '.join(known) or 'none'}"
                )
            # Other held-out sizes than those of training are empty by default.
            example = known["trained"] if known[option] == () else known[option]
            if not _is_like(value, example):
                raise UserError(
                    f"--task {name}: option {option} must be like {example!r}, got {value!r}"
                )
        try:
            return dataclasses.replace(task, **given)
        except (ValueError, TypeError) as error:
            raise UserError(f"--task {self.task}: {error}") from None

    @property
    def is_causal(self) -> bool:
        return self._task.is_causal

    def fits(self, capabilities: frozenset[str]) -> bool:
        masks = "lengths" in capabilities or not self._task.is_padded
        return super().fits(capabilities) and masks

    def prepare(self) -> dict[str, Any]:
        return {"task_sizes": self._task.settings()}

    def make_task(self, folder: Path) -> Task:
        return self._task


def _example(task: Task, field: dataclasses.Field[Any]) -> Any:
    """Returns the value of a task's field, a float if the field takes one."""
    value = getattr(task, field.name)
    return float(value) if field.type is float else value


def _is_like(value: Any, example: Any) -> bool:
    """Returns whether a value has the type of an example; outer tuples may have any length."""
    if not isinstance(example, tuple):
        return type(value) is type(example) or (type(value), type(example)) == (int, float)
    if not isinstance(value, tuple):
        return False
    first = example[0]
    is_nested = isinstance(first, tuple)
    return all(_is_like(v, first) and (not is_nested or len(v) == len(first)) for v in value)


Config = TypeVar("Config", bound=TaskOptions)
Defaults = Mapping[str, Mapping[str, Mapping[str, Any]]]


def main(
    experiment: str, options: type[Config], defaults: Defaults, argv: Sequence[str] | None
) -> int:
    """Runs the command of an experiment; returns the exit status.

    Args:
      experiment: name of the experiment.
      options: class of its options.
      defaults: options that differ from those of the class, by task and preset.
      argv: arguments of the command line.
    """
    given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    given.add_argument("--preset", nargs="?")
    given.add_argument("--task", nargs="?")
    given.add_argument("--learning-rate", "--learning_rate", nargs="?")
    given.add_argument("--sweep", nargs="*")
    known = given.parse_known_args(argv)[0]
    task = known.task or next(iter(options.tasks))
    preset = known.preset if known.preset == "published" else "small"
    of_task = defaults.get(task.partition(",")[0], {}).get(preset, {})
    default = options(**{"task": task, "preset": preset, **of_task})
    program = f"python -m experiments.{experiment}"
    about = f"{inspect.getdoc(options)}\n\nTasks: {', '.join(options.tasks)}."
    config = tyro.cli(options, prog=program, description=about, args=argv, default=default)
    # A rate on the command line replaces the sweep of the preset, and the other way round.
    if known.learning_rate is not None and known.sweep is None:
        config = dataclasses.replace(config, sweep=())
    elif known.sweep is not None and known.learning_rate is None:
        config = dataclasses.replace(config, learning_rate=None)
    return command.run(experiment, config, default)
