"""Short and long range in one sequence: few tokens ask for what stands far back."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from effattn.analysis import cost
from effattn.nn import MixtureOfMechanisms, SelfAttention
from experiments.tasks.synthetic import Synthetic
from experiments.tasks.task import NOTHING, Batch, Scores, Task, require


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedRange(Synthetic):
    """Most targets follow from two neighbouring tokens; the others are values far back.

    A sequence begins with tokens that each stand for a pair of a key and a value. Random symbols
    follow, whose targets are the sum of the token and the token before it, modulo the number of
    symbols. From a distance on, a share of the symbols is replaced by keys of the pairs, whose
    targets are their values. With 10 symbols, the keys a and b, and `.` for a position without a
    target:

        tokens   a3 b8 5 2 9 4 b 1 a
        targets  .  .  . 7 1 3 8 2 3

    A key counts as the number 10, 11, ... in the sum of the next token (here 11 + 1 for b).

    Attributes:
      vocabulary: number of symbols plus number of keys; the symbols are also the values.
      keys: number of different keys.
      pairs: number of pairs at the start.
      distance: number of symbols between the pairs and the first question.
      share: share of questions among the tokens from the first question on.
    """

    keys: int
    pairs: int
    distance: int
    share: float

    reference: ClassVar[str] = (
        "A task of our own: the questions are those of associative recall (Arora et al. 2023, "
        "Zoology, arXiv 2312.04927), the other targets a sum of two neighbours."
    )
    title: ClassVar[str] = "Short and long range in one sequence"
    columns: ClassVar[Mapping[str, str]] = {
        "accuracy": "accuracy",
        "near targets": "near",
        "far targets": "far",
        "near tokens in exact attention": "near_exact_share",
        "far tokens in exact attention": "far_exact_share",
        "thousand operations per token": "operations",
    }
    explained: ClassVar[str] = (
        f"{Task.explained} Far targets are those of the questions. Tokens in exact attention are "
        "the share of such tokens whose queries choose exact attention, as a mean over the layers. "
        "Operations are those of a call on one sequence, as counted in its program."
    )

    @property
    def symbols(self) -> int:
        """Number of symbols."""
        return self.vocabulary - self.keys

    @property
    def vocab_size(self) -> int:
        return self.vocabulary + self.keys * self.symbols

    def check(self, *sizes: int) -> None:
        (length,) = sizes
        require(1 <= self.pairs <= self.keys, f"pairs must be from 1 to keys={self.keys}")
        require(self.symbols >= 2, f"vocabulary must be at least {self.keys + 2}, with 2 symbols")
        require(self.distance >= 0, "distance must be at least 0")
        require(0 < self.share <= 1, "share must be above 0 and at most 1")
        require(
            self._questions(length) >= 1,
            f"{self.pairs} pairs, a distance of {self.distance} and a share of {self.share} leave "
            f"no question in {length} tokens",
        )
        require(
            self._questions(length) < length - self.pairs - 1,
            f"{self.pairs} pairs, a distance of {self.distance} and a share of {self.share} leave "
            f"no near target in {length} tokens",
        )

    def _questions(self, length: int) -> int:
        return round(self.share * (length - self.pairs - self.distance))

    def draw(self, rng: np.random.Generator, size: int, *sizes: int) -> Batch:
        (length,) = sizes
        first = self.pairs + self.distance
        tokens = rng.integers(self.symbols, size=(size, length), dtype=np.int32)
        keys = rng.permuted(np.tile(np.arange(self.keys), (size, 1)), axis=1)[:, : self.pairs]
        values = rng.integers(self.symbols, size=keys.shape, dtype=np.int32)
        tokens[:, : self.pairs] = self.vocabulary + keys * self.symbols + values
        order = rng.random((size, length - first), np.float32).argsort(1)
        places = first + order[:, : self._questions(length)]
        asked = rng.integers(self.pairs, size=places.shape)
        np.put_along_axis(tokens, places, self.symbols + np.take_along_axis(keys, asked, 1), 1)
        targets = np.full_like(tokens, NOTHING)
        sums = tokens[:, self.pairs : -1] + tokens[:, self.pairs + 1 :]
        targets[:, self.pairs + 1 :] = sums % self.symbols
        np.put_along_axis(targets, places, np.take_along_axis(values, asked, 1), 1)
        return Batch((tokens,), targets)

    def is_far(self, batch: Batch) -> Any:
        """Mask of the questions, `(B, T)`."""
        return (batch.inputs[0] >= self.symbols) & (batch.targets != NOTHING)

    def is_near(self, batch: Batch) -> Any:
        """Mask of the other targets, `(B, T)`."""
        return (batch.inputs[0] < self.symbols) & (batch.targets != NOTHING)

    def measure(self, name: str, batch: Batch, scores: Scores) -> dict[str, Any]:
        return {
            **super().measure(name, batch, scores),
            "near": float(scores.right[self.is_near(batch)].mean()),
            "far": float(scores.right[self.is_far(batch)].mean()),
        }

    def sample(self, model: Any, seed: int) -> dict[str, Any]:
        """Returns the operations of the model, and the shares of tokens in exact attention."""
        batch = next(iter(self.held_out().values()))
        (tokens,) = batch.inputs
        call = jax.make_jaxpr(lambda tokens: model(tokens))(tokens[:1])
        exact = _exact(model, np.array_split(tokens, 16))
        return {
            "operations": cost.operations(call) / tokens.shape[1] / 1e3,
            "near_exact_share": float(exact[self.is_near(batch)].mean()),
            "far_exact_share": float(exact[self.is_far(batch)].mean()),
        }


def _exact(model: Any, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Share of the layers in which a token attends exactly, `(B, T)`, for parts of a batch."""
    model = nnx.clone(model)  # the costs of the caller's model stay as they are
    always, mixers = 0, [block.mixer for block in model.blocks]
    for mixer in mixers:
        if isinstance(mixer, MixtureOfMechanisms):
            mixer.costs = tuple(float(name == "softmax") for name in mixer.names)
        elif isinstance(mixer, SelfAttention) and mixer.binding.name == "softmax":
            always += 1
    graph, state = nnx.split(model)
    costs = jax.jit(lambda state, tokens: nnx.merge(graph, state).with_costs(tokens)[1])
    return (np.concatenate([costs(state, tokens) for tokens in parts]) + always) / len(mixers)


TASKS: dict[str, dict[str, MixedRange]] = {
    "mixed-range": {
        "small": MixedRange(
            vocabulary=20, keys=8, pairs=4, distance=32, share=0.1, trained=((256,),)
        ),
        "published": MixedRange(
            vocabulary=64, keys=48, pairs=32, distance=256, share=0.05, trained=((1024,),)
        ),
    }
}
