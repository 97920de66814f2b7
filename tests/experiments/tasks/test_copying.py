"""Selective copying and induction heads, against readers that see a sequence from the left."""

import numpy as np
import pytest

from experiments.tasks.copying import TASKS
from experiments.tasks.task import NOTHING

SELECTIVE = TASKS["selective-copying"]
INDUCTION = TASKS["induction"]


def rows(batch):
    (tokens,), targets = batch
    return zip(tokens.tolist(), targets.tolist(), strict=True)


def draw(task, size, *sizes):
    return task.draw(np.random.default_rng(0), size, *sizes)


def test_sizes_are_published():
    task = SELECTIVE["published"]
    assert (task.vocab_size, task.copied, task.trained) == (16, 16, ((4096,),))
    task = INDUCTION["published"]
    assert (task.vocab_size, task.trained) == (16, ((256,),))
    assert sorted(task.tested) == [(2**power,) for power in range(6, 21)]
    assert task.tested[0] == (256,)


@pytest.mark.parametrize("task", SELECTIVE.values(), ids=SELECTIVE)
def test_a_reader_copies_all_tokens_but_noise(task):
    for tokens, targets in rows(draw(task, 50, *task.trained[0])):
        context, markers = tokens[: -task.copied], tokens[-task.copied :]
        assert markers == [15] * task.copied
        found = [token for token in context if token != 0]
        assert targets == [NOTHING] * len(context) + found
        assert all(1 <= token <= 14 for token in found)


def test_tokens_to_copy_and_their_places_are_uniform():
    (tokens,), _ = draw(SELECTIVE["small"], 8000, 20)
    context = tokens[:, :16]
    np.testing.assert_allclose((context > 0).mean(0), 4 / 16, atol=0.025)
    counts = np.bincount(context[context > 0], minlength=15)[1:]
    np.testing.assert_allclose(counts / counts.sum(), 1 / 14, atol=0.006)


@pytest.mark.parametrize("task", INDUCTION.values(), ids=INDUCTION)
def test_a_reader_finds_the_token_after_the_special_token(task):
    for length in (32, 256):
        for tokens, targets in rows(draw(task, 100, length)):
            assert tokens[-1] == 15
            assert [token for token in tokens if token == 15] == [15, 15]
            assert targets == [NOTHING] * (length - 1) + [tokens[tokens.index(15) + 1]]
            assert targets[-1] < 15


def test_the_special_token_stands_anywhere():
    (tokens,), targets = draw(INDUCTION["small"], 8000, 10)
    places = np.bincount((tokens == 15).argmax(1), minlength=10)
    # The last place has the second special token, and the place before it has the first answer.
    np.testing.assert_allclose(places / 8000, [1 / 8] * 8 + [0] * 2, atol=0.015)
    np.testing.assert_allclose(np.bincount(targets[:, -1]) / 8000, 1 / 15, atol=0.012)
