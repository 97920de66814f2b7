"""ListOps: the value of nested operations on lists of digits."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from experiments.harness.errors import UserError
from experiments.tasks.classification import Examples, Generated, split
from experiments.tasks.task import Task, generator, require

# Tokens 0 to 9 are the digits.
MIN, MAX, MED, SM, CLOSE = range(10, 15)
NAMES = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")

# Probability that an argument is an operation rather than a digit.
NESTED = 0.25

# Expressions that are drawn together, and draws in a row without a new expression, which are enough
# to give up.
DRAWN, DRAWS = 1024, 100
MOST_BYTES = 8 * 10**9  # of all expressions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListOps(Generated):
    """Classification of an expression by its value, a digit.

    The value of `[MAX 0 [SM 4 9 ] ]` is 3: the sum of 4 and 9 modulo 10 is 3, the larger of 0 and
    3. MED is the median, rounded down.

    Attributes:
      depth: maximum number of levels, the last of which has digits only.
      arguments: maximum number of arguments of an operation, which has at least 2.
      min_length: expressions have more tokens than this.
      max_length: expressions have fewer tokens than this.
    """

    depth: int = 10
    arguments: int = 10
    min_length: int = 500
    max_length: int = 2000
    train: int = 96_000
    held: int = 2000

    reference: ClassVar[str] = (
        "Nangia and Bowman 2018; sizes and rejection as in Long-Range Arena (Tay et al. 2021): "
        "expressions are rejected by length, and if they occurred before, never by their value, "
        "so that the ten classes are not equally frequent"
    )
    title: ClassVar[str] = "ListOps compared"

    vocab_size = len(NAMES)
    num_classes = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(min(self.depth, self.arguments) >= 2, "depth and arguments must be at least 2")
        longest = 1
        for _ in range(self.depth - 1):
            longest = min(2 + self.arguments * longest, self.max_length)
        require(
            min(longest, self.max_length - 1) > self.min_length,
            f"min_length {self.min_length} and max_length {self.max_length} leave no expressions "
            f"of depth {self.depth} with up to {self.arguments} arguments",
        )

    @property
    def length(self) -> int:
        return self.max_length - 1

    def load(self) -> Mapping[str, Examples]:
        rng, wanted, in_vain = generator(0), sum(self.counts.values()), 0
        if wanted * self.length > MOST_BYTES:
            raise UserError(
                f"this task needs {wanted:,} expressions of {self.length:,} bytes, more than "
                f"{MOST_BYTES // 10**9} GB of memory; choose a smaller train and held"
            )
        found: dict[bytes, int] = {}
        while len(found) < wanted:
            before = len(found)
            tokens, labels = self._expressions(rng, DRAWN)
            for row, label in zip(tokens, labels, strict=True):
                found[row.tobytes()] = label
            in_vain = in_vain + 1 if len(found) == before else 0
            if in_vain == DRAWS:
                raise UserError(
                    f"this task needs {wanted} different expressions, and {before} were found; "
                    "choose a smaller train and held, or a wider range of lengths"
                )
        rows = list(found)[:wanted]
        tokens = np.frombuffer(b"".join(rows), np.uint8).reshape(wanted, self.length)
        labels = np.array([found[row] for row in rows], np.int32)
        # Only CLOSE ends an expression, so the last one marks its length.
        lengths = self.length - np.argmax(tokens[:, ::-1] == CLOSE, axis=1)
        return split(Examples(tokens, lengths.astype(np.int32), labels), self.counts)

    def _expressions(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws `count` expressions; returns tokens and values of those with a length as wanted."""
        levels = _draw(rng, count, self.depth, self.arguments)
        sizes = _sizes(levels)
        kept = (sizes[0] > self.min_length) & (sizes[0] < self.max_length)
        tokens = _write(levels, sizes, np.where(kept, np.cumsum(kept) - 1, -1), self.length)
        return tokens, _values(levels)[kept]


class Level(NamedTuple):
    """All nodes of one depth in a forest of expressions; siblings are adjacent.

    Attributes:
      token: `(n,)`, a digit or an operation.
      parent: `(n,)`, index into the operations of the level above.
      first: `(m,)`, index of the first argument of each operation of the level above.
    """

    token: np.ndarray
    parent: np.ndarray
    first: np.ndarray

    @property
    def nested(self) -> np.ndarray:
        """Indices of the operations."""
        return np.flatnonzero(self.token >= MIN)


def _draw(rng: np.random.Generator, count: int, depth: int, arguments: int) -> list[Level]:
    """Draws expressions from the top down; the first level holds `count` operations."""
    roots = rng.integers(MIN, CLOSE, count, np.uint8)
    levels = [Level(roots, np.arange(count), np.arange(count))]
    for below in range(2, depth + 1):
        operations = len(levels[-1].nested)
        numbers = rng.integers(2, arguments, operations, endpoint=True)
        parent = np.repeat(np.arange(operations), numbers)
        token = rng.integers(0, 10, len(parent), np.uint8)
        nested = rng.random(len(parent)) < (NESTED if below < depth else 0)
        token[nested] = rng.integers(MIN, CLOSE, nested.sum(), np.uint8)
        levels.append(Level(token, parent, np.cumsum(numbers) - numbers))
    return [level for level in levels if len(level.token)]


def _sizes(levels: list[Level]) -> list[np.ndarray]:
    """Returns the number of tokens of each node: 1 for a digit, 2 + those of its arguments else."""
    sizes = [np.ones(len(level.token), np.int64) for level in levels]
    for depth in reversed(range(len(levels) - 1)):
        arguments = np.add.reduceat(sizes[depth + 1], levels[depth + 1].first)
        sizes[depth][levels[depth].nested] = 2 + arguments
    return sizes


def _values(levels: list[Level]) -> np.ndarray:
    """Returns the values of the first level."""
    values = levels[-1].token.astype(np.int64)
    for level, below in zip(levels[-2::-1], levels[:0:-1], strict=True):
        first, last = below.first, np.append(below.first[1:], len(values)) - 1
        ordered = values[np.lexsort((values, below.parent))]
        median = (ordered[(first + last) // 2] + ordered[(first + last + 1) // 2]) // 2
        sums = np.add.reduceat(values, first) % 10
        values, nested = level.token.astype(np.int64), level.nested
        results = (ordered[first], ordered[last], median, sums)
        values[nested] = np.choose(values[nested] - MIN, results)
    return values


def _write(
    levels: list[Level], sizes: list[np.ndarray], row: np.ndarray, length: int
) -> np.ndarray:
    """Returns the tokens of the expressions in prefix order, each in its row; -1 is no row."""
    tokens = np.zeros((row.max(initial=-1) + 1, length), np.uint8)
    start = np.zeros(len(row), np.int64)
    for depth, (level, size) in enumerate(zip(levels, sizes, strict=True)):
        if depth:
            before = np.cumsum(size) - size
            operation = levels[depth - 1].nested[level.parent]
            start = start[operation] + 1 + before - before[level.first[level.parent]]
            row = row[operation]
        shown = row >= 0
        tokens[row[shown], start[shown]] = level.token[shown]
        closed = shown & (level.token >= MIN)
        tokens[row[closed], (start + size)[closed] - 1] = CLOSE
    return tokens


TASKS: Mapping[str, Mapping[str, Task]] = {
    "listops": {
        "small": ListOps(depth=3, arguments=4, min_length=8, max_length=40, train=50_000),
        "published": ListOps(),
    }
}
