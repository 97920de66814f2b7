"""The command `experiments.scaling`, on models of a few thousand parameters."""

import json

import pytest

from effattn import registry
from experiments import scaling
from experiments.harness import checks, command, fits

TINY = """--layers 1 --heads 2 --context 16 --batch 4 --eval-windows 4 --widths 8 12 16
    --all-steps 2 4 --optimiser adamw --mechanisms linear""".split()


@pytest.mark.slow
def test_a_grid_is_trained_once_and_fitted(tmp_path, folder_of_text, capsys, monkeypatch):
    command = [*TINY, "--corpus", str(folder_of_text), "--output", str(tmp_path / "run")]
    assert scaling.main(command) == 0
    capsys.readouterr()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["points"]) == 6
    by_size = {(p["width"], p["tokens"]): p for p in summary["points"]}
    assert by_size[8, 128]["compute"] * 2 == by_size[8, 256]["compute"]
    assert by_size[8, 128]["parameters"] < by_size[16, 128]["parameters"]
    assert (tmp_path / "run" / "scaling.png").is_file()
    of_cell = tmp_path / "run" / "width8-steps2" / "summary.json"
    before = of_cell.stat().st_mtime_ns
    monkeypatch.setattr(scaling, "train", None)
    assert scaling.main(command) == 0
    shown = capsys.readouterr().out
    assert "This run is finished" in shown and "# Scaling laws" in shown
    monkeypatch.undo()
    assert scaling.main([*command, "--all-steps", "2", "4", "6"]) == 0
    shown = capsys.readouterr().out
    assert "step 6/6" in shown and "step 4/4" not in shown and "step 2/2" not in shown
    assert of_cell.stat().st_mtime_ns == before
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["points"]) == 9 and summary["config"]["all_steps"] == [2, 4, 6]


def test_mechanisms_that_do_not_fit_a_width_are_left_out_of_all(monkeypatch):
    """Only those that `all` stands for: a mechanism that is named must fit."""
    tried = []

    def check(cell, task):
        tried.append(cell.width)
        return {"linear": "too wide"} if cell.width == 12 else {}

    monkeypatch.setattr(checks, "check_mechanisms", check)
    assert scaling.check_grid(scaling.Config(widths=(8, 12, 16)), None) == {
        "linear": "width 12: too wide"
    }
    assert tried == [8, 12, 16]


@pytest.mark.slow
def test_mechanisms_that_diverge_in_a_model_are_left_out_of_the_table(
    tmp_path, folder_of_text, capsys, monkeypatch
):
    def train_all(cell, folder, *arguments):
        trained.append((folder.name, cell.mechanisms))
        names = [name for name in cell.mechanisms if name != "linear" or cell.width < 12]
        keys = ("seed", "parameters", "tokens", "loss", "bits_per_byte", "learning_rate")
        values = (0, 1000 * cell.width, 64 * cell.steps, 3 - cell.width / 100 - cell.steps / 50)
        runs = [dict(zip(keys, (*values, 2, 0.1), strict=True), mechanism=n) for n in names]
        left_out = {name: "the loss became NaN" for name in cell.mechanisms if name not in names}
        summary = {"runs": runs, "left_out": left_out}
        (folder / "summary.json").write_text(json.dumps(summary))

    trained = []
    monkeypatch.setattr(command, "train_all", train_all)
    monkeypatch.setattr(scaling, "compute", lambda cell, task, mechanism: cell.width)
    monkeypatch.setattr(fits, "RESAMPLES", 3)
    monkeypatch.setattr(
        registry, "names", lambda *_: ["softmax", "linear", "sliding_window", "longformer"]
    )
    folder = tmp_path / "run"
    given = [*TINY, "--corpus", str(folder_of_text), "--output", str(folder)]
    assert scaling.main([*given, "--mechanisms", "all"]) == 0, capsys.readouterr().err
    assert "- linear: width12-steps2: the loss became NaN" in capsys.readouterr().out
    assert dict(trained)["width12-steps2"] == ("softmax", "linear", "sliding_window", "longformer")
    assert dict(trained)["width12-steps4"] == ("softmax", "sliding_window", "longformer")
    summary = json.loads((folder / "summary.json").read_text())
    assert {point["mechanism"] for point in summary["points"]} == {
        "softmax",
        "sliding_window",
        "longformer",
    }
    assert scaling.main([*given, "--mechanisms", "all"]) == 0
    assert "This run is finished" in capsys.readouterr().out


def test_the_frontier_has_the_means_of_seeds(monkeypatch):
    monkeypatch.setattr(fits, "RESAMPLES", 1)
    points = [
        {
            "mechanism": "linear",
            "width": width,
            "parameters": 100 * width,
            "tokens": tokens,
            "compute": 600 * width * tokens,
            "loss": 1 + 8 / width + 99 / tokens + 0.5 * seed,
        }
        for width in (8, 16)
        for tokens in (100, 300, 900)
        for seed in (0, 1)
    ]
    front = scaling.fits_of(points)["frontier"]
    of_sizes = ((8, 100), (16, 100), (8, 300), (16, 300), (16, 900))  # not (8, 900)
    assert front["compute"] == [600 * width * tokens for width, tokens in of_sizes]
    assert front["loss"] == pytest.approx([3.24, 2.74, 2.58, 2.08, 1.86])
    assert scaling.fits_of(points[::-1])["frontier"] == front


def test_values_at_a_bound_are_marked():
    law = {"values": {"log E": -10.0, "beta": 0.5}, "intervals": {"beta": (0.4, 0.6)}}
    law["at_bound"] = ("log E",)
    assert scaling.text_of(law, "log E") == "0.000, at its bound"
    assert scaling.text_of(law, "beta") == "0.50 (0.40 to 0.60)"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--widths", "8", "--seeds", "0", "1", "2"], "must give more than 5 models, got 8"),
        (["--widths", "8"], "--widths and --all-steps must give more than 5 models, got 8"),
        (["--widths", "8", "8"], "--widths must not repeat a value, got 8 8"),
        (["--all-steps"], "--all-steps needs at least one value, got none"),
        (["--width", "8"], "--width must be left out: --widths gives the sizes of the models, got"),
        (["--steps", "8"], "--steps must be left out: --all-steps gives the training steps of"),
        (["--evaluate-every", "2"], "--evaluate-every must be left out: every model is evaluated"),
        (["--widths", "8", "9", "16"], "--widths must be a multiple of --heads 2, got 9"),
        (["--all-steps", "0", "4"], "--all-steps must be at least 1, got 0"),
    ],
)
def test_grids_that_do_not_fit_are_refused(tmp_path, folder_of_text, capsys, more, sentence):
    command = [*TINY, "--corpus", str(folder_of_text), "--output", str(tmp_path / "run"), *more]
    assert scaling.main(command) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_presets_have_grids_of_their_own():
    for preset in scaling.PRESETS.values():
        preset.check()
        assert len(preset.cells()) == 16
