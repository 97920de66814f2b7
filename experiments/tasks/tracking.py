"""State tracking: sequences to read to the end, short in training and longer in the tests."""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from experiments.tasks.task import (
    NOTHING,
    Batch,
    Scores,
    Task,
    generator,
    held_out_generator,
    require,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateTracking(Task):
    """Base of the state-tracking tasks, which train on short sequences and test on long sequences.

    Lengths count the input tokens. The lengths of a batch are drawn uniformly between a shortest
    and a longest length, and all examples of the batch are padded to the longest length. Short
    sequences occur in training and in validation, because few of them exist; test sets have longer
    sequences.

    Attributes:
      trained: shortest and longest length of training and validation.
      tested: shortest and longest length of each test set.
      held_out_size: number of examples per held-out set.

    Class attributes:
      fewest: smallest length that a sequence may have.
    """

    columns: ClassVar[Mapping[str, str]] = {
        "accuracy": "accuracy",
        "scaled accuracy": "scaled_accuracy",
    }
    explained: ClassVar[str] = (
        f"{Task.explained} Scaled accuracy is 0 for random guesses and 1 for right answers."
    )
    fewest: ClassVar[int] = 1
    trained: tuple[int, int]
    tested: tuple[tuple[int, int], ...]
    held_out_size: int

    def __post_init__(self) -> None:
        every = (self.trained, *self.tested)
        for lengths in every:
            require(
                len(lengths) == 2 and self.fewest <= lengths[0] <= lengths[1],
                "trained and tested must be pairs (shortest, longest) of lengths from "
                f"{self.fewest} on, got {lengths}",
            )
        require(
            len(set(every)) == len(every),
            f"tested must repeat neither trained nor itself, got {self.tested}",
        )
        require(
            self.held_out_size >= 1, f"held_out_size must be at least 1, got {self.held_out_size}"
        )

    @property
    def length(self) -> int:
        return max(longest for _, longest in (self.trained, *self.tested))

    @property
    def trained_length(self) -> int:
        return self.trained[1]

    def training(self, size: int, seed: int, step: int) -> Batch:
        return self._drawn(generator(seed, step), size, self.trained)

    def held_out(self) -> Mapping[str, Batch]:
        return self._held_out

    @functools.cached_property
    def _held_out(self) -> Mapping[str, Batch]:
        return {
            _name(*lengths): self._drawn(held_out_generator(index), self.held_out_size, lengths)
            for index, lengths in enumerate((self.trained, *self.tested))
        }

    def measure(self, name: str, batch: Batch, scores: Scores) -> dict[str, Any]:
        measures, chance = super().measure(name, batch, scores), 1 / self.num_classes
        return {**measures, "scaled_accuracy": (measures["accuracy"] - chance) / (1 - chance)}

    def _drawn(self, rng: np.random.Generator, size: int, lengths: tuple[int, int]) -> Batch:
        shortest, longest = lengths
        return self._examples(rng, rng.integers(shortest, longest + 1, size), longest)

    @abc.abstractmethod
    def _examples(self, rng: np.random.Generator, lengths: np.ndarray, longest: int) -> Batch:
        """Returns one example of each length `(B,)`, padded to the longest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalAnswer(StateTracking):
    """Base of the state-tracking tasks whose held-out examples have one target, at the end.

    Attributes:
      intermediate: training examples also have targets at intermediate results. The papers train
        without such targets, which takes many more steps.
    """

    intermediate: bool

    def training(self, size: int, seed: int, step: int) -> Batch:
        batch = super().training(size, seed, step)
        return batch if self.intermediate else _last_target(batch)

    def held_out(self) -> Mapping[str, Batch]:
        return {name: _last_target(batch) for name, batch in super().held_out().items()}


def padded(inputs: np.ndarray, targets: np.ndarray, lengths: np.ndarray, padding: int) -> Batch:
    """Returns examples `(B, T)` of these lengths `(B,)`, with padding after the last token."""
    is_token = np.arange(inputs.shape[1]) < lengths[:, None]
    inputs, targets = np.where(is_token, inputs, padding), np.where(is_token, targets, NOTHING)
    return Batch((inputs.astype(np.int32),), targets.astype(np.int32))


def _last_target(batch: Batch) -> Batch:
    positions = np.arange(batch.targets.shape[1])
    last = np.where(batch.targets != NOTHING, positions, -1).max(1, keepdims=True)
    return Batch(batch.inputs, np.where(positions == last, batch.targets, np.int32(NOTHING)))


def _name(shortest: int, longest: int) -> str:
    return f"{longest} tokens" if shortest == longest else f"{shortest} to {longest} tokens"
