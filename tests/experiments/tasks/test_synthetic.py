"""Statements about all tasks whose examples are drawn at random."""

import itertools

import numpy as np
import pytest

from experiments.tasks import copying, mad, recall
from experiments.tasks.task import NOTHING

TASKS = {
    f"{module.__name__.rpartition('.')[2]}: {name}, {preset}": task
    for module in (recall, copying, mad)
    for name, presets in module.TASKS.items()
    for preset, task in presets.items()
}
SMALL = {name: task for name, task in TASKS.items() if name.endswith("small")}
each = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
each_small = pytest.mark.parametrize("task", SMALL.values(), ids=SMALL)


def same(left, right):
    (left_tokens,), left_targets = left
    (right_tokens,), right_targets = right
    return np.array_equal(left_tokens, right_tokens) and np.array_equal(
        left_targets, right_targets
    )


def examples(batch):
    return set(map(bytes, batch.inputs[0]))


def test_each_task_has_small_and_published_sizes():
    assert len(TASKS) == 22
    for module in (recall, copying, mad):
        assert all(list(presets) == ["small", "published"] for presets in module.TASKS.values())


@each
def test_examples_are_tokens_and_classes_of_the_vocabulary(task):
    for step in range(3):
        (tokens,), targets = task.training(7, 0, step)
        assert tokens.dtype == targets.dtype == np.int32
        assert tokens.shape == targets.shape and len(tokens) == 7
        assert tokens.shape[1] <= task.length
        assert 0 <= tokens.min() and tokens.max() < task.vocab_size
        counts = targets != NOTHING
        assert counts.any(1).all()
        assert 0 <= targets[counts].min() and targets.max() < task.num_classes


@each
def test_a_training_step_depends_on_its_arguments_alone(task):
    first = task.training(8, 3, 5)
    assert same(first, task.training(8, 3, 5))
    assert not same(first, task.training(8, 4, 5))
    assert not same(first, task.training(8, 3, 6))


@each_small
def test_held_out_sets_are_always_the_same_and_name_their_sizes(task):
    first, second = task.held_out(), task.held_out()
    assert list(first) == list(second)
    for name, batch in first.items():
        assert same(batch, second[name])
        assert name.startswith(f"{batch.targets.shape[1]} tokens")
        assert len(batch.targets) >= 16
        assert batch.targets.size == pytest.approx(task.held_out_tokens, rel=0.01)
    assert task.length == max(
        array.shape[1] for array in [batch.targets for batch in first.values()]
    )


@each_small
def test_no_training_step_has_the_random_numbers_of_a_held_out_set(task):
    sets = task.held_out()
    steps = [task.training(64, seed, step) for seed in range(3) for step in range(3)]
    if "Tree" not in type(task).__name__:  # Its short sentences occur again by chance.
        for left, right in itertools.combinations([*sets.values(), *steps], 2):
            assert not examples(left) & examples(right)
    # With the same number of examples, the first step would equal a set of its random numbers.
    for batch in sets.values():
        size = len(batch.targets)
        assert not any(same(batch, task.training(size, seed, step)) for seed, step in [(0, 0), (0, 1)])


@each_small
def test_a_target_is_not_the_token_at_its_position(task):
    for (tokens,), targets in task.held_out().values():
        counts = targets != NOTHING
        # By chance alone: 1 / vocabulary, except for the shared words of a grammar.
        assert (tokens == targets)[counts].mean() < 0.1


def test_sizes_that_are_listed_more_often_are_drawn_more_often():
    task = recall.TASKS["multi-query"]["published"]
    lengths = [task.training(1, 0, step).targets.shape[1] for step in range(900)]
    share = {length: lengths.count(length) / 900 for length in set(lengths)}
    # Three standard deviations are at most 0.05.
    assert share == pytest.approx({64: 5 / 9, 128: 1 / 9, 256: 3 / 9}, abs=0.05)


def test_measures_are_of_the_positions_that_count():
    task = copying.TASKS["selective copying"]["small"]
    batch = task.held_out()["128 tokens"]
    right = np.ones(batch.targets.shape, bool)
    right[0, -1] = False
    counts = batch.targets != NOTHING
    scores = np.where(counts, 2.0, 0.0), right
    measures = task.measure("128 tokens", batch, type("Scores", (), dict(zip(("nats", "right"), scores))))
    assert measures["loss"] == 2
    assert measures["accuracy"] == pytest.approx(1 - 1 / (8 * 512))
    assert measures["exact"] == pytest.approx(1 - 1 / 512)
