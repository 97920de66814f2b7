"""The command `experiments.mlm`; `test_lm` tests the parts that it shares with `experiments.lm`."""

import copy
import json

import numpy as np
import pytest

from experiments import lm, mlm
from experiments.harness import checks, training
from experiments.harness.training import train
from experiments.tasks.task import NOTHING
from experiments.tasks.text import PARTS
from tests.experiments.test_lm import arguments as of_lm
from tests.experiments.test_lm import assert_refused, parameters, untimed

MECHANISMS = ["softmax", "linformer,num_projected=4"]
SCHEDULE = ["--steps", "4", "--evaluate-every", "2", "--seeds", "0", "--no-equal-parameters"]
SCHEDULE += ["--mechanisms", *MECHANISMS]


def arguments(*given):
    return [word for word in of_lm(*given) if word != "--no-costs"]


class Watched:
    """Replacement of a compiled function that records its batches."""

    def __init__(self, function, batches):
        self._function, self._batches = function, batches

    def __getattr__(self, name):
        return getattr(self._function, name)

    def __call__(self, *arguments):
        self._batches.append(arguments[-1])
        return self._function(*arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, documents):
    """Finished comparison: command line, run folder, and batches of each run."""
    corpus = tmp_path_factory.mktemp("corpus")
    for index, document in enumerate(documents):
        (corpus / f"{index:02d}.txt").write_bytes(document)
    output = tmp_path_factory.mktemp("runs") / "both"
    command, seen = arguments(corpus, output, *SCHEDULE), []

    def recorded(run, schedule, programs, *others):
        batches, watched = [], copy.copy(programs)
        seen.append(batches)
        watched.step = Watched(programs.step, batches)
        watched.evaluate = Watched(programs.evaluate, batches)
        return train(run, schedule, watched, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.harness.trials.train", recorded)
        assert mlm.main(command) == 0
    return command, output, seen


def test_the_window_is_of_mechanisms_that_have_one_by_themselves(folder_of_text):
    # Based takes one in causal calls alone.
    config = mlm.parse(
        ["--mechanisms", "based", "longformer", "--corpus", str(folder_of_text), "--batch", "4"]
    )
    config.check()
    checks.check_mechanisms(config, config.make_task(folder_of_text))


@pytest.mark.slow
def test_a_run_folder_holds_a_table_a_figure_and_the_numbers(finished, capsys):
    command, output, _ = finished
    names = {path.name for path in output.iterdir() if path.is_file()}
    assert names == {"config.json", "summary.json", "summary.md", "results.png"}
    summary = json.loads((output / "summary.json").read_text())
    assert [row["mechanism"] for row in summary["mechanisms"]] == MECHANISMS
    softmax, linformer = summary["mechanisms"]
    # Linformer has projections of the 16 tokens of the context, for keys and for values.
    assert linformer["parameters"] - softmax["parameters"] == 2 * 4 * 16
    arrays = parameters(output / summary["runs"][0]["folder"])[1]
    assert len(arrays["[0]['trained']['embed']['embedding']"]) == (256 + 1) * 8 * 4
    for run in summary["runs"]:
        assert run["state_bytes"] is None
        assert run["perplexity"] == pytest.approx(np.exp(run["loss"]))
        assert run["bits_per_byte"] == pytest.approx(run["loss"] / np.log(2))
        assert run["prompt"].count("_") == 3 and run["sample"]
    assert mlm.main(command) == 0
    out = capsys.readouterr().out
    assert "Filling in the tokens masked as _" in out and "| softmax " in out
    assert "decode state" not in out


@pytest.mark.slow
def test_every_mechanism_sees_the_same_masks(finished):
    softmax, linformer = finished[2]
    assert len(softmax) == 4 + 2
    for left, right in zip(softmax, linformer, strict=True):
        np.testing.assert_array_equal(left.inputs[0], right.inputs[0])
        np.testing.assert_array_equal(left.targets, right.targets)
    steps = [softmax[i] for i in (0, 1, 3, 4)]
    assert len({(step.targets != NOTHING).tobytes() for step in steps}) == 4
    for evaluation in (softmax[2], softmax[5]):
        assert evaluation.inputs[0].shape == (PARTS, 4, 16)
        assert (evaluation.targets != NOTHING).sum() == 4 * 16


@pytest.mark.slow
def test_killed_and_started_again_it_ends_with_the_same_parameters(finished, tmp_path, monkeypatch):
    command, output, _ = finished
    again = [str(tmp_path / "run") if part == str(output) else part for part in command]
    again.remove("softmax")

    class Killed(Exception):
        pass

    class Killer(training.Checkpoints):
        def save(self, *arguments):
            super().save(*arguments)
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(training, "Checkpoints", Killer)
        with pytest.raises(Killed):
            mlm.main(again)
    assert not (tmp_path / "run" / "summary.md").exists()
    assert mlm.main(again) == 0
    name = "linformer,num_projected=4-rate0.003-seed0"
    assert parameters(tmp_path / "run" / name) == parameters(output / name)
    assert untimed(tmp_path / "run" / name) == untimed(output / name)


@pytest.mark.slow
def test_a_folder_of_the_other_experiment_is_left_alone(finished, capsys):
    command = finished[0]
    capsys.readouterr()
    assert lm.main(command) == 1
    assert "experiment was mlm, now lm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mechanism", "sentence"),
    [
        ("sparse_transformer", "'sparse_transformer' lacks 'bidirectional'.*that have it: softmax"),
        ("softmaxx", "unknown mechanism 'softmaxx'; bidirectional mechanisms are softmax, "),
        ("linformer,method='max'", "method must be one of linear, convolution, mean, got 'max'"),
        ("linformer,max_length=3,num_projected=2", "is for at most 3 tokens, got 16"),
        ("linformer,max_length=3", "num_projected must be at most max_length 3, got 4"),
        (
            "nystrom,num_landmarks=17",
            "num_landmarks must be at most 16, the number of tokens, got 17",
        ),
        ("nystrom,num_landmarks=0", "num_landmarks must be an int, 1 or more"),
    ],
)
def test_what_a_mechanism_refuses_is_one_line(
    tmp_path, folder_of_text, capsys, mechanism, sentence
):
    command = arguments(folder_of_text, tmp_path / "run", "--mechanisms", mechanism)
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "main", mlm.main)
        assert_refused(command, capsys, sentence)
    assert not (tmp_path / "run").exists()


def test_the_options_that_are_there_without_a_command_line_fit_together():
    config = mlm.parse([])
    assert config == mlm.PRESETS["small"]
    config.check()
