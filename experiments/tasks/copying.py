"""Copying of tokens from a noisy context: selective copying and induction heads."""

import dataclasses

import numpy as np

from experiments.tasks.synthetic import Synthetic
from experiments.tasks.task import NOTHING, Batch, require

NOISE = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectiveCopying(Synthetic):
    """Some tokens are scattered over noise, and then asked for in their order.

    Every target stands at a marker, one after the other. With the noise 0, the marker 9, three
    tokens to copy, and `.` for a position without a target:

        tokens   0 5 0 0 2 0 7 0 9 9 9
        targets  . . . . . . . . 5 2 7

    Attributes:
      copied: number of tokens to copy.
    """

    copied: int

    reference = (
        "Gu and Dao 2023, Mamba (arXiv 2312.00752), section 4.1.1 and appendix E.1. The markers "
        "are part of the length."
    )
    title = "Selective copying"

    @property
    def marker(self) -> int:
        return self.vocabulary - 1

    def question(self) -> list[int]:
        """Returns the end of the sequence; its last places are those of the targets."""
        return [self.marker] * self.copied

    def check(self, *sizes: int) -> None:
        (length,) = sizes
        require(self.vocabulary >= 3, "vocabulary must be at least 3: noise, marker and a token")
        needed = self.copied + len(self.question())
        require(
            1 <= self.copied and needed <= length,
            f"copied must be at least 1, and {self.copied} needs a length of {needed} or more",
        )

    def draw(self, rng: np.random.Generator, size: int, *sizes: int) -> Batch:
        (length,) = sizes
        copied = rng.integers(1, self.marker, size=(size, self.copied), dtype=np.int32)
        # The smallest numbers of each row are at the places of the tokens.
        question = self.question()
        order = rng.random((size, length - len(question)), np.float32)
        places = np.sort(np.argpartition(order, self.copied - 1)[:, : self.copied])
        tokens = np.full((size, length), NOISE, np.int32)
        np.put_along_axis(tokens, places, copied, axis=1)
        tokens[:, -len(question) :] = question
        targets = np.full_like(tokens, NOTHING)
        targets[:, -self.copied :] = copied
        return Batch((tokens,), targets)


class InductionHeads(Synthetic):
    """A special token occurs once in a random sequence, and again at the end.

    The target at the end is the token that followed the special token. With the special token 9,
    and `.` for a position without a target:

        tokens   4 2 9 6 1 4 7 9
        targets  . . . . . . . 6
    """

    reference = (
        "Gu and Dao 2023, Mamba (arXiv 2312.00752), section 4.1.2 and appendix E.1, after Dao et "
        "al. 2022, H3 (arXiv 2212.14052)."
    )
    title = "Induction heads"

    def check(self, *sizes: int) -> None:
        (length,) = sizes
        require(length >= 3, "the length must be at least 3")
        require(self.vocabulary >= 2, "vocabulary must be at least 2")

    def draw(self, rng: np.random.Generator, size: int, *sizes: int) -> Batch:
        (length,) = sizes
        special = self.vocabulary - 1
        tokens = rng.integers(special, size=(size, length), dtype=np.int32)
        rows, places = np.arange(size), rng.integers(length - 2, size=size)
        tokens[rows, places] = tokens[:, -1] = special
        targets = np.full_like(tokens, NOTHING)
        targets[:, -1] = tokens[rows, places + 1]
        return Batch((tokens,), targets)


TASKS: dict[str, dict[str, Synthetic]] = {
    "selective-copying": {
        "small": SelectiveCopying(vocabulary=16, copied=4, trained=((64,),), held_out_tokens=2**16),
        "published": SelectiveCopying(vocabulary=16, copied=16, trained=((4096,),)),
    },
    "induction": {
        "small": InductionHeads(
            vocabulary=16,
            trained=((64,),),
            tested=tuple((2**power,) for power in (6, 5, *range(7, 13))),
            held_out_tokens=2**16,
        ),
        "published": InductionHeads(
            vocabulary=16,
            trained=((256,),),
            tested=tuple((2**power,) for power in (8, 6, 7, *range(9, 21))),
        ),
    },
}
