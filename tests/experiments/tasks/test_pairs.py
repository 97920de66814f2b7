"""Pairs of texts: the tasks, files, and which pairs are held out."""

import datetime

import jax
import numpy as np
import pytest

from experiments.harness.errors import UserError
from experiments.tasks import pairs
from experiments.tasks.task import NOTHING


@pytest.mark.parametrize("task", pairs.TASKS)
def test_the_tasks(task):
    made = pairs.load(task, 40, 8)
    assert len(made.train.source) == 32 and len(made.held_out.source) == 8
    for rows in (made.train, made.held_out):
        for source, wanted in zip(rows.source, rows.wanted, strict=True):
            source, target = pairs.text_of(source), pairs.text_of(wanted)
            if task == "dates":
                year, month, day = map(int, target.split("-"))
                assert str(year) in source and str(day) in source and 1 <= month <= 12
            else:
                other = sorted(source) if task == "sort" else reversed(source)
                assert target == "".join(other)


def test_no_more_dates_are_made_than_there_are():
    sources = {
        pairs.date_formats(datetime.date(2001, 1, 1) + datetime.timedelta(days))[which]
        for days in range(365)
        for which in range(6)
    }
    assert len(sources) == 6 * 365 - 31
    with pytest.raises(UserError, match="--examples must be at most 432094, .* got 500000"):
        pairs.load("dates", 500_000, 8)


def test_a_line_of_a_file_ends_where_files_end_lines(tmp_path, monkeypatch):
    path = tmp_path / "pairs.tsv"
    lines = "".join(f"a\u2028{i}\tb\x0c{i}\r\n" for i in range(20))
    path.write_bytes(lines.encode("utf-8-sig"))
    monkeypatch.setenv("HOME", str(tmp_path))
    made = pairs.load("~/pairs.tsv", 100, 1)
    assert pairs.text_of(made.held_out.source[0]) == "a\u20280"
    assert pairs.text_of(made.held_out.wanted[0]) == "b\x0c0"
    assert len(made.train.source) == 19


def test_what_is_held_out_is_not_trained_on():
    made = pairs.load("sort", 200, 50)
    train, held_out = (
        {pairs.text_of(source) for source in rows.source} for rows in (made.train, made.held_out)
    )
    assert not train & held_out


def texts(rows):
    both = zip(rows.source, rows.wanted, strict=True)
    return [tuple(map(pairs.text_of, pair)) for pair in both]


def load_lines(tmp_path, lines, held_out):
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(map("\t".join, lines)))
    made = pairs.load(str(path), 10_000, held_out)
    return texts(made.train), texts(made.held_out)


@pytest.mark.parametrize("held_out", [1, 3, 100])
@pytest.mark.parametrize("order", ["in turns", "one after the other", "shuffled"])
def test_a_pair_that_a_file_repeats_is_trained_on_or_held_out(tmp_path, order, held_out):
    different = [(f"a{i}", f"b{i}") for i in range(40)]
    lines = different * 5 if order == "in turns" else sorted(different * 5)
    if order == "shuffled":
        np.random.default_rng(0).shuffle(lines)
        lines = [tuple(line) for line in lines]
    train, kept = load_lines(tmp_path, lines, held_out)
    assert not set(train) & set(kept)
    assert len(kept) == len(set(kept)) == min(held_out, 4)
    assert sorted(train + kept * 5) == sorted(lines)  # nothing is lost


def test_all_targets_of_a_source_are_on_one_side(tmp_path):
    lines = [(f"a{i % 30}", f"b{i}") for i in range(90)]
    train, kept = load_lines(tmp_path, lines, 100)
    assert kept == [("a0", "b0"), ("a0", "b30"), ("a0", "b60")] + [
        (f"a{i}", f"b{i + more}") for i in (10, 20) for more in (0, 30, 60)
    ]
    assert len(train) == 81
    # One held-out target of a source is enough; its other targets are not trained on.
    train, kept = load_lines(tmp_path, lines, 1)
    assert kept == [("a0", "b0")] and len(train) == 87
    assert "a0" not in {source for source, _ in train}


def test_every_tenth_pair_of_different_sources_is_held_out(tmp_path):
    lines = [(f"a{i}", "b") for i in range(35)]
    train, kept = load_lines(tmp_path, lines, 100)
    assert kept == lines[::10] and len(train) == 31


def test_targets_begin_and_end():
    rows = pairs.load("reverse", 20, 4).train
    np.testing.assert_array_equal(rows.target[:, 0], pairs.START)
    for target, wanted, length in zip(rows.target, rows.wanted, rows.target_lengths, strict=True):
        assert wanted[length - 1] == pairs.END
        np.testing.assert_array_equal(target[1:length], wanted[: length - 1])


def test_examples_depend_on_the_seed_and_the_step_alone():
    made = pairs.load("sort", 200, 50)

    def examples(seed, step):
        return pairs.Translation(pairs=made).training(8, seed, step)

    first, again = examples(3, 5), examples(3, 5)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first.targets, examples(4, 5).targets)
    assert not np.array_equal(first.targets, examples(3, 6).targets)
    known = {row.tobytes() for row in made.train.source}
    assert {row.tobytes() for row in first.inputs[0]} <= known


def test_a_batch_counts_the_text_and_its_end():
    task = pairs.Translation(pairs=pairs.load("reverse", 40, 8))
    ((source, target, source_lengths, target_lengths), targets) = task.held_out()["validation"]
    rows = task.pairs.held_out
    assert len(source) == 8 and source.shape[1] < target.shape[1] == task.length
    assert task.vocab_size == task.num_classes == 258
    each = zip(target, targets, target_lengths, source_lengths, strict=True)
    for row, wanted, length, source_length in each:
        assert length == source_length + 1
        assert wanted[length - 1] == pairs.END and (wanted[length:] == NOTHING).all()
        np.testing.assert_array_equal(wanted[: length - 1], row[1:length])
    assert [pairs.text_of(row) for row in source] == [pairs.text_of(row) for row in rows.source]


def test_outputs_are_compared_with_the_targets(monkeypatch):
    task = pairs.Translation(pairs=pairs.load("reverse", 40, 8))
    written = task.pairs.held_out.wanted.copy()
    monkeypatch.setattr(pairs, "write", lambda model, rows: written)
    found = task.sample(None, seed=0)
    assert (found["bleu"], found["chrf"]) == (pytest.approx(100), pytest.approx(100))
    source, target = (
        pairs.text_of(rows[0]) for rows in (task.pairs.held_out.source, task.pairs.held_out.wanted)
    )
    assert found["prompt"].startswith(f"{source!r}, {target!r}\n")
    assert found["sample"].splitlines()[0] == repr(target)
    assert len(found["sample"].splitlines()) == len(found["prompt"].splitlines()) == pairs.SHOWN
    written[:, 0] = ord("?")
    worse = task.sample(None, seed=0)
    assert 0 < worse["bleu"] < 100 and 0 < worse["chrf"] < 100
