"""Tasks whose examples are drawn at random, not read from files."""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from experiments.tasks.task import Batch, Task, generator, held_out_generator, require

MIN_EXAMPLES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic(Task):
    """Base of the tasks whose examples are drawn at random.

    The sizes of an example are numbers, the first of which is its number of tokens.

    Attributes:
      vocabulary: number of different tokens that carry content.
      trained: sizes of training examples. Each step draws one of these sizes; a size that is listed
        more often is drawn more often.
      tested: sizes of the held-out sets, the first for validation; default `trained`. A size that
        is listed more often has one set.
      held_out_tokens: number of tokens in a held-out set, if that gives at least 16 examples.
    """

    vocabulary: int
    trained: tuple[tuple[int, ...], ...]
    tested: tuple[tuple[int, ...], ...] = ()
    held_out_tokens: int = 2**18

    held_out_name: ClassVar[str] = "{} tokens"

    def __post_init__(self):
        require(bool(self.trained), "trained must have at least one size")
        require(self.held_out_tokens >= 1, "held_out_tokens must be at least 1")
        for sizes in self.trained + self.tested:
            self.check(*sizes)

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    @property
    def length(self) -> int:
        return max(length for length, *_ in self.trained + self.tested)

    @property
    def trained_length(self) -> int:
        return max(length for length, *_ in self.trained)

    @abc.abstractmethod
    def check(self, *sizes: int) -> None:
        """Raises `ValueError` if there are no examples of the given sizes."""

    @abc.abstractmethod
    def draw(self, rng: np.random.Generator, size: int, *sizes: int) -> Batch:
        """Returns `size` examples of the given sizes."""

    def draw_training(self, rng: np.random.Generator, size: int, *sizes: int) -> Batch:
        """Returns training examples, where they differ from held-out examples."""
        return self.draw(rng, size, *sizes)

    def training(self, size: int, seed: int, step: int) -> Batch:
        rng = generator(seed, step)
        return self.draw_training(rng, size, *self.trained[rng.integers(len(self.trained))])

    def held_out(self) -> Mapping[str, Batch]:
        return self._held_out

    @functools.cached_property
    def _held_out(self) -> Mapping[str, Batch]:
        return {
            self.held_out_name.format(*sizes): self.draw(
                held_out_generator(index),
                max(MIN_EXAMPLES, self.held_out_tokens // sizes[0]),
                *sizes,
            )
            for index, sizes in enumerate(dict.fromkeys(self.tested or self.trained))
        }
