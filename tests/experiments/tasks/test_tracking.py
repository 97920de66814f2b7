"""State-tracking tasks: seeds, lengths, padding and ranges of their examples."""

import dataclasses

import numpy as np
import pytest

from experiments.tasks import arithmetic, chess_games, parity, permutations
from experiments.tasks.task import NOTHING, Batch, Scores
from experiments.tasks.tracking import FinalAnswer

TASKS = {**parity.TASKS, **arithmetic.TASKS, **permutations.TASKS, **chess_games.TASKS}
ANSWERS = [name for name, sizes in TASKS.items() if isinstance(sizes["small"], FinalAnswer)]


def equal(a: Batch, b: Batch) -> bool:
    return np.array_equal(a.inputs[0], b.inputs[0]) and np.array_equal(a.targets, b.targets)


@pytest.fixture(params=TASKS)
def task(request):
    """The small sizes of a task, with few held-out examples."""
    return dataclasses.replace(TASKS[request.param]["small"], held_out_size=32)


def test_examples_depend_on_seed_and_step_alone(task):
    batch = task.training(8, seed=3, step=5)
    assert equal(batch, task.training(8, seed=3, step=5))
    assert not equal(batch, task.training(8, seed=3, step=6))
    assert not equal(batch, task.training(8, seed=4, step=5))


def test_held_out_sets_are_always_the_same_and_no_batches_of_training(task):
    held_out = task.held_out()
    assert all(equal(batch, task.held_out()[name]) for name, batch in held_out.items())
    validation = next(iter(held_out.values()))
    first_steps = [task.training(32, 0, step) for step in range(5)]
    assert not any(equal(validation, batch) for batch in first_steps)


def test_training_is_short_and_tests_are_long(task):
    batches = [task.training(8, 0, 0), *task.held_out().values()]
    widths = [batch.inputs[0].shape[1] for batch in batches]
    longest = [longest for _, longest in (task.trained, task.trained, *task.tested)]
    assert widths == longest and max(widths) == task.length
    assert list(task.held_out())[-1].endswith(f"{task.length} tokens")


@pytest.mark.parametrize("sizes", ["small", "published"])
@pytest.mark.parametrize("name", TASKS)
def test_tokens_and_targets_are_in_their_ranges(name, sizes):
    task = dataclasses.replace(TASKS[name][sizes], held_out_size=4)
    for batch in (task.training(8, 0, 0), *task.held_out().values()):
        (inputs,), targets = batch
        assert inputs.dtype == targets.dtype == np.int32 and inputs.shape == targets.shape
        assert 0 <= inputs.min() and inputs.max() < task.vocab_size
        counts = targets != NOTHING
        assert targets[counts].min() >= 0 and targets[counts].max() < task.num_classes
        assert counts.any(1).all()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"trained": (0, 4)}, "from [12] on, got"),
        ({"tested": ((9, 8),)}, "pairs"),
        ({"trained": (4, 5, 6)}, "pairs"),
        ({"tested": ((70, 90), (70, 90))}, "tested must repeat neither trained nor itself"),
        ({"trained": (4, 90), "tested": ((4, 90),)}, "tested must repeat neither trained nor"),
        ({"held_out_size": 0}, "held_out_size must be at least 1, got 0"),
    ],
)
def test_impossible_sizes_are_refused(task, sizes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(task, **sizes)


@pytest.mark.parametrize("name", ANSWERS)
def test_lengths_are_uniform_and_the_answer_is_at_the_end(name):
    task = dataclasses.replace(TASKS[name]["published"], held_out_size=2000)
    for batch, (shortest, longest) in zip(
        (task.training(2000, 0, 0), *task.held_out().values()),
        (task.trained, task.trained, *task.tested),
        strict=True,
    ):
        is_padding = batch.inputs[0] == task.vocab_size - 1
        lengths = (~is_padding).sum(1)
        assert (np.diff(is_padding.astype(int)) >= 0).all()
        rows, answers = np.nonzero(batch.targets != NOTHING)
        np.testing.assert_array_equal(rows, np.arange(2000))
        np.testing.assert_array_equal(answers, lengths - 1)
        assert lengths.min() == shortest and lengths.max() == longest
        assert abs(lengths.mean() - (shortest + longest) / 2) < (longest - shortest) / 40


@pytest.mark.parametrize("name", ANSWERS)
def test_intermediate_results_are_more_targets_of_the_same_examples(name):
    small = TASKS[name]["small"]
    more, less = (
        dataclasses.replace(small, intermediate=intermediate).training(64, 0, 0)
        for intermediate in (True, False)
    )
    np.testing.assert_array_equal(more.inputs[0], less.inputs[0])
    counts = less.targets != NOTHING
    np.testing.assert_array_equal(more.targets[counts], less.targets[counts])
    assert (more.targets != NOTHING).sum() > 3 * counts.sum()


def test_scaled_accuracy_is_zero_for_random_guesses_and_one_at_most(task):
    name, batch = next(iter(task.held_out().items()))
    counts = batch.targets != NOTHING
    guessed = np.random.default_rng(0).random((500, *counts.shape)) < 1 / task.num_classes

    def scaled(right: np.ndarray) -> float:
        return task.measure(name, batch, Scores(np.zeros(counts.shape), right))["scaled_accuracy"]

    assert abs(np.mean([scaled(right) for right in guessed])) < 0.03
    assert scaled(counts) == 1
