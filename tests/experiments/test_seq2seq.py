"""The command `experiments.seq2seq`; `test_lm` tests the parts that it shares with `lm`."""

import json

import pytest

from experiments import seq2seq
from experiments.harness import command, report

TINY = ["--width", "8", "--heads", "2", "--layers", "1", "--batch", "4", "--steps", "3"]
TINY += ["--evaluate-every", "2", "--examples", "24", "--held-out", "5"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Finished comparison on pairs from a file: command line and run folder."""
    folder = tmp_path_factory.mktemp("seq2seq")
    lines = [f"é{number}\t{number} ist{'!' * (number % 3)}" for number in range(24)]
    (folder / "pairs.tsv").write_text("\n".join(lines), encoding="utf-8")
    command = ["--task", str(folder / "pairs.tsv"), "--output", str(folder / "run"), *TINY]
    command += ["--mechanisms", "softmax", "linear"]
    assert seq2seq.main(command) == 0
    return command, folder / "run"


@pytest.mark.slow
def test_a_run_folder_holds_a_table_a_figure_and_the_numbers(finished):
    _, folder = finished
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "summary.json", "summary.md", "results.png"),
        *("softmax-rate0.003-seed0", "linear-rate0.003-seed0"),
    }
    summary = json.loads((folder / "summary.json").read_text())
    for run in summary["runs"]:
        assert [record["step"] for record in run["curve"]] == [2, 3]
        for key in ("exact", "accuracy"):
            assert 0 <= run[key] <= 1
        assert run["held_out"]["validation"]["accuracy"] == run["accuracy"]
        assert 0 <= run["bleu"] <= 100 and 0 <= run["chrf"] <= 100
        assert run["state_bytes"] is None
        assert len(run["sample"].splitlines()) == len(run["prompt"].splitlines()) == 3
    softmax, linear = summary["mechanisms"]
    assert softmax["parameters"] == linear["parameters"]
    text = (folder / "summary.md").read_text()
    assert "| softmax " in text and "'0 ist'" in text and "BLEU |" in text


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
    before = json.loads((folder / "summary.json").read_text())["runs"]
    (folder / "summary.json").unlink()
    (folder / "softmax-rate0.003-seed0" / "result.json").unlink()
    linear = (folder / "linear-rate0.003-seed0" / "result.json").stat().st_mtime_ns
    assert seq2seq.main(command) == 0
    after = json.loads((folder / "summary.json").read_text())["runs"]
    assert (folder / "linear-rate0.003-seed0" / "result.json").stat().st_mtime_ns == linear
    # The parameters were read from the checkpoint, and measured again.
    assert after == before


@pytest.mark.slow
@pytest.mark.parametrize("side", ["decoder", "cross_attention"])
def test_other_sides_are_compared(tmp_path, capsys, side):
    given = ["--side", side, "--mechanisms", "linear", "--encoder", "sliding_window"]
    assert seq2seq.main([*TINY, *given, "--output", str(tmp_path / "run")]) == 0
    assert "| linear " in capsys.readouterr().out
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["side"], config["encoder"]) == (side, "sliding_window")


@pytest.mark.slow
def test_centroids_of_an_encoder_are_moved(tmp_path, capsys):
    given = ["--mechanisms", "routing", "--output", str(tmp_path / "run")]
    assert seq2seq.main([*TINY, *given]) == 0, capsys.readouterr().err


def test_all_mechanisms_that_fit_are_those_of_the_side():
    def fitting(side):
        config = seq2seq.Config(mechanisms=("all",), side=side)
        assert config.is_causal == (side == "decoder")
        return set(config.with_all().mechanisms)

    # FNet cannot leave out padding; Nystrom-attention and Linformer need all queries at once.
    assert {"nystrom", "linformer"} <= fitting("encoder") and "fnet" not in fitting("encoder")
    assert {"mamba", "softmax"} <= fitting("decoder") and "nystrom" not in fitting("decoder")
    assert {"linear", "softmax"} <= fitting("cross_attention")
    assert not {"nystrom", "linformer", "mamba"} & fitting("cross_attention")


def test_other_pairs_are_another_configuration(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "train_all", lambda *arguments: None)
    monkeypatch.setattr(report, "read_report", str)
    path = tmp_path / "pairs.tsv"
    given = ["--task", str(path), "--output", str(tmp_path / "run"), *TINY]
    given += ["--mechanisms", "softmax"]
    path.write_text("".join(f"a{i}\tb{i}\n" for i in range(60)))
    assert seq2seq.main(given) == 0
    path.write_text("".join(f"a{i}\tc{i}\n" for i in range(60)))
    assert seq2seq.main(given) == 1
    assert "another configuration (pairs_sha256 was" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_diverges_is_told_what_it_can_change(tmp_path, capsys):
    given = ["--learning-rate", "1e38", "--mechanisms", "softmax", "--output", str(tmp_path / "r")]
    assert seq2seq.main([*TINY, *given]) == 1
    error = capsys.readouterr().err
    assert "became NaN or infinite at step" in error and "try a lower --learning-rate" in error


def test_the_help_says_how_pairs_are_held_out(capsys):
    with pytest.raises(SystemExit):
        seq2seq.main(["--help"])
    assert "every tenth source" in " ".join(capsys.readouterr().out.replace("│", " ").split())


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
        (["--heads", "3"], "--width must be a multiple of --heads 3, got 8"),
        (["--heads", "8"], "--heads must divide --width 8 into even head sizes, for rotary"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--seeds", "1", "1"], "--seeds must not repeat a value, got 1 1"),
        (["--seeds", "99999999999"], "--seeds must be at most 2147483647, got 99999999999"),
        (["--learning-rate", "-1"], "--learning-rate must be positive and finite in float32, got"),
        (["--encoder", "linear"], "--encoder must be left out with --side encoder: --mechanisms"),
        (["--held-out", "0"], "--held-out must be at least 1, got 0"),
        (["--mechanisms", "retention"], "--mechanisms: is_causal=False was given, but"),
        (["--mechanisms", "fnet"], "--mechanisms: "),
        (["--side", "decoder", "--mechanisms", "nystrom"], "--mechanisms: is_causal=True was give"),
        (["--side", "cross_attention", "--mechanisms", "nystrom"], "cannot decode token by token"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, capsys, given, message):
    output = tmp_path / "run"
    assert seq2seq.main([*TINY, "--output", str(output), *given]) == 1
    assert message in capsys.readouterr().err
    assert not output.exists()
