"""Contract of a task: examples by seed and step, held-out sets by name, and measures of a model."""

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

NOTHING = -1


class Batch(NamedTuple):
    """Examples for a model, as NumPy or JAX arrays.

    Attributes:
      inputs: arguments of the model, each with the examples along its first axis. A language model
        has `(tokens,)`, int32 `(B, T)`; a classifier `(tokens, lengths)`, with int32 `(B,)`, or
        `(tokens,)` if the task is not padded; a translator `(source, target, source_lengths,
        target_lengths)`.
      targets: int32, the classes to predict: `(B, T)`, `NOTHING` at positions that do not count;
        for a classifier `(B,)`.
    """

    inputs: tuple[Any, ...]
    targets: Any


class Scores(NamedTuple):
    """Scores of a model on a batch, as NumPy or JAX arrays in the shape of its targets.

    Attributes:
      nats: float, minus the log of the probability of the target; 0 at positions without a target.
      right: bool, whether the likeliest class is the target; False without a target.
    """

    nats: Any
    right: Any


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Task(abc.ABC):
    """Base of the tasks, which are frozen dataclasses of their sizes.

    Class attributes:
      reference: the publication that the task follows, and how the task differs from the
        publication.
      model: kind of model that learns the task.
      is_causal: whether positions may read later ones.
      headline: key of `measure` by which learning rates are chosen and tables are ordered.
      more_is_better: whether a larger headline is better.
      columns: keys of `measure` in the table, by heading.
      title: heading of reports; default the class's name.
      explained: sentences in reports that say what is measured.
      prompted: heading in reports of the "prompt" of `sample`, for tasks that have one.
      answered: verb in reports between the name of a mechanism and its "sample".
    """

    reference: ClassVar[str]
    model: ClassVar[Literal["language_model", "classifier", "translator"]] = "language_model"
    is_causal: ClassVar[bool] = True
    headline: ClassVar[str] = "accuracy"
    more_is_better: ClassVar[bool] = True
    columns: ClassVar[Mapping[str, str]] = {"accuracy": "accuracy"}
    title: ClassVar[str] = ""
    explained: ClassVar[str] = "Accuracy is the share of targets whose class is the likeliest."
    prompted: ClassVar[str | None] = None
    answered: ClassVar[str | None] = None

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of different input tokens."""

    @property
    def heading(self) -> str:
        """Heading of the headline in tables."""
        return next(heading for heading, key in self.columns.items() if key == self.headline)

    @property
    def num_classes(self) -> int:
        """Number of different targets."""
        return self.vocab_size

    @property
    def is_padded(self) -> bool:
        """True if examples of a batch may have different lengths."""
        return self.model != "language_model"

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Largest number of tokens in an example, of training and of all held-out sets."""

    @property
    def trained_length(self) -> int:
        """Largest number of tokens in training; windows and blocks of mechanisms follow it."""
        return self.length

    @abc.abstractmethod
    def training(self, size: int, seed: int, step: int) -> Batch:
        """Returns the `size` examples of a training step.

        They depend on the arguments alone, so that a run resumes bit for bit. Lengths may differ
        between steps, but should take few values: models are compiled for each.
        """

    @abc.abstractmethod
    def held_out(self) -> Mapping[str, Batch]:
        """Returns the held-out sets by name, always the same.

        The first is for validation: it is evaluated during training, and chooses the learning rate.
        The others are evaluated at the end, such as longer examples than those of the training.
        """

    def measure(self, name: str, batch: Batch, scores: Scores) -> dict[str, Any]:
        """Returns the measures of a model on the held-out set `name`; `headline` is one of them."""
        counts = batch.targets != NOTHING
        right = scores.right & counts
        measures = {
            "loss": float(scores.nats.sum(dtype=np.float64) / counts.sum()),
            "accuracy": float(right.sum() / counts.sum()),
        }
        if counts.ndim > 1:
            measures["exact"] = float((right | ~counts).all(-1).mean())
        return measures

    def settings(self) -> dict[str, Any]:
        """Returns what the examples depend on, as values for JSON: the fields, which are sizes."""
        return dataclasses.asdict(self)

    def sample(self, model: Any, seed: int) -> dict[str, Any]:
        """Returns further results of a trained model, such as a "sample" after a "prompt"."""
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BitsTask(Task):
    """Base of the tasks whose measure is the mean number of bits that a target takes."""

    headline: ClassVar[str] = "bits"
    more_is_better: ClassVar[bool] = False

    def measure(self, name: str, batch: Batch, scores: Scores) -> dict[str, Any]:
        measures = super().measure(name, batch, scores)
        return {**measures, "bits": measures["loss"] / math.log(2)}


def generator(*key: int) -> np.random.Generator:
    """Returns the random numbers of a task for a key, such as `(seed, step)`."""
    return np.random.default_rng(key)


def held_out_generator(index: int) -> np.random.Generator:
    """Returns the random numbers of a held-out set; no key `(seed, step)` has the same."""
    return generator(0, 0, 1 + index)


def require(condition: bool, message: str) -> None:
    """Raises `ValueError` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)
