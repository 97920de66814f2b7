"""Command line of the experiments that train models."""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from experiments.harness import checks, folders, machine, outcome, processes, report, user_modules
from experiments.harness.options import Options, command_of
from experiments.harness.schedules import Schedule
from experiments.tasks.task import Task

Config = TypeVar("Config", bound=Options)


def parse(experiment: str, known: Mapping[str, Config], argv: Sequence[str] | None) -> Config:
    """Returns the options of a command line: the preset, changed by the other options."""
    preset = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    preset.add_argument("--preset", nargs="?")
    default = known.get(preset.parse_known_args(argv)[0].preset, known["small"])
    program = f"python -m experiments.{experiment}"
    return tyro.cli(type(default), prog=program, args=argv, default=default)


def train_all(
    config: Options,
    folder: Path,
    task: Task,
    settings: dict[str, Any],
    made_by: str,
    left_out: Mapping[str, str],
    optional: Collection[str] = (),
) -> None:
    """Trains every model that is not trained yet, and writes the report.

    Args:
      config: options of the experiment.
      folder: run folder.
      task: task to learn.
      settings: settings that are the same for all runs of the folder.
      made_by: command line of the report.
      left_out: reasons why mechanisms cannot be built, by name.
      optional: mechanisms that are left out if they diverge.
    """
    # Imported late: --help and bad input need not wait for JAX and Flax.
    from experiments.harness import (
        comparison,
        figure,
        models,
        programs,
        progress,
        trials,
    )

    schedule = Schedule(
        config.steps, config.batch, config.accumulate, config.steps_between_evaluations
    )
    arguments = programs.arguments_of(config, schedule, task)

    def compile_mechanism(mechanism: str) -> programs.Programs:
        return programs.Programs(models.builder(mechanism, config, task), *arguments)

    mechanisms = [name for name in config.mechanisms if name not in left_out]
    runs = comparison.planned_runs(len(mechanisms), len(config.rates), len(config.seeds))
    at_once = machine.runs_at_once(config, runs)
    known = {trials.key_of(run): run for run in report.earlier_runs(folder)}
    with progress.Progress(runs, config.steps) as shown:
        one = trials.Trials(
            folder,
            folders.fingerprint(settings),
            schedule,
            task,
            programs.ProgramCache(compile_mechanism),
            shown,
            known,
        )
        compared = comparison.compare(
            mechanisms,
            config.rates,
            config.seeds,
            one.run,
            trials.better(task),
            shown,
            at_once,
            optional,
        )
    compared.left_out.update(left_out)
    reported = {trials.key_of(run) for run in compared.runs + compared.sweep}
    # Runs of an earlier report took no time now.
    now = len(reported - known.keys())
    compared = dataclasses.replace(compared, at_once=max(1, min(at_once, now)))
    compared.others.extend(run for key, run in known.items() if key not in reported)
    for name, reason in compared.left_out.items():
        print(f"left out: {name} ({reason})", flush=True)
    asked = {**settings, **config.of_runs()}
    asked["mechanisms"] = [name for name in asked["mechanisms"] if name not in compared.left_out]
    report.write_report(folder, compared, asked, task, made_by)
    figure.write_figures(folder, compared.runs, task)
    report.finish(folder)


def run(
    experiment: str,
    options: Config,
    default: Config,
    check: Callable[[Any, Any], Any] = checks.check_mechanisms,
    train: Callable[..., None] = train_all,
    read: Callable[[Path], str] = report.read_report,
) -> int:
    """Runs an experiment and prints its report; returns the exit status.

    Args:
      experiment: name; run folders begin with this name.
      options: options of the experiment.
      default: options of the same preset, to write down the command.
      check: `(options, task) -> checked`, which raises `UserError` before any training.
      train: trains what is missing and writes the report, with the arguments of `train_all`; the
        result of `check` takes the place of `left_out`.
      read: returns the text to print, from the run folder.
    """

    def work() -> None:
        options.check()
        with processes.started(options.processes, command_of(experiment, options, default)):
            trained()

    def trained() -> None:
        user_modules.load(options.imports)
        config, made_by = options.with_all(), command_of(experiment, options, default)
        settings = {"experiment": experiment, **config.of_folder(), **config.prepare()}
        name = f"{experiment}-{config.label}-{folders.fingerprint(settings)}"
        with processes.own_folder(folders.path_of(config.output, name)) as folder:
            in_folder(folder, config, settings, made_by)

    def in_folder(folder: Path, config: Any, settings: dict[str, Any], made_by: str) -> None:
        config.check_output(folder)
        folders.check_folder(folder, settings)
        # Mechanisms that `all` stands for are left out if they do not fit the task.
        optional = set(config.mechanisms) - set(options.mechanisms)
        if report.finished(folder, {**settings, **config.of_runs()}, optional):
            print(f"This run is finished; to repeat it, delete {folder} or change --output.")
        else:
            task = config.make_task(folder)
            checked = check(options, task)
            print(f"Writing to {folder}. If stopped, the same command resumes.", flush=True)
            with folders.claimed(folder, settings):
                config.save(task, folder)
                train(config, folder, task, settings, made_by, checked, optional)
        if processes.is_first():
            config.finish(folder, settings)
        print(read(folder))

    return outcome.exit_status(work, "stopped; the same command resumes from the last checkpoint")
