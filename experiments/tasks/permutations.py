"""Word problems of permutation groups: the product of each prefix of a sequence of permutations."""

import dataclasses
import functools
import itertools
import re
from typing import ClassVar

import numpy as np

from experiments.tasks.task import Batch, Task, require
from experiments.tasks.tracking import StateTracking, padded


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordProblem(StateTracking):
    """Word problem of a permutation group.

    Tokens are random letters, which are elements of the group, and the target at each token is the
    product of all letters so far, in their order of application. With the six elements of S3
    numbered 012, 021, 102, 120, 201, 210:

        inputs   1  2  5  0
        targets  1  3  2  2

    Products of a few elements can be all elements of the group, so that the states are the same
    for any such letters. Fewer letters take fewer examples to learn.

    Attributes:
      group: "S" (all permutations) or "A" (even permutations) and the number of permuted items, up
        to 6.
      few_letters: True if the letters are the identity and the elements that move the fewest items:
        exchanges of two items, or in an "A" the cycles of three items. Else all elements are
        letters.
    """

    title = "Word problem of a group of permutations"
    reference: ClassVar[str] = (
        "Merrill et al. 2024, The Illusion of State in State-Space Models; lengths of Siems et al. "
        "2025, DeltaProduct, whose letters are all elements; the small sizes have fewer letters"
    )
    group: str
    few_letters: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(re.fullmatch("S[2-6]|A[3-6]", self.group)),
            f"group must be one of S2 to S6 and A3 to A6, got {self.group!r}",
        )

    @property
    def vocab_size(self) -> int:
        return len(products(self.group))

    def _examples(self, rng: np.random.Generator, lengths: np.ndarray, longest: int) -> Batch:
        table = products(self.group)
        letters = few_letters(self.group) if self.few_letters else np.arange(len(table))
        at = rng.integers(len(letters), size=(len(lengths), longest), dtype=np.int32)
        words = letters[at].astype(np.int32)
        prefixes = itertools.accumulate(words.T, lambda before, element: table[before, element])
        return padded(words, np.stack(list(prefixes), 1), lengths, 0)


@functools.cache
def products(group: str) -> np.ndarray:
    """Returns the table of products `(G, G)` of a group: at (a, b), apply a first, then b."""
    permutations = _elements(group)
    # Both applied: item i of a row holds b[a[i]].
    both = permutations[:, permutations].swapaxes(0, 1)
    number = permutations.shape[1] ** np.arange(permutations.shape[1])[::-1]
    return np.searchsorted(permutations @ number, both @ number).astype(np.int32)


@functools.cache
def few_letters(group: str) -> np.ndarray:
    """Returns the numbers of the identity and of the elements that move the fewest items.

    Without the identity, the position in a word of exchanges would tell the sign of its product.
    """
    permutations = _elements(group)
    moved = (permutations != permutations[0]).sum(1)
    return np.flatnonzero(moved <= min(moved[1:]))


@functools.cache
def _elements(group):
    """Permutations `(G, items)` of a group, in lexicographic order; the first is the identity."""
    permutations = np.array(list(itertools.permutations(range(int(group[1:])))))
    if group[0] == "S":
        return permutations
    later = np.triu(np.ones(permutations.shape[1:] * 2, bool), 1)
    inversions = (permutations[:, :, None] > permutations[:, None]) & later
    return permutations[inversions.sum((1, 2)) % 2 == 0]


def _sizes(group: str) -> dict[str, Task]:
    return {
        "small": WordProblem(
            group=group,
            few_letters=True,
            trained=(16, 16),
            tested=((32, 32), (128, 128)),
            held_out_size=256,
        ),
        "published": WordProblem(
            group=group, trained=(128, 128), tested=((256, 256), (512, 512)), held_out_size=4096
        ),
    }


TASKS: dict[str, dict[str, Task]] = {group: _sizes(group) for group in ("S3", "A5", "S5")}
