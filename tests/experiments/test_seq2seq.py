"""The command `experiments.seq2seq`, and its pairs of texts."""

import datetime
import json
import types

import numpy as np
import pytest

from experiments import seq2seq
from experiments.harness import folders, pair_training, pairs
from experiments.harness.errors import Diverged, UserError

TINY = ["--width", "8", "--heads", "2", "--layers", "1", "--batch", "4", "--steps", "3"]
TINY += ["--evaluate-every", "2", "--examples", "24", "--held-out", "5"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Finished comparison on pairs from a file: command line and run folder."""
    folder = tmp_path_factory.mktemp("seq2seq")
    lines = [f"é{number}\t{number} ist{'!' * (number % 3)}" for number in range(24)]
    (folder / "pairs.tsv").write_text("\n".join(lines), encoding="utf-8")
    command = ["--task", str(folder / "pairs.tsv"), "--output", str(folder / "run"), *TINY]
    command += ["--encoders", "softmax", "linear"]
    assert seq2seq.main(command) == 0
    return command, folder / "run"


@pytest.mark.slow
def test_a_run_folder_holds_a_table_a_figure_and_the_numbers(finished):
    _, folder = finished
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("config.json", "summary.json", "summary.md", "accuracy.png"),
        *("softmax-seed0.json", "linear-seed0.json"),
    }
    summary = json.loads((folder / "summary.json").read_text())
    for run in summary["runs"]:
        assert [record["step"] for record in run["curve"]] == [2, 3]
        assert 0 <= run["exact_match"] <= 1 and 0 <= run["token_accuracy"] <= 1
        assert len(run["samples"]) == 3
    text = (folder / "summary.md").read_text()
    assert "| softmax |" in text and "'0 ist'" in text


@pytest.mark.slow
def test_a_finished_run_prints_its_table_again(finished, capsys):
    command, folder = finished
    before = (folder / "summary.json").stat().st_mtime_ns
    assert seq2seq.main(command) == 0
    assert "This run is finished" in capsys.readouterr().out
    assert (folder / "summary.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_what_was_trained_is_not_trained_again(finished):
    command, folder = finished
    (folder / "summary.md").unlink()
    linear = (folder / "linear-seed0.json").read_text()
    (folder / "softmax-seed0.json").unlink()
    before = json.loads((folder / "summary.json").read_text())["runs"]
    assert seq2seq.main(command) == 0
    after = json.loads((folder / "summary.json").read_text())["runs"]
    assert (folder / "linear-seed0.json").read_text() == linear
    assert before[0]["curve"] == after[0]["curve"]


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


def test_other_pairs_are_another_configuration(tmp_path, capsys, monkeypatch):
    def train_all(config, folder, data, settings):
        with folders.claimed(folder, settings):
            (folder / "summary.md").write_text("")

    monkeypatch.setattr(seq2seq, "train_all", train_all)
    path = tmp_path / "pairs.tsv"
    command = ["--task", str(path), "--output", str(tmp_path / "run"), *TINY]
    path.write_text("".join(f"a{i}\tb{i}\n" for i in range(60)))
    assert seq2seq.main(command) == 0
    path.write_text("".join(f"a{i}\tc{i}\n" for i in range(60)))
    assert seq2seq.main(command) == 1
    assert "another configuration (pairs_sha256 was" in capsys.readouterr().err


def test_a_run_that_diverges_is_told_what_it_can_change(monkeypatch):
    done, logits = [], pair_training._logits

    def compiling(*arguments):
        done.append("compiling")
        return logits(*arguments)

    def clock():
        done.append("clock")
        return 0.0

    monkeypatch.setattr(pair_training, "_logits", compiling)
    monkeypatch.setattr(pair_training, "time", types.SimpleNamespace(perf_counter=clock))
    data = pairs.load("reverse", 24, 5)
    sizes = pair_training.Sizes(1, 8, 2, 5)
    build = pair_training.model_of("softmax", sizes, 12)
    rates = {"steps": 4, "batch": 4, "learning_rate": 1e38, "evaluate_every": 4}
    with pytest.raises(Diverged, match="at step 2; try a lower --learning-rate$"):
        pair_training.train("run", build, data, **rates, seed=0, say=print)
    assert done[0] == "compiling"


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


def test_the_help_says_how_pairs_are_held_out(capsys):
    with pytest.raises(SystemExit):
        seq2seq.main(["--help"])
    assert "every tenth source" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_targets_begin_and_end():
    rows = pairs.load("reverse", 20, 4).train
    np.testing.assert_array_equal(rows.target[:, 0], pairs.START)
    for target, wanted, length in zip(rows.target, rows.wanted, rows.target_lengths, strict=True):
        assert wanted[length - 1] == pairs.END
        np.testing.assert_array_equal(target[1:length], wanted[: length - 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tb\nc", "line 2 must be a source, a tab and a target, got 'c'"),
        ("a\tb\tc", "line 1 must be a source, a tab and a target"),
        ("a\tb", "has 1 pairs of 1 different sources, too few to train on and hold out 5"),
        ("a\tb\n" * 24, "has 24 pairs of 1 different sources, too few to train on and hold out 5"),
        (None, "one of sort, reverse, dates or a file of pairs; cannot read"),
    ],
)
def test_files_that_are_no_pairs(tmp_path, capsys, text, message):
    path = tmp_path / "pairs.tsv"
    if text is not None:
        path.write_text(text)
    assert seq2seq.main(["--task", str(path), "--output", str(tmp_path / "run"), *TINY]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--heads", "3"], "--heads must divide --width 8 into even head sizes, got 3"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--seeds", "1", "1"], "--seeds needs one or more different values"),
        (["--seeds", "99999999999"], "--seeds must be at most 2147483647, got 99999999999"),
        (["--learning-rate", "-1"], "--learning-rate must be positive and finite in float32, got"),
        (["--encoders", "retention"], "--encoders: is_causal=False was given, but"),
        (["--encoders", "fnet"], "--encoders: "),
    ],
)
def test_settings_that_do_not_fit(tmp_path, capsys, given, message):
    output = tmp_path / "run"
    assert seq2seq.main([*TINY, "--output", str(output), *given]) == 1
    assert message in capsys.readouterr().err
    assert not output.exists()
