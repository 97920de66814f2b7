"""Runs that are killed, stopped or fail go on from their last checkpoint."""

import copy
import dataclasses
import errno
import functools
import math
import os
import shutil
import signal
import threading
import time

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from experiments.harness import metrics, outcome, side_by_side
from experiments.harness.errors import Diverged, Stopped, UserError
from experiments.harness.progress import Progress
from experiments.harness.training import Run, train
from tests.experiments.bigrams import SCHEDULE, TASK, VARIANTS, assert_identical, programs_of
from tests.experiments.conftest import Lines


@pytest.fixture(scope="module")
def programs():
    return programs_of()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The parameters and the metrics of a run that nothing stops, by variant and seed."""

    @functools.cache
    def trained(variant, seed=1):
        folder = tmp_path_factory.mktemp("whole")
        run = Run("bigram", folder, "identity", seed=seed, learning_rate=0.01)
        task = VARIANTS[variant].get("task", TASK)
        params, _ = train(run, SCHEDULE, programs_of(**VARIANTS[variant]), task, Lines())
        return params, untimed(folder / "metrics.jsonl")

    return trained


@pytest.fixture
def run(tmp_path):
    return Run("bigram", tmp_path / "run", "identity", seed=1, learning_rate=0.01)


def untimed(path, schedule=SCHEDULE):
    records = metrics.read(path, schedule, schedule.steps)
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


@pytest.mark.parametrize(
    ("variant", "stopped_at"),
    [("one length", 2), ("one length", 3), *((each, 4) for each in VARIANTS), ("one length", 7)],
)
def test_a_killed_run_ends_with_the_same_parameters(run, lines, uninterrupted, variant, stopped_at):
    class Killed(Exception):
        pass

    class Killer(Lines):
        def step(self, step, loss, tokens_per_second):
            if step == stopped_at:
                raise Killed

    programs = programs_of(**VARIANTS[variant])
    task = VARIANTS[variant].get("task", TASK)
    expected, all_metrics = uninterrupted(variant)
    with pytest.raises(Killed):
        train(run, SCHEDULE, programs, task, Killer())
    params, _ = train(run, SCHEDULE, programs, task, lines)
    assert_identical(params, expected)
    # The run resumed at the last evaluation, without gaps or duplicates.
    assert lines.steps[0] == 3 * ((stopped_at - 1) // 3) + 1
    assert untimed(run.folder / "metrics.jsonl") == all_metrics


def test_a_finished_run_is_read_not_trained(run, programs, lines):
    expected, record = train(run, SCHEDULE, programs, TASK, Lines())
    before = (run.folder / "metrics.jsonl").read_text()
    params, again = train(run, SCHEDULE, programs, TASK, lines)
    assert_identical(params, expected)
    assert (again, lines.steps) == (record, [])
    assert (run.folder / "metrics.jsonl").read_text() == before


class Changed:
    """Replacement of a step of programs that changes its result."""

    def __init__(self, step, change):
        self._step, self._change = step, change

    def __getattr__(self, name):
        return getattr(self._step, name)

    def __call__(self, *arguments):
        return self._change(*self._step(*arguments))


def changed(programs, change):
    programs = copy.copy(programs)
    programs.step = Changed(programs.step, change)
    return programs


def poisoned(programs, bad_step):
    """Returns programs whose loss is NaN at one step."""
    taken = 0

    def poison(params, state, loss):
        nonlocal taken
        taken += 1
        return params, state, loss * jnp.nan if taken == bad_step else loss

    return changed(programs, poison)


@pytest.mark.parametrize(
    ("bad_step", "kept"),
    [(2, "no checkpoint had been written"), (6, "step 3 is kept"), (7, "step 6 is kept")],
)
def test_a_loss_that_is_not_a_number_stops_the_run(run, programs, bad_step, kept):
    with pytest.raises(
        Diverged, match=f"bigram became NaN or infinite at step {bad_step}; .*{kept}"
    ):
        train(run, SCHEDULE, poisoned(programs, bad_step), TASK, Lines())
    assert "NaN" not in (run.folder / "metrics.jsonl").read_text()
    # The checkpoint is good: training with the original programs resumes from it.
    _, record = train(run, SCHEDULE, programs, TASK, Lines())
    assert math.isfinite(record["loss"])


def test_parameters_that_are_no_numbers_are_never_saved(run, programs):
    def spoil(params, state, loss):
        return jax.tree.map(lambda x: x * jnp.nan, params), state, loss

    schedule = dataclasses.replace(SCHEDULE, evaluate_every=1)
    with pytest.raises(Diverged, match="at step 1; no checkpoint"):
        train(run, schedule, changed(programs, spoil), TASK, Lines())
    assert not list((run.folder / "checkpoints").iterdir())


def test_a_run_whose_metrics_are_gone_does_not_go_on_without_them(run, programs):
    train(run, dataclasses.replace(SCHEDULE, steps=3), programs, TASK, Lines())
    (run.folder / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="ends at step 0, and the run went on to 3; delete"):
        train(run, SCHEDULE, programs, TASK, Lines())
    assert not (run.folder / "metrics.jsonl").exists()


class Stopper(Lines):
    """Replacement of the progress display that asks to stop at a step."""

    def __init__(self, step):
        super().__init__()
        self.stopped_at = step

    @property
    def stopping(self):
        return len(self.steps) >= self.stopped_at


@pytest.mark.parametrize(
    ("variant", "stopped_at"),
    [*(("one length", step) for step in (0, 1, 3)), *((each, 4) for each in VARIANTS)],
)
def test_a_stopped_run_goes_on_where_it_was(run, lines, uninterrupted, variant, stopped_at):
    programs = programs_of(**VARIANTS[variant])
    task = VARIANTS[variant].get("task", TASK)
    expected, all_metrics = uninterrupted(variant)
    stopper = Stopper(stopped_at)
    with pytest.raises(Stopped):
        train(run, SCHEDULE, programs, task, stopper)
    params, _ = train(run, SCHEDULE, programs, task, lines)
    assert_identical(params, expected)
    # No step is taken twice.
    assert len(stopper.steps) - stopped_at in (0, 1)
    assert stopper.steps + lines.steps == [1, 2, 3, 4, 5, 6, 7]
    assert untimed(run.folder / "metrics.jsonl") == all_metrics


def test_a_stop_does_not_save_parameters_that_are_no_numbers(run, programs):
    taken = 0

    def spoil(params, state, loss):
        nonlocal taken
        taken += 1
        return jax.tree.map(lambda x: x * jnp.nan if taken == 2 else x, params), state, loss

    with pytest.raises(Stopped):
        train(run, SCHEDULE, changed(programs, spoil), TASK, Stopper(1))
    assert not list((run.folder / "checkpoints").iterdir())


def test_a_damaged_checkpoint_costs_only_the_steps_after_the_one_before(run, programs, lines):
    expected, record = train(run, SCHEDULE, programs, TASK, Lines())
    measured = untimed(run.folder / "metrics.jsonl")
    newest = run.folder / "checkpoints" / "7"
    for path in newest.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:20])
    params, again = train(run, SCHEDULE, programs, TASK, lines)
    assert lines.steps == [7]
    warning, then = lines.warnings
    assert f"checkpoint {newest} is damaged" in warning and then.endswith("checkpoint of step 6")
    assert_identical(params, expected)
    assert {**again, "seconds": 0} == {**record, "seconds": 0}
    assert untimed(run.folder / "metrics.jsonl") == measured

    for name in ("6", "7"):
        shutil.rmtree(run.folder / "checkpoints" / name / "state")
    anew = Lines()
    params, _ = train(run, SCHEDULE, programs, TASK, anew)
    assert anew.steps == [1, 2, 3, 4, 5, 6, 7] and "starts anew" in anew.warnings[-1]
    assert_identical(params, expected)
    assert untimed(run.folder / "metrics.jsonl") == measured


def test_a_checkpoint_that_cannot_be_written_keeps_the_last_good_one(run, programs, monkeypatch):
    save = ocp.CheckpointManager.save

    def full(manager, step, **items):
        if step == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(manager, step, **items)

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        with pytest.raises(
            UserError, match=r"checkpoints/6 cannot .* \(.*No space left on device\)"
        ):
            train(run, SCHEDULE, programs, TASK, Lines())
    lines = Lines()
    train(run, SCHEDULE, programs, TASK, lines)
    assert lines.steps == [4, 5, 6, 7] and not lines.warnings


def test_a_checkpoint_is_written_while_training_goes_on(run, programs, monkeypatch):
    save, went_on = ocp.CheckpointManager.save, threading.Event()

    class Watched(Lines):
        def step(self, step, loss, tokens_per_second):
            super().step(step, loss, tokens_per_second)
            if step == 5:
                went_on.set()

    def slow(manager, step, **items):
        assert step != 3 or went_on.wait(timeout=60)
        return save(manager, step, **items)

    monkeypatch.setattr(ocp.CheckpointManager, "save", slow)
    train(run, SCHEDULE, programs, TASK, Watched())
    assert went_on.is_set()


@pytest.mark.parametrize(
    ("at_once", "number", "status"), [(1, signal.SIGTERM, 143), (2, signal.SIGINT, 130)]
)
def test_a_signal_saves_all_runs_and_says_so(
    run, programs, uninterrupted, number, status, at_once, capsys
):
    runs = [
        dataclasses.replace(run, folder=run.folder / name, seed=i) for i, name in enumerate("ab")
    ]
    expected = [uninterrupted("one length", each.seed)[0] for each in runs]
    shown = Progress(2, SCHEDULE.steps)
    both = threading.Barrier(at_once)

    def begun(each):
        def signalled(params, state, loss):
            nonlocal taken
            taken += 1
            if taken == 2:
                both.wait(timeout=60)
                if each is runs[0]:
                    os.kill(os.getpid(), number)
                while not shown.stopping:
                    time.sleep(0.001)
            return params, state, loss

        taken = 0
        return train(each, SCHEDULE, changed(programs, signalled), TASK, shown)

    def work():
        side_by_side.call(begun, runs, at_once, shown.stop)

    assert outcome.exit_status(work, "the same command resumes") == status
    assert capsys.readouterr().err == "the same command resumes\n"
    for each, wanted in zip(runs[:at_once], expected, strict=False):
        assert [path.name for path in (each.folder / "checkpoints").iterdir()] == ["2"]
        assert_identical(train(each, SCHEDULE, programs, TASK, Lines())[0], wanted)
    assert (runs[1].folder / "checkpoints").exists() == (at_once == 2)
