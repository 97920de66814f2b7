"""Parity against a count of the ones."""

import dataclasses

import numpy as np
import pytest

from experiments.tasks.parity import PADDING, TASKS
from experiments.tasks.task import NOTHING


@pytest.mark.parametrize("intermediate", [False, True])
def test_targets_count_the_ones(intermediate):
    task = dataclasses.replace(TASKS["parity"]["published"], intermediate=intermediate)
    (inputs,), targets = task.training(64, 0, 0)
    for row, expected in zip(inputs.tolist(), targets.tolist(), strict=True):
        bits = row[: row.index(PADDING)] if PADDING in row else row
        parities = [sum(bits[: i + 1]) % 2 for i in range(len(bits))]
        if not intermediate:
            parities[:-1] = [NOTHING] * (len(bits) - 1)
        assert expected == parities + [NOTHING] * (len(row) - len(bits))


def test_bits_and_answers_are_balanced():
    (inputs,), targets = TASKS["parity"]["published"].training(4000, 0, 0)
    assert abs((inputs == 1).sum() / (inputs != PADDING).sum() - 1 / 2) < 0.01
    assert abs((targets == 1).sum() / (targets != NOTHING).sum() - 1 / 2) < 0.03
    assert set(np.unique(inputs)) == {0, 1, PADDING}
