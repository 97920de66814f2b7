"""Order of the examples of classification tasks."""

import dataclasses

import numpy as np
import pytest

from experiments.harness.errors import UserError
from experiments.tasks.classification import Classification, Examples, padded, split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers(Classification):
    """Ten training examples and three held-out examples, each its own class."""

    vocab_size = 13
    length = 1

    def load(self):
        numbers = np.arange(13, dtype=np.uint8)
        examples = Examples(numbers[:, None], np.ones(13, np.int32), numbers.astype(np.int32))
        return split(examples, {"train": 10, "validation": 3})


def test_an_epoch_reads_each_example_once():
    task = Numbers()
    epochs = [[task.training(5, 0, step).targets for step in (n, n + 1)] for n in (0, 2)]
    for epoch in epochs:
        assert sorted(np.concatenate(epoch)) == list(range(10))
    assert np.any(epochs[0][0] != epochs[1][0])


def test_batches_depend_on_seed_and_step_alone():
    first, again = Numbers().training(4, 3, 7), Numbers().training(4, 3, 7)
    np.testing.assert_array_equal(first.targets, again.targets)
    assert (Numbers().training(4, 4, 7).targets != first.targets).any()
    assert (Numbers().training(4, 3, 8).targets != first.targets).any()


def test_a_batch_is_for_a_classifier():
    (tokens, lengths), targets = Numbers().training(4, 0, 0)
    assert tokens.shape == (4, 1)
    assert lengths.shape == targets.shape == (4,)
    assert {tokens.dtype, lengths.dtype, targets.dtype} == {np.dtype(np.int32)}


def test_training_examples_are_not_held_out():
    assert list(Numbers().held_out()) == ["validation"]
    assert Numbers().held_out()["validation"].targets.tolist() == [10, 11, 12]


def test_held_out_sets_are_made_once():
    task = Numbers()
    assert task.held_out()["validation"] is task.held_out()["validation"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unvalidated(Numbers):
    """Ten training examples and no held-out examples."""

    def load(self):
        return super().load() | {"validation": super().load()["validation"].take(slice(0))}


def test_an_empty_set_is_one_sentence():
    with pytest.raises(UserError, match="the validation set of this task is empty; it needs more"):
        Unvalidated().training(4, 0, 0)


def test_another_class_is_one_sentence(monkeypatch):
    monkeypatch.setattr(Numbers, "num_classes", 12)
    sentence = "validation set of this task has the class 12, and classes must be 0 to 11; the data"
    with pytest.raises(UserError, match=sentence):
        Numbers().training(4, 0, 0)


def test_a_batch_larger_than_the_set():
    with pytest.raises(UserError, match="a batch of 11 needs more than the 10 training examples"):
        Numbers().training(11, 0, 0)


def test_padding_and_cutting():
    examples = padded([np.array([5, 6, 7], np.uint8), np.array([8], np.uint8)], [1, 0], 2)
    assert examples.tokens.tolist() == [[5, 6], [8, 0]]
    assert examples.lengths.tolist() == [2, 1]
    assert examples.labels.tolist() == [1, 0]
