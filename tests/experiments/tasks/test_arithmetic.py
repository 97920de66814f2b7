"""Arithmetic modulo 5 against Python's evaluation of the expressions."""

import dataclasses
import re

import numpy as np
import pytest

from experiments.tasks.arithmetic import MODULUS, TASKS, TOKENS
from experiments.tasks.task import NOTHING


def texts(batch):
    return ["".join(TOKENS[token] for token in row).rstrip() for row in batch.inputs[0]]


def modulo(expression: str) -> int:
    return eval(expression) % MODULUS


def results(targets: np.ndarray) -> dict[int, int]:
    """Targets by position."""
    return {int(at): int(targets[at]) for at in np.flatnonzero(targets != NOTHING)}


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_the_values_of_the_expressions(name):
    task = dataclasses.replace(TASKS[name]["published"], held_out_size=64)
    for batch in (task.training(64, 0, 0), *task.held_out().values()):
        for text, targets in zip(texts(batch), batch.targets, strict=True):
            assert text.endswith("=")
            assert results(targets) == {len(text) - 1: modulo(text[:-1])}


def test_intermediate_results_without_brackets_are_the_values_of_prefixes():
    batch = TASKS["arithmetic"]["small"].training(64, 0, 0)
    for text, targets in zip(texts(batch), batch.targets, strict=True):
        ends = range(1, len(text), 2)
        expected = {end - 1: modulo(text[:end]) for end in ends}
        assert results(targets) == expected | {len(text) - 1: modulo(text[:-1])}


def subexpressions(text: str) -> dict[int, int]:
    """Values of the operands and brackets of an expression, by their last position."""
    values, opened = {}, []
    for at, token in enumerate(text):
        if token == "(":
            opened.append(at)
        elif token == ")":
            values[at] = modulo(text[opened.pop() : at + 1])
        elif token.isdigit():
            # A minus is a sign at the start, after a bracket, and after another operator.
            sign = text[at - 1] == "-" and (at == 1 or text[at - 2] in "(+-")
            values[at] = modulo(text[at - sign : at + 1])
            if text[at - sign - 1 : at + 2] == f"({text[at - sign : at + 1]})":
                del values[at]  # (d) and (-d) are one subexpression
    return values


def test_intermediate_results_with_brackets_are_the_values_of_subexpressions():
    batch = TASKS["bracket-arithmetic"]["small"].training(64, 0, 0)
    for text, targets in zip(texts(batch), batch.targets, strict=True):
        expected = subexpressions(text[:-1]) | {len(text) - 1: modulo(text[:-1])}
        assert results(targets) == expected


def test_the_forms_of_expressions_are_those_of_the_papers():
    plain = texts(TASKS["arithmetic"]["published"].training(500, 0, 0))
    assert all(re.fullmatch(r"[0-4]([-+*][0-4])*=", text) for text in plain)
    shrink = re.compile(r"\(x[-+]x\)|\(-?[0-4]\)|(?<=[(+-])-[0-4]|^-[0-4]|(?<![)x])[0-4]")
    for text in texts(TASKS["bracket-arithmetic"]["published"].training(500, 0, 0)):
        text = text[:-1]
        while text != "x":
            text, count = shrink.subn("x", text)
            assert count, text


@pytest.mark.parametrize("name", TASKS)
def test_digits_operators_and_answers_are_balanced(name):
    batch = TASKS[name]["published"].training(4000, 0, 0)
    text, answers = "".join(texts(batch)), batch.targets[batch.targets != NOTHING]
    digits = [text.count(digit) for digit in "01234"]
    assert max(digits) < 1.1 * min(digits)
    if name == "arithmetic":
        operators = [text.count(operator) for operator in "+-*"]
        assert max(operators) < 1.1 * min(operators)
    # A product with a zero is zero, so that zero is the most frequent answer without brackets.
    shares = np.bincount(answers, minlength=5) / len(answers)
    assert shares.min() > 0.16 and shares.max() < (0.31 if name == "arithmetic" else 0.24)
