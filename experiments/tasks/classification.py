"""Classification of token sequences: a fixed set of examples, read in a seeded order."""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from experiments.harness.errors import UserError
from experiments.tasks.task import Batch, Task, generator


class Examples(NamedTuple):
    """Labelled token sequences, right-padded.

    Attributes:
      tokens: unsigned integers `(n, T)`.
      lengths: int32 `(n,)`.
      labels: int32 `(n,)`.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray

    def batch(self) -> Batch:
        return Batch((self.tokens.astype(np.int32), self.lengths), self.labels)

    def take(self, at: np.ndarray | slice) -> "Examples":
        """Returns the examples at these indices."""
        return Examples(*(array[at] for array in self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Base of the tasks that classify sequences; models may read a sequence as a whole."""

    model: ClassVar = "classifier"
    is_causal: ClassVar[bool] = False

    @abc.abstractmethod
    def load(self) -> Mapping[str, Examples]:
        """Returns the sets "train", "validation" and, if there is one, "test"; always the same.

        Raises:
          UserError: data are missing or in the wrong form.
        """

    @functools.cached_property
    def sets(self) -> Mapping[str, Examples]:
        """The result of `load`, read once."""
        return self.load()

    def training(self, size: int, seed: int, step: int) -> Batch:
        """Returns a batch of an epoch, which is shuffled anew; the last few examples are left out.

        Raises:
          UserError: there are fewer training examples than `size`.
        """
        examples = self.sets["train"]
        count = len(examples.labels)
        if size > count:
            raise UserError(
                f"a batch of {size} needs more than the {count} training examples of this task; "
                "choose a smaller batch"
            )
        epoch, at = divmod(step, count // size)
        order = generator(seed, epoch).permutation(count)
        return examples.take(order[at * size : (at + 1) * size]).batch()

    def held_out(self) -> Mapping[str, Batch]:
        return {name: part.batch() for name, part in self.sets.items() if name != "train"}


def split(examples: Examples, sizes: Mapping[str, int]) -> dict[str, Examples]:
    """Divides examples in their order into named sets of these sizes."""
    ends = np.cumsum(list(sizes.values()))
    return {
        name: examples.take(slice(end - size, end))
        for (name, size), end in zip(sizes.items(), ends, strict=True)
    }


def padded(sequences: list[np.ndarray], labels: np.ndarray, length: int) -> Examples:
    """Returns sequences as examples of `length` tokens, without the tokens after the last."""
    kept = [sequence[:length] for sequence in sequences]
    dtype = kept[0].dtype if kept else np.uint8
    tokens = np.zeros((len(kept), length), dtype)
    for row, sequence in zip(tokens, kept, strict=True):
        row[: len(sequence)] = sequence
    lengths = np.array([len(sequence) for sequence in kept], np.int32)
    return Examples(tokens, lengths, np.asarray(labels, np.int32))


def joined(parts: Sequence[Examples]) -> Examples:
    """Returns the examples of all parts in order."""
    return Examples(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
