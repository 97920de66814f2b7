"""Statements about all tasks whose examples are drawn at random."""

import dataclasses
import itertools

import numpy as np
import pytest

from experiments.tasks import copying, mad, mixed_range, recall
from experiments.tasks.task import NOTHING

TASKS = {
    f"{module.__name__.rpartition('.')[2]}: {name}, {preset}": task
    for module in (recall, copying, mad, mixed_range)
    for name, presets in module.TASKS.items()
    for preset, task in presets.items()
}
SMALL = {name: task for name, task in TASKS.items() if name.endswith("small")}
each = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
each_small = pytest.mark.parametrize("task", SMALL.values(), ids=SMALL)


def same(left, right):
    (left_tokens,), left_targets = left
    (right_tokens,), right_targets = right
    return np.array_equal(left_tokens, right_tokens) and np.array_equal(left_targets, right_targets)


def examples(batch):
    return set(map(bytes, batch.inputs[0]))


def test_each_task_has_small_and_published_sizes():
    assert len(TASKS) == 24
    for module in (recall, copying, mad, mixed_range):
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
        assert not any(
            same(batch, task.training(size, seed, step)) for seed, step in [(0, 0), (0, 1)]
        )


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


def test_names_of_tasks_are_different():
    names = recall.TASKS | copying.TASKS | mad.TASKS | mixed_range.TASKS
    assert 2 * len(names) == len(TASKS)


@pytest.mark.parametrize(
    "task, sizes, message",
    [
        ("multi-query", {"vocabulary": 32}, "16 pairs need a vocabulary of 34"),
        ("multi-query", {"trained": ((64, 17),)}, "an even length of 68 or more, got 64"),
        ("multi-query", {"fillers": 0}, "fillers must be 1 to 64"),
        ("multi-query", {"trained": ()}, "at least one size"),
        ("multi-query", {"held_out_tokens": 0}, "held_out_tokens"),
        ("associative", {"vocabulary": 14}, "at most the vocabulary and 3"),
        ("associative", {"trained": ((36,),)}, "odd"),
        ("tree", {"trained": ((5,),)}, "at least 6"),
        ("tree", {"depth": 0}, "depth must be"),
        ("tree", {"depth": 1, "width": 1}, "no sentences of 3 words"),
        ("selective-copying", {"copied": 33}, "needs a length of 66"),
        ("selective-copying", {"copied": 0}, "at least 1"),
        ("selective-copying", {"vocabulary": 2}, "at least 3"),
        ("induction", {"trained": ((2,),)}, "at least 3"),
        ("induction", {"vocabulary": 1}, "at least 2"),
        ("mad-recall", {"vocabulary": 1}, "leaves 1 tokens"),
        ("mad-recall", {"motif": 0}, "motif"),
        ("mad-recall", {"noise": 0.5}, "needs a noise_vocabulary"),
        ("mad-fuzzy-recall", {"trained": ((6,),)}, "8 or more"),
        ("mad-noisy-recall", {"noise": 1.0}, "below 1"),
        ("mad-selective-copying", {"copied": 32}, "needs a length of 65"),
        ("mad-compression", {"trained": ((33,),)}, "even"),
        ("mad-compression", {"vocabulary": 1}, "at least 2"),
        ("mad-memorisation", {"trained": ((31,),)}, "even"),
        ("mad-memorisation", {"vocabulary": 2}, "at least 3"),
    ],
)
def test_sizes_without_examples_are_refused(task, sizes, message):
    presets = (recall.TASKS | copying.TASKS | mad.TASKS)[task]
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(presets["small"], **sizes)


@pytest.mark.parametrize(
    "task, sizes",
    [
        ("multi-query", {"vocabulary": 10, "trained": ((16, 4),), "tested": ()}),
        ("associative", {"vocabulary": 2, "trained": ((5,),)}),
        ("tree", {"trained": ((6,),)}),
        ("selective-copying", {"vocabulary": 3, "copied": 32}),
        ("induction", {"vocabulary": 2, "trained": ((3,),), "tested": ()}),
        ("mad-recall", {"vocabulary": 2, "trained": ((4,),)}),
        ("mad-fuzzy-recall", {"vocabulary": 5, "trained": ((8,),)}),
        ("mad-noisy-recall", {"noise": 0.99, "trained": ((4,),)}),
        ("mad-selective-copying", {"vocabulary": 3, "copied": 31}),
        ("mad-compression", {"vocabulary": 2, "trained": ((4,),)}),
        ("mad-memorisation", {"vocabulary": 3, "trained": ((2,),)}),
    ],
)
def test_smallest_sizes_have_examples(task, sizes):
    presets = (recall.TASKS | copying.TASKS | mad.TASKS)[task]
    task = dataclasses.replace(presets["small"], **sizes)
    (tokens,), targets = task.training(50, 0, 0)
    assert 0 <= tokens.min() and max(tokens.max(), targets.max()) < task.vocab_size
    assert all((batch.targets != NOTHING).any(1).all() for batch in task.held_out().values())


def test_sizes_that_are_listed_twice_have_one_held_out_set():
    task = recall.TASKS["associative"]["small"]
    twice = dataclasses.replace(task, trained=((19,), (19,), (17,)))
    once = dataclasses.replace(task, trained=((19,), (17,)))
    assert list(twice.held_out()) == list(once.held_out())
    assert all(
        same(a, b) for a, b in zip(*(t.held_out().values() for t in (twice, once)), strict=True)
    )
