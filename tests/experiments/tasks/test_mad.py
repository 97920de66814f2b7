"""The tasks of MAD, against readers that see a sequence from the left."""

import itertools

import numpy as np
import pytest

from experiments.tasks.mad import TASKS
from experiments.tasks.task import NOTHING

RECALL = {
    f"{name}, {preset}": task
    for name in ("mad-recall", "mad-fuzzy-recall", "mad-noisy-recall")
    for preset, task in TASKS[name].items()
}
each_recall = pytest.mark.parametrize("task", RECALL.values(), ids=RECALL)


def rows(batch):
    (tokens,), targets = batch
    return zip(tokens.tolist(), targets.tolist(), strict=True)


def draw(task, size):
    return task.draw(np.random.default_rng(0), size, *task.trained[0])


def kinds(task):
    """Returns the kind of each token: key, value, noise or padding."""
    content = task.vocabulary - task.noise_vocabulary - (task.motif > 1)
    return (
        ["key"] * (content // 2)
        + ["value"] * (content - content // 2)
        + ["noise"] * task.noise_vocabulary
        + ["padding"] * (task.motif > 1)
    )


def read(task, tokens):
    """Returns the pairs of a sequence as (key, value, place of the value)."""
    kind = kinds(task)
    pairs, place = [], 0
    runs = [
        (kind, list(run)) for kind, run in itertools.groupby(tokens, key=lambda token: kind[token])
    ]
    for (kind, run), (following, value) in itertools.pairwise(runs):
        place += len(run)
        if kind == "key":
            assert following == "value"
            pairs.append((tuple(run), tuple(value), place))
    return pairs


def test_sizes_are_those_of_the_baseline():
    sizes = {
        name: (presets["published"].vocabulary, *presets["published"].trained[0])
        for name, presets in TASKS.items()
    }
    assert sizes == {
        "mad-recall": (16, 128),
        "mad-fuzzy-recall": (16, 128),
        "mad-noisy-recall": (32, 128),
        "mad-selective-copying": (16, 256),
        "mad-compression": (16, 64),  # 32 tokens and their places
        "mad-memorisation": (256, 32),
    }
    assert TASKS["mad-fuzzy-recall"]["published"].motif == 3
    assert TASKS["mad-noisy-recall"]["published"].noise == 0.2
    assert TASKS["mad-noisy-recall"]["published"].noise_vocabulary == 16
    assert TASKS["mad-selective-copying"]["published"].copied == 16


@each_recall
def test_a_reader_knows_the_values_of_keys_that_return(task):
    for tokens, targets in rows(draw(task, 100)):
        value_of, expected = {}, [NOTHING] * len(tokens)
        for key, value, place in read(task, tokens):
            if key in value_of:
                assert value == value_of[key]
                # Each token of the value is predicted at the token before.
                expected[place - 1 : place - 1 + len(value)] = value
            value_of[key] = value
        assert targets == expected
        # The last key was seen before.
        assert targets[-2] == tokens[-1]


@each_recall
def test_training_predicts_every_next_token(task):
    for tokens, targets in rows(task.training(20, 0, 0)):
        assert targets == tokens[1:] + [NOTHING]
        pairs = read(task, tokens)
        assert pairs[-1][0] in [key for key, _, _ in pairs[:-1]]


@each_recall
def test_held_out_keys_are_the_longest_and_other_lengths_are_equally_likely(task):
    batches = draw(task, 300), task.training(300, 0, 0)
    keys, trained_keys = ([], [])
    values = []
    for batch, found in zip(batches, (keys, trained_keys), strict=True):
        for tokens, _ in rows(batch):
            # Towards the end of a sequence, shorter pairs are likelier to have room.
            for key, value, _ in read(task, tokens)[:5]:
                found.append(key)
                values.append(value)
    assert {len(key) for key in keys} == {task.motif}
    for motifs in (trained_keys, values):
        assert all(len(set(motif)) == len(motif) for motif in motifs)
        share = np.bincount([len(motif) for motif in motifs])[1:] / len(motifs)
        np.testing.assert_allclose(share, 1 / task.motif, atol=0.06)


@pytest.mark.parametrize("preset", ["small", "published"])
def test_a_fifth_of_the_pairs_is_noise(preset):
    task = TASKS["mad-noisy-recall"][preset]
    (tokens,), _ = draw(task, 500)
    # Pairs are noise as a whole; the last never is.
    pairs = (tokens.reshape(500, -1, 2) >= 16).all(-1)
    np.testing.assert_array_equal(pairs, (tokens.reshape(500, -1, 2) >= 16).any(-1))
    assert not pairs[:, -1].any()
    # One pair that is drawn at random is never noise.
    number = pairs.shape[1] - 1
    assert pairs[:, :-1].mean() == pytest.approx(0.2 * (1 - 1 / number), abs=0.015)
    counts = np.bincount(tokens[tokens >= 16], minlength=32)[16:]
    assert abs(counts - counts.mean()).max() < 5 * counts.mean() ** 0.5


def test_padding_is_on_the_left():
    for task in TASKS["mad-fuzzy-recall"].values():
        (tokens,), _ = draw(task, 200)
        padding = tokens == task.vocabulary - 1
        np.testing.assert_array_equal(padding, np.minimum.accumulate(padding, axis=1))
        assert padding.sum(1).max() < 2 * 2 * task.motif


@pytest.mark.parametrize("preset", ["small", "published"])
def test_a_reader_copies_all_tokens_but_noise_after_the_marker(preset):
    task = TASKS["mad-selective-copying"][preset]
    for tokens, targets in rows(draw(task, 50)):
        marker = tokens.index(15)
        assert tokens[marker + 1 :] == [0] * task.copied
        found = [token for token in tokens[:marker] if token != 0]
        assert targets == [NOTHING] * (marker + 1) + found


@pytest.mark.parametrize("preset", ["small", "published"])
def test_all_tokens_are_asked_for_by_their_places(preset):
    task = TASKS["mad-compression"][preset]
    for tokens, targets in rows(draw(task, 50)):
        half = len(tokens) // 2
        assert tokens[half - 1] == 15 and max(tokens[: half - 1]) < 15
        assert targets[:half] == [NOTHING] * half
        assert [tokens[place - 16] for place in tokens[half:]] == targets[half:]
        assert len(set(tokens[half:])) == half
    (tokens,), _ = draw(task, 2000)
    counts = np.bincount(tokens[:, : half - 1].ravel(), minlength=15)
    assert abs(counts - counts.mean()).max() < 5 * counts.mean() ** 0.5


@pytest.mark.parametrize("preset", ["small", "published"])
def test_values_to_memorise_never_change(preset):
    task = TASKS["mad-memorisation"][preset]
    value_of = {}
    for batch in (task.training(200, 0, 0), task.training(200, 5, 9), *task.held_out().values()):
        for tokens, targets in rows(batch):
            assert tokens[1::2] == [255] * 16
            assert targets[::2] == [NOTHING] * 16
            for key, value in zip(tokens[::2], targets[1::2], strict=True):
                assert value_of.setdefault(key, value) == value
    assert sorted(value_of) == list(range(127))
    assert len(set(value_of.values())) == 127
    assert 127 <= min(value_of.values()) and max(value_of.values()) < 255
