"""ListOps: expressions, values and sizes, by a parser that the generator does not use."""

import dataclasses
import statistics

import numpy as np
import pytest

from experiments.harness.errors import UserError
from experiments.tasks.listops import NAMES, TASKS, Level, ListOps, _values

EVALUATE = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
SIZES = {
    "small": dataclasses.replace(TASKS["listops"]["small"], train=300, held=50),
    "published": ListOps(train=200, held=50),
}


@pytest.fixture(scope="module", params=SIZES)
def task(request):
    return SIZES[request.param]


def expressions(task, part="train"):
    """Yields the words and the class of each example, and checks its padding."""
    examples = task.sets[part]
    for row, length, label in zip(*examples, strict=True):
        assert not row[length:].any()
        yield [NAMES[token] for token in row[:length]], label


def parse(words):
    """Returns (value, levels, largest number of arguments, number of operations) of a list."""
    word = words.pop(0)
    if word.isdigit():
        return int(word), 1, 0, 0
    arguments = []
    while words[0] != "]":
        arguments.append(parse(words))
    words.pop(0)
    values, levels, most, operations = zip(*arguments, strict=True)
    assert len(values) >= 2
    value = EVALUATE[word](values)
    return value, 1 + max(levels), max(len(values), *most), 1 + sum(operations)


def test_each_expression_has_its_value(task):
    for words, label in expressions(task):
        value, *_ = parse(words)
        assert not words, "an expression ends with its first operation"
        assert value == label


def test_sizes_are_those_of_the_specification(task):
    parsed = []
    for words, _ in expressions(task):
        assert task.min_length < len(words) < task.max_length
        parsed.append(parse(words))
    _, levels, arguments, _ = zip(*parsed, strict=True)
    assert max(levels) == task.depth
    assert max(arguments) == task.arguments


def test_the_published_sizes():
    task = TASKS["listops"]["published"]
    assert (task.depth, task.arguments, task.min_length, task.max_length) == (10, 10, 500, 2000)
    assert (task.train, task.held) == (96_000, 2000)
    assert (task.num_classes, task.vocab_size) == (10, 15)


def test_operations_and_digits_are_equally_frequent(task):
    words = [word for words, _ in expressions(task) for word in words]
    for names in (NAMES[:10], NAMES[10:14]):
        counts = np.array([words.count(name) for name in names])
        share = counts / counts.sum()
        deviation = np.sqrt((1 - 1 / len(names)) / len(names) / counts.sum())
        np.testing.assert_allclose(share, 1 / len(names), atol=5 * deviation)


def test_no_expression_occurs_twice(task):
    rows = [row.tobytes() for part in task.sets.values() for row in part.tokens]
    assert len(set(rows)) == len(rows) == task.train + 2 * task.held


def test_every_class_occurs(task):
    counts = np.bincount(task.sets["train"].labels, minlength=10)
    assert counts.min() > 0
    assert counts.max() < 0.3 * counts.sum()


def level(words, arguments):
    """Level of these words, with this number of arguments of each operation above."""
    token = np.array([NAMES.index(word) for word in words.split()])
    parent = np.repeat(np.arange(len(arguments)), arguments)
    return Level(token, parent, np.cumsum(arguments) - arguments)


@pytest.mark.parametrize(
    ("words", "levels", "value"),
    [
        ("[MAX 0 [SM 4 9 ] ]", [("[MAX", [1]), ("0 [SM", [2]), ("4 9", [2])], 3),
        (
            "[SM 2 [MAX 1 5 ] [SM 4 7 ] [MED 3 8 4 5 ] [MIN 3 6 ] ]",
            [
                ("[SM", [1]),
                ("2 [MAX [SM [MED [MIN", [5]),
                ("1 5 4 7 3 8 4 5 3 6", [2, 2, 4, 2]),
            ],
            5,
        ),
    ],
)
def test_a_known_expression(words, levels, value):
    assert parse(words.split())[0] == value
    assert _values([level(*given) for given in levels]).tolist() == [value]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_length": 60}, "min_length 64 and max_length 60 leave no expressions"),
        ({"max_length": 65}, "leave no expressions"),
        ({"depth": 3, "min_length": 37}, "leave no expressions of depth 3 with up to 5 arguments"),
        ({"depth": 1}, "depth and arguments must be at least 2"),
        ({"arguments": 1}, "depth and arguments must be at least 2"),
        ({"train": 0}, "train and held must be at least 1"),
    ],
)
def test_sizes_without_expressions_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        ListOps(**({"depth": 6, "arguments": 5, "min_length": 64, "max_length": 160} | sizes))


def test_fewer_different_expressions_than_asked_for():
    few = ListOps(depth=2, arguments=2, min_length=2, max_length=6, train=390, held=5)
    assert len(few.sets["train"].labels) == 390  # all expressions of one operation on two digits
    with pytest.raises(UserError, match="needs 401 different expressions, and 400 were found"):
        dataclasses.replace(few, train=391).load()
    with pytest.raises(UserError, match="more than 8 GB of memory; choose a smaller train"):
        dataclasses.replace(few, train=2 * 10**9).load()
