"""Word problems against the composition of permutations."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from experiments.tasks.permutations import TASKS, few_letters, products
from experiments.tasks.task import NOTHING


def elements(group: str) -> list[tuple[int, ...]]:
    """Permutations of a group in lexicographic order."""

    def is_even(p):
        return sum(a > b for a, b in itertools.combinations(p, 2)) % 2 == 0

    every = itertools.permutations(range(int(group[1:])))
    return [p for p in every if group[0] == "S" or is_even(p)]


@pytest.mark.parametrize("group", TASKS)
def test_targets_are_the_products_of_prefixes(group):
    permutations = elements(group)
    (words,), targets = TASKS[group]["small"].training(8, 0, 0)
    for word, expected in zip(words, targets, strict=True):
        items = tuple(range(int(group[1:])))
        for element, target in zip(word, expected, strict=True):
            items = tuple(permutations[element][item] for item in items)
            assert permutations[target] == items


@pytest.mark.parametrize("group", ["S2", "S3", "A4", "A5", "S5"])
def test_the_table_is_that_of_a_group(group):
    table = products(group)
    size = math.factorial(int(group[1:])) // (2 if group[0] == "A" else 1)
    assert table.shape == (size, size)
    np.testing.assert_array_equal(table[0], np.arange(size))
    np.testing.assert_array_equal(np.sort(table, axis=0), np.sort(table, axis=1).T)
    a, b, c = np.random.default_rng(0).integers(size, size=(3, 100))
    np.testing.assert_array_equal(table[table[a, b], c], table[a, table[b, c]])


@pytest.mark.parametrize("group", TASKS)
def test_elements_and_products_are_uniform(group):
    task = dataclasses.replace(TASKS[group]["published"], trained=(16, 16))
    (words,), targets = task.training(1000, 0, 0)
    size = len(elements(group))
    for tokens in (words, targets[:, -1]):
        count = tokens.size / size
        found = np.bincount(tokens.ravel(), minlength=size)
        assert (np.abs(found - count) < 5 * count**0.5).all()


@pytest.mark.parametrize(
    ("group", "moved", "count"), [("S3", 2, 3), ("A4", 3, 8), ("A5", 3, 20), ("S5", 2, 10)]
)
def test_few_letters_generate_the_group(group, moved, count):
    identity, *letters = few_letters(group)
    assert identity == 0 and len(letters) == count
    for letter in letters:
        assert sum(a != b for a, b in enumerate(elements(group)[letter])) == moved
    reached = {0}
    for _ in range(10):
        reached |= {int(products(group)[a, b]) for a in reached for b in letters}
    assert len(reached) == len(elements(group))
    task = dataclasses.replace(TASKS["S3"]["small"], group=group)
    (words,), _ = task.training(1000, 0, 0)
    assert set(words.ravel()) == {identity, *letters}
    _, targets = dataclasses.replace(task, trained=(2, 9)).training(1000, 0, 0)
    assert set((targets != NOTHING).sum(1)) == set(range(2, 10))


def test_other_groups_are_refused():
    with pytest.raises(ValueError, match="S2 to S6 and A3 to A6, got 'A2'"):
        dataclasses.replace(TASKS["S3"]["small"], group="A2")
