"""Training loop, on models without attention, because the loop does not depend on attention."""

import copy
import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn.nn import Centroids, TransformerConfig, TransformerLM
from experiments.harness import loss_scale, metrics, training
from experiments.harness.programs import ByShape, Programs, in_parts
from experiments.harness.training import Run, held_out, train
from experiments.tasks.task import NOTHING, Batch
from tests.experiments.bigrams import (
    LENGTH,
    SCHEDULE,
    TASK,
    TWO_LENGTHS,
    VARIANTS,
    Bigram,
    Projected,
    assert_identical,
    optimiser,
    programs_of,
)
from tests.experiments.conftest import Lines
from tests.experiments.counting import Counting


@pytest.fixture(scope="module")
def programs():
    return programs_of()


@pytest.fixture
def run(tmp_path):
    return Run("bigram", tmp_path / "run", "identity", seed=1, learning_rate=0.01)


def assert_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), left, right)


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
