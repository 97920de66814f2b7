"""The command `experiments.scaling`, on models of a few thousand parameters."""

import json

import pytest

from experiments import scaling

TINY = """--layers 1 --heads 2 --context 16 --batch 4 --eval-windows 4 --widths 8 12 16
    --all-steps 2 4 --optimiser adamw --mechanisms linear""".split()


@pytest.mark.slow
def test_a_grid_is_trained_once_and_fitted(tmp_path, folder_of_text, capsys):
    command = [*TINY, "--corpus", str(folder_of_text), "--output", str(tmp_path / "run")]
    assert scaling.main(command) == 0
    capsys.readouterr()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["points"]) == 6
    by_size = {(p["width"], p["tokens"]): p for p in summary["points"]}
    assert by_size[8, 128]["compute"] * 2 == by_size[8, 256]["compute"]
    assert by_size[8, 128]["parameters"] < by_size[16, 128]["parameters"]
    assert (tmp_path / "run" / "scaling.png").is_file()
    before = (tmp_path / "run" / "width8-steps2" / "summary.json").stat().st_mtime_ns
    assert scaling.main(command) == 0
    assert "step 2/2" not in capsys.readouterr().out
    assert (tmp_path / "run" / "width8-steps2" / "summary.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--widths", "8"], "--widths and --all-steps must give more than 5 models, got 8"),
        (["--widths", "8", "8"], "--widths must not repeat a value, got 8 8"),
        (["--all-steps"], "--all-steps needs at least one value, got none"),
        (["--widths", "8", "9", "16"], "--width must be a multiple of --heads 2, got 9"),
    ],
)
def test_grids_that_do_not_fit_are_refused(tmp_path, folder_of_text, capsys, more, sentence):
    command = [*TINY, "--corpus", str(folder_of_text), "--output", str(tmp_path / "run"), *more]
    assert scaling.main(command) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
