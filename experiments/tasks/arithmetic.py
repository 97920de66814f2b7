"""Arithmetic modulo 5, without and with brackets."""

import dataclasses
from typing import ClassVar

import numpy as np

from experiments.tasks.task import NOTHING, Batch, Task
from experiments.tasks.tracking import FinalAnswer, padded

MODULUS = 5
TOKENS = "01234+-*()= "  # the last token is padding
PLUS, MINUS, TIMES, OPEN, CLOSE, EQUALS, PADDING = range(MODULUS, len(TOKENS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arithmetic(FinalAnswer):
    """Value modulo 5 of a sum, difference and product of digits; products come first.

    The target stands at the equals sign of each expression. Intermediate results are the values of
    the expressions that end at each digit:

        inputs        2  -  3  *  4  =
        targets       .  .  .  .  .  0
        intermediate  2  .  4  .  0  0

    Lengths are even, because they count the equals sign; odd lengths are rounded down.
    """

    title = "Arithmetic modulo 5"
    reference: ClassVar[str] = (
        "Deletang et al. 2023, Neural Networks and the Chomsky Hierarchy; lengths of Grazzi et al. "
        "2025, Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues; their "
        "lengths count the answer as one more token; ours do not"
    )
    fewest: ClassVar[int] = 2

    vocab_size = len(TOKENS)
    num_classes = MODULUS

    def _examples(self, rng: np.random.Generator, lengths: np.ndarray, longest: int) -> Batch:
        shape = len(lengths), longest // 2
        digits = rng.integers(MODULUS, size=shape)
        operators = rng.integers(PLUS, TIMES + 1, size=shape)
        # The value of each prefix is `total`, the sum of its finished terms, plus the last `term`.
        total, term = np.zeros_like(lengths), digits[:, 0]
        values = [term]
        for operator, digit in zip(operators.T, digits.T[1:], strict=False):
            is_product = operator == TIMES
            total = np.where(is_product, total, total + term)
            term = digit * np.select([is_product, operator == MINUS], [term, -1], 1) % MODULUS
            values.append((total + term) % MODULUS)
        results = np.stack(values, 1)
        inputs = np.stack([digits, operators], 2).reshape(len(lengths), -1)
        targets = np.stack([results, np.full(shape, NOTHING)], 2).reshape(len(lengths), -1)
        row, digit = np.arange(len(lengths)), lengths // 2 - 1
        inputs[row, 2 * digit + 1] = EQUALS
        targets[row, 2 * digit + 1] = results[row, digit]
        return padded(inputs, targets, 2 * digit + 2, PADDING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BracketArithmetic(Arithmetic):
    """Value modulo 5 of an expression with brackets, of sums, differences and signs.

    The target stands at the equals sign of each expression. Intermediate results are the values of
    the subexpressions, at their last tokens:

        inputs        (  1  -  (  -  3  )  )  =
        targets       .  .  .  .  .  .  .  .  4
        intermediate  .  1  .  .  .  .  2  4  4

    An expression of fewer than five tokens is one of d, -d, (d) and (-d), with a random digit d. A
    longer expression is (x+y) or (x-y), where the length of x is drawn uniformly.
    """

    title = "Arithmetic modulo 5 with brackets"

    def _examples(self, rng: np.random.Generator, lengths: np.ndarray, longest: int) -> Batch:
        inputs = np.empty((len(lengths), longest), int)
        targets = np.full_like(inputs, NOTHING)

        def write(row: np.ndarray, first: np.ndarray, length: np.ndarray) -> np.ndarray:
            """Writes a subexpression at each row, first position and length; returns the values."""
            last, value, is_leaf = first + length - 1, np.empty_like(row), length < 5
            inputs[row, first], inputs[row, last] = OPEN, CLOSE
            if is_leaf.any():
                leaf, size = row[is_leaf], length[is_leaf]
                digit, minus = rng.integers(MODULUS, size=len(leaf)), 1 - size % 2
                inner = first[is_leaf] + (size > 2)
                inputs[leaf, inner], inputs[leaf, inner + minus] = MINUS, digit
                value[is_leaf] = digit * (1 - 2 * minus) % MODULUS
            if not is_leaf.all():
                node, start, size = row[~is_leaf], first[~is_leaf], length[~is_leaf]
                left, minus = rng.integers(1, size - 3), rng.integers(2, size=len(node))
                inputs[node, start + 1 + left] = np.where(minus, MINUS, PLUS)
                starts, sizes = (start + 1, start + 2 + left), (left, size - 3 - left)
                values = write(np.tile(node, 2), np.concatenate(starts), np.concatenate(sizes))
                x, y = np.split(values, 2)
                value[~is_leaf] = (x + y * (1 - 2 * minus)) % MODULUS
            targets[row, last] = value
            return value

        row, last = np.arange(len(lengths)), lengths - 1
        targets[row, last] = write(row, np.zeros_like(row), last)
        inputs[row, last] = EQUALS
        return padded(inputs, targets, lengths, PADDING)


TASKS: dict[str, dict[str, Task]] = {
    "arithmetic": {
        "small": Arithmetic(
            trained=(4, 16), tested=((16, 64),), held_out_size=1024, intermediate=True
        ),
        "published": Arithmetic(
            trained=(4, 40), tested=((40, 256),), held_out_size=8192, intermediate=False
        ),
    },
    "bracket-arithmetic": {
        "small": BracketArithmetic(
            trained=(3, 16), tested=((16, 64),), held_out_size=1024, intermediate=True
        ),
        "published": BracketArithmetic(
            trained=(3, 40), tested=((40, 256),), held_out_size=8192, intermediate=False
        ),
    },
}
