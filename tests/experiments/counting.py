"""Tasks that small models learn, and their options."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from experiments.harness.task_options import TaskOptions, Tasks
from experiments.tasks.task import NOTHING, Batch, Task, generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(Task):
    """Prediction of the next number, modulo `numbers`.

    Attributes:
      numbers: size of the vocabulary.
      lengths: lengths of the examples of a training step, in turns.
      is_ragged: whether the number of targets differs between examples.
    """

    numbers: int = 16
    lengths: tuple[int, ...] = (12,)
    is_ragged: bool = False

    reference: ClassVar[str] = "none"
    headline: ClassVar[str] = "loss"
    more_is_better: ClassVar[bool] = False
    columns: ClassVar[Mapping[str, str]] = {"loss": "loss", "accuracy": "accuracy"}

    def __post_init__(self):
        if self.numbers < 2:
            raise ValueError(f"numbers must be at least 2, got {self.numbers}")

    @property
    def vocab_size(self) -> int:
        return self.numbers

    @property
    def length(self) -> int:
        return max(self.lengths) + 4

    def training(self, size, seed, step):
        return self._examples(size, self.lengths[step % len(self.lengths)], (seed, step))

    def held_out(self):
        return {
            "validation": self._examples(6, max(self.lengths), (0,)),
            "longer": self._examples(3, self.length, (1,)),
        }

    def _examples(self, size, length, key):
        rng = generator(*key)
        tokens = (rng.integers(self.numbers, size=(size, 1)) + np.arange(length + 1)) % self.numbers
        tokens = tokens.astype(np.int32)
        counts = rng.integers(1, length, size=(size, 1)) if self.is_ragged else length
        targets = np.where(np.arange(length) < counts, tokens[:, 1:], NOTHING)
        return Batch((tokens[:, :-1],), targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Last(Counting):
    """Classification of right-padded examples by whether the last number is odd."""

    model: ClassVar[str] = "classifier"
    is_causal: ClassVar[bool] = False
    headline: ClassVar[str] = "accuracy"
    more_is_better: ClassVar[bool] = True

    @property
    def num_classes(self) -> int:
        return 2

    def _examples(self, size, length, key):
        tokens = super()._examples(size, length, key).inputs[0]
        lengths = generator(*key, 1).integers(1, length, size=size, dtype=np.int32)
        return Batch((tokens, lengths), tokens[np.arange(size), lengths - 1] % 2)


@dataclasses.dataclass(frozen=True)
class Options(TaskOptions):
    """Trains a small model for each mechanism on numbers."""

    tasks: ClassVar[Tasks] = {
        "counting": {"small": Counting(), "published": Counting(numbers=64)},
        "last": {"small": Last(), "published": Last(numbers=64)},
    }
