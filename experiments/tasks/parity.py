"""Parity: is the number of ones even or odd?"""

import dataclasses
from typing import ClassVar

import numpy as np

from experiments.tasks.task import Batch, Task
from experiments.tasks.tracking import FinalAnswer, padded

PADDING = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity(FinalAnswer):
    """Parity of a sequence of random bits.

    The target is 1 after an odd number of ones, and stands at the last bit of each sequence.
    Intermediate results are the parities of all prefixes:

        inputs        1  0  1  1  0
        targets       .  .  .  .  1
        intermediate  1  1  0  1  1
    """

    title = "Parity"
    reference: ClassVar[str] = (
        "Grazzi et al. 2025, Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues; "
        "their lengths count the answer as one more token; ours do not"
    )

    vocab_size = PADDING + 1
    num_classes = 2

    def _examples(self, rng: np.random.Generator, lengths: np.ndarray, longest: int) -> Batch:
        bits = rng.integers(2, size=(len(lengths), longest))
        return padded(bits, bits.cumsum(1) % 2, lengths, PADDING)


TASKS: dict[str, dict[str, Task]] = {
    "parity": {
        "small": Parity(
            trained=(3, 40), tested=((40, 256),), held_out_size=1024, intermediate=True
        ),
        "published": Parity(
            trained=(3, 40), tested=((40, 256),), held_out_size=8192, intermediate=False
        ),
    }
}
