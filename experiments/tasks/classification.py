"""Classification of token sequences: a fixed set of examples, read in a seeded order."""

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from experiments.harness.errors import UserError
from experiments.tasks import sources
from experiments.tasks.task import Batch, Task, generator, require


class Examples(NamedTuple):
    """Labelled token sequences, right-padded.

    Attributes:
      tokens: unsigned integers `(n, T)`.
      lengths: int32 `(n,)`; None if all sequences have T tokens.
      labels: int32 `(n,)`.
    """

    tokens: np.ndarray
    lengths: np.ndarray | None
    labels: np.ndarray

    def batch(self) -> Batch:
        lengths = () if self.lengths is None else (self.lengths,)
        return Batch((self.tokens.astype(np.int32), *lengths), self.labels)

    def take(self, at: np.ndarray | slice) -> "Examples":
        """Returns the examples at these indices."""
        lengths = None if self.lengths is None else self.lengths[at]
        return Examples(self.tokens[at], lengths, self.labels[at])


@functools.lru_cache(maxsize=8)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    """Returns the order of the training examples in an epoch."""
    return generator(seed, epoch).permutation(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """Base of the tasks that classify sequences; models may read a sequence as a whole."""

    model: ClassVar = "classifier"
    is_causal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.length >= 1, f"length must be at least 1, got {self.length}")

    @abc.abstractmethod
    def load(self) -> Mapping[str, Examples]:
        """Returns the sets "train", "validation" and, if there is one, "test"; always the same.

        Raises:
          UserError: data are missing or in the wrong form.
        """

    @functools.cached_property
    def sets(self) -> Mapping[str, Examples]:
        """The result of `load`, read once.

        Raises:
          UserError: a set is empty or has other classes than the task, or an error of `load`.
        """
        sets = self.load()
        for name, examples in sets.items():
            if not len(examples.labels):
                raise UserError(
                    f"the {name} set of this task is empty; it needs more documents, or a smaller "
                    "length"
                )
            classes = set(np.unique(examples.labels).tolist()) - set(range(self.num_classes))
            if classes:
                raise UserError(
                    f"the {name} set of this task has the class {min(classes)}, and classes must "
                    f"be 0 to {self.num_classes - 1}; the data have another form, or are damaged"
                )
        return sets

    def settings(self) -> dict[str, Any]:
        """As in `Task`; data at a path also have a digest, because files may change."""
        found = super().settings()
        if not found.get("path"):
            return found
        arrays = [array for part in self.sets.values() for array in part if array is not None]
        return found | sources.digest(arrays)

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
        order = _order(seed, epoch, count)
        return examples.take(order[at * size : (at + 1) * size]).batch()

    def held_out(self) -> Mapping[str, Batch]:
        return self._held_out

    @functools.cached_property
    def _held_out(self) -> Mapping[str, Batch]:
        return {name: part.batch() for name, part in self.sets.items() if name != "train"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated(Classification):
    """Base of the classification tasks whose examples are drawn at random.

    Attributes:
      train: number of training examples.
      held: number of validation examples, and of test examples.
    """

    train: int
    held: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(min(self.train, self.held) >= 1, "train and held must be at least 1")

    @property
    def counts(self) -> dict[str, int]:
        """Number of examples of each set."""
        return {"train": self.train, "validation": self.held, "test": self.held}


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
    lengths = [part.lengths for part in parts if part.lengths is not None]
    return Examples(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate(lengths) if lengths else None,
        np.concatenate([part.labels for part in parts]),
    )
