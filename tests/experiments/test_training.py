"""Training loop, on models without attention, because the loop does not depend on attention."""

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
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from effattn.nn import Centroids, TransformerConfig, TransformerLM
from experiments.harness import loss_scale, metrics, outcome, side_by_side, training
from experiments.harness.errors import Diverged, Stopped, UserError
from experiments.harness.optimisers import make_optimiser
from experiments.harness.programs import ByShape, Programs, in_parts
from experiments.harness.progress import Progress
from experiments.harness.schedules import Schedule
from experiments.harness.training import Run, held_out, train
from experiments.tasks.task import NOTHING, Batch
from tests.experiments.conftest import Lines
from tests.experiments.counting import Counting

TASK = Counting()
TWO_LENGTHS = Counting(lengths=(12, 8))
SCHEDULE = Schedule(steps=7, batch=4, accumulate=1, evaluate_every=3)
LENGTH = 12  # of validation examples


class Bigram(nnx.Module):
    """Bigram model: logits of the next token from the present token."""

    def __init__(self, rngs, dtype=jnp.float32):
        self.embed = nnx.Embed(16, 8, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(8, 16, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))

    def init_state(self, batch, max_length):
        return jnp.zeros((batch, max_length), jnp.float32)


class Projected(Bigram):
    """Bigram model whose features are projected by random features."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.features = nnx.Variable(rngs.normal((8, 8)))

    def redraw(self, rngs):
        self.features[...] = rngs.normal((8, 8))

    def __call__(self, tokens):
        return self.head(self.embed(tokens) @ self.features[...])


@functools.cache
def optimiser():
    return make_optimiser("adamw", steps=7, warmup=0.2, clip=1.0, weight_decay=0.01)


@functools.cache
def programs_of(build=Bigram, task=TASK, schedule=SCHEDULE, precision="float32", redraw=0):
    return Programs(build, optimiser(), schedule, task, precision, redraw)


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


def assert_identical(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), left, right)


def untimed(path, schedule=SCHEDULE):
    records = metrics.read(path, schedule, schedule.steps)
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def test_the_loss_falls_and_every_measurement_is_written(run, programs, lines):
    _, record = train(run, SCHEDULE, programs, TASK, lines)
    assert lines.steps == [1, 2, 3, 4, 5, 6, 7]
    records = metrics.read(run.folder / "metrics.jsonl", SCHEDULE, 7)
    assert [r["step"] for r in records if "train_loss" in r] == [1, 2, 3, 4, 5, 6, 7]
    evaluations = [r for r in records if "loss" in r]
    assert [("loss", record) for record in evaluations] == lines.evaluations
    assert [r["step"] for r in evaluations] == [3, 6, 7]
    assert record == evaluations[-1]
    assert record["loss"] < evaluations[0]["loss"] < math.log(16) + 0.5
    assert [r["tokens"] for r in records] == [r["step"] * 4 * LENGTH for r in records]
    assert {r["temporary_bytes"] for r in evaluations} == {programs.step.temporary_bytes}
    assert programs.step.temporary_bytes > 0


def losses(model, batch):
    """Returns minus the log of the probability of each target; 0 where there is none."""
    each = -jax.nn.log_softmax(model(*batch.inputs))
    targets = np.maximum(batch.targets, 0)[..., None]
    return jnp.where(batch.targets == NOTHING, 0, jnp.take_along_axis(each, targets, -1)[..., 0])


@pytest.mark.parametrize("is_ragged", [False, True])
def test_losses_are_means_over_all_targets_of_a_set(run, lines, is_ragged):
    task = Counting(is_ragged=is_ragged)
    programs = programs_of(task=task)
    params, record = train(run, SCHEDULE, programs, task, lines)
    measured = held_out(programs, params, task, SCHEDULE)
    assert list(measured) == ["validation", "longer"]
    # Six examples do not fill two batches, nor do three longer examples fill one.
    for name, batch in task.held_out().items():
        nats, counts = losses(programs.model(params), batch), batch.targets != NOTHING
        assert measured[name]["loss"] == pytest.approx(float(nats.sum() / counts.sum()), rel=1e-6)
        right = programs.model(params)(*batch.inputs).argmax(-1) == batch.targets
        assert measured[name]["accuracy"] == pytest.approx(right.sum() / counts.sum())
        assert measured[name]["exact"] == pytest.approx((right | ~counts).all(1).mean())
    assert {key: record[key] for key in measured["validation"]} == measured["validation"]


def test_parts_of_longer_examples_have_no_more_tokens():
    programs, shapes = copy.copy(programs_of()), []

    def evaluate(params, parts):
        shapes.append(parts.targets.shape)
        return programs_of().evaluate(params, parts)

    programs.evaluate = evaluate
    params, _ = programs.init(0)
    held_out(programs, params, TASK, dataclasses.replace(SCHEDULE, accumulate=2))
    assert shapes == [(3, 2, LENGTH), (3, 1, LENGTH + 4)]


def test_the_last_part_is_filled_up_with_the_first_examples():
    batch = Batch((np.arange(5), np.arange(10).reshape(5, 2)), np.arange(5))
    (first, second), targets = in_parts(batch, 3)
    np.testing.assert_array_equal(first, [[0, 1, 2], [3, 4, 0]])
    np.testing.assert_array_equal(second[1], [[6, 7], [8, 9], [0, 1]])
    np.testing.assert_array_equal(targets, first)
    np.testing.assert_array_equal(in_parts(batch, 12).targets, [[*range(5), *range(5), 0, 1]])


VARIANTS = {
    "one length": {},
    "two lengths": {"task": TWO_LENGTHS},
    "random features": {"build": Projected, "redraw": 2},
    "float16": {"build": functools.partial(Bigram, dtype=jnp.float16), "precision": "float16"},
}


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


def test_batches_of_two_shapes_are_trained_on_in_one_run(run, lines):
    programs = programs_of(task=TWO_LENGTHS)
    train(run, SCHEDULE, programs, TWO_LENGTHS, lines)
    records = [
        r for r in metrics.read(run.folder / "metrics.jsonl", SCHEDULE, 7) if "train_loss" in r
    ]
    assert np.diff([r["tokens"] for r in records]).tolist() == [32, 48] * 3
    assert lines.losses[-1] < lines.losses[0]
    for step in range(2):
        assert programs.step.knows(in_parts(TWO_LENGTHS.training(4, 0, step), 4))


def test_a_finished_run_is_read_not_trained(run, programs, lines):
    expected, record = train(run, SCHEDULE, programs, TASK, Lines())
    before = (run.folder / "metrics.jsonl").read_text()
    params, again = train(run, SCHEDULE, programs, TASK, lines)
    assert_identical(params, expected)
    assert (again, lines.steps) == (record, [])
    assert (run.folder / "metrics.jsonl").read_text() == before


def test_time_goes_on_where_it_stopped(run, programs):
    stop = dataclasses.replace(SCHEDULE, steps=3)
    train(run, stop, programs, TASK, Lines())
    train(run, SCHEDULE, programs, TASK, Lines())
    seconds = [r["seconds"] for r in metrics.read(run.folder / "metrics.jsonl", SCHEDULE, 7)]
    assert seconds == sorted(seconds)


def test_compilation_and_evaluation_do_not_count_as_training_time(run, monkeypatch):
    now = 0.0

    def slow(function, seconds):
        def call(*arguments):
            nonlocal now
            now += seconds
            return function(*arguments)

        return call

    clock = types.SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(training, "time", clock)
    programs, draws = copy.copy(programs_of(Projected, redraw=2)), []

    def draw(params, number):
        draws.append(int(number))
        return params

    draw.warm_up = slow(programs.draw.warm_up, 1000.0)
    programs.draw = draw
    programs.evaluate = slow(programs.evaluate, 1000.0)
    programs.step = ByShape(programs.one_step)
    programs.step.warm_up = slow(programs.step.warm_up, 1000.0)
    monkeypatch.setattr(ByShape, "__call__", slow(ByShape.__call__, 1.0))
    train(run, SCHEDULE, programs, TWO_LENGTHS, Lines())
    assert draws == [1, 2, 3]
    records = metrics.read(run.folder / "metrics.jsonl", SCHEDULE, 7)
    assert [r["seconds"] for r in records if "loss" in r] == [3.0, 6.0, 7.0]


def test_a_step_is_called_before_it_is_timed(monkeypatch):
    called, call = [], jax.stages.Compiled.__call__

    def record(*arguments):
        called.append(jax.tree.map(np.asarray, arguments[1:]))
        return call(*arguments)

    monkeypatch.setattr(jax.stages.Compiled, "__call__", record)
    programs = Programs(Bigram, optimiser(), SCHEDULE, TASK)
    batch = in_parts(TASK.training(4, 0, 0), 4)
    params, state = programs.init(0)
    assert not programs.step.knows(batch)
    programs.step.warm_up(params, state, np.float32(1), batch)
    assert programs.step.knows(batch)
    assert len(called) == 1 and not any(leaf.any() for leaf in jax.tree.leaves(called))
    # The memory of the arguments was not reused.
    programs.step(params, state, np.float32(1), batch)


def test_seeds_differ_in_parameters_and_order(run, programs):
    one, two = Lines(), Lines()
    train(run, SCHEDULE, programs, TASK, one)
    other = dataclasses.replace(run, folder=run.folder.with_name("two"), seed=2)
    train(other, SCHEDULE, programs, TASK, two)
    assert one.losses != two.losses


@pytest.mark.parametrize("is_ragged", [False, True])
def test_accumulated_gradients_are_those_of_the_whole_batch(run, lines, is_ragged):
    task, whole = Counting(is_ragged=is_ragged), Lines()
    expected, _ = train(run, SCHEDULE, programs_of(task=task), task, whole)
    schedule = dataclasses.replace(SCHEDULE, accumulate=2)
    halves = programs_of(task=task, schedule=schedule)
    other = dataclasses.replace(run, folder=run.folder.with_name("halves"))
    params, _ = train(other, schedule, halves, task, lines)
    assert_close(params, expected)
    assert lines.losses == pytest.approx(whole.losses, rel=1e-6)


def test_the_loss_of_a_step_is_the_mean_over_its_targets():
    task = Counting(is_ragged=True)
    programs = programs_of(task=task)
    batch = task.training(4, 0, 0)
    params, state = programs.init(0)
    expected = losses(programs.model(params), batch).sum() / (batch.targets != NOTHING).sum()
    *_, loss = programs.step(params, state, np.float32(0.1), in_parts(batch, 4))
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def test_the_learning_rate_is_no_constant_of_the_program(run, programs):
    still = dataclasses.replace(run, learning_rate=0.0)
    params, _ = train(still, SCHEDULE, programs, TASK, Lines())
    assert_identical(params, programs.init(1)[0])


@pytest.mark.slow
def test_centroids_move_with_each_step_and_are_no_parameters():
    mixer = {"name": "routing", "num_clusters": 2, "cluster_size": 4}
    config = TransformerConfig(vocab_size=16, num_layers=1, features=8, num_heads=2, mixer=mixer)

    def build(rngs):
        return TransformerLM(config, rngs=rngs)

    routing = Programs(build, optimiser(), SCHEDULE, TASK)
    params, state = routing.init(1)
    before = jax.tree.map(jnp.copy, params["moved"])  # a step takes over the memory
    batch = TASK.training(4, 0, 0)
    after, *_ = routing.step(params, state, np.float32(0.1), in_parts(batch, 2))

    @jax.jit
    def centroids(model):
        model.update_centroids(*batch.inputs)
        return nnx.state(model, Centroids)

    expected = centroids(routing.model({**after, "moved": before}))
    (got,), (wanted,) = (jax.tree.leaves(of) for of in (after["moved"], expected))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert np.any(got != jax.tree.leaves(before)[0])
    assert routing.parameters == sum(x.size for x in jax.tree.leaves(after["trained"]))


def test_random_features_are_redrawn_by_step_and_alike_for_all_seeds(run):
    programs = programs_of(Projected, redraw=2)
    first, other = (programs.init(seed)[0] for seed in (0, 1))
    assert_identical(first["fixed"], other["fixed"])
    params, _ = train(run, SCHEDULE, programs, TASK, Lines())
    # The last of seven steps is the first after the third draw.
    assert_identical(params["fixed"], programs.draw(other, np.int32(3))["fixed"])
    draws = [first["fixed"], *(programs.draw(first, np.int32(n))["fixed"] for n in (1, 2, 3))]
    assert len({np.asarray(draw["features"]).tobytes() for draw in draws}) == 4
    assert_identical(programs.draw(first, np.int32(1))["trained"], first["trained"])

    never = dataclasses.replace(run, folder=run.folder.with_name("never"))
    params, _ = train(never, SCHEDULE, programs_of(Projected), TASK, Lines())
    assert_identical(params["fixed"], first["fixed"])


HALF = VARIANTS["float16"]


def test_float16_learns_as_float32_does(run, programs, lines):
    half = programs_of(**HALF)
    train(run, SCHEDULE, half, TASK, lines)
    other, exact = dataclasses.replace(run, folder=run.folder.with_name("exact")), Lines()
    train(other, SCHEDULE, programs, TASK, exact)
    assert lines.losses == pytest.approx(exact.losses, rel=2e-3)
    assert lines.losses != exact.losses
    params, (_, scale) = half.init(0)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    assert [int(x) for x in scale] == [loss_scale.START, 0]


def test_float16_skips_steps_whose_gradients_are_not_finite(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 2)
    half = Programs(HALF["build"], optimiser(), SCHEDULE, TASK, HALF["precision"])
    batch = in_parts(TASK.training(4, 0, 0), 4)

    def step(factor, good):
        params, (state, _) = half.init(0)
        before = jax.tree.map(np.asarray, (params, state))
        scale = (jnp.float32(factor), jnp.int32(good))
        params, (state, scale), loss = half.step(params, (state, scale), np.float32(0.1), batch)
        assert math.isfinite(loss)
        return before, (params, state), tuple(map(float, scale))

    before, after, scale = step(2.0**24, 1)  # gradients of logits overflow above 65504
    assert_identical(after, before)
    assert scale == (2.0**23, 0)
    before, after, scale = step(2.0**10, 0)
    assert jax.tree.leaves(after[0])[0].tolist() != jax.tree.leaves(before[0])[0].tolist()
    assert scale == (2.0**10, 1)
    _, larger, scale = step(2.0**10, 1)
    assert scale == (2.0**11, 0)
    assert_identical(larger, after)  # the factor of a step is of no consequence to its result


def test_programs_know_their_sizes(programs):
    assert programs.parameters == 16 * 8 + 8 * 16 + 16
    assert programs.state_bytes == LENGTH * 4
    assert programs_of(HALF["build"], precision="float16").state_bytes == LENGTH * 4
    bidirectional = type("Bidirectional", (Counting,), {"is_causal": False})()
    assert Programs(Bigram, optimiser(), SCHEDULE, bidirectional).state_bytes is None


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
