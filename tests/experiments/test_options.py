"""Options that all experiments share, and the command line that gives them."""

import shlex

import pytest
import tyro

from experiments import adaptive, lm, mlm, seq2seq
from experiments.harness import checks, models
from experiments.harness.errors import UserError
from experiments.harness.options import OF_EXPERTS, OF_RUNS, command_of
from tests.experiments.counting import Options


def parsed(default, arguments):
    return tyro.cli(type(default), args=arguments, default=default)


@pytest.mark.parametrize(
    ("default", "arguments", "said"),
    [
        (lm.PRESETS["small"], [], ""),
        (
            lm.PRESETS["gpu"],
            ["--mechanisms", "softmax", "random,seed=3", "--no-equal-parameters", "--remat"],
            " --mechanisms softmax random,seed=3 --no-equal-parameters --remat --preset gpu",
        ),
        (mlm.PRESETS["medium"], ["--import", "my.own", "--key-heads", "2"], None),
        (seq2seq.Config(), ["--task", "my pairs.tsv", "--side", "decoder"], None),
        (Options(task="last,numbers=4"), ["--sweep", "0.1", "0.01", "--seeds", "3"], None),
    ],
)
def test_the_command_line_of_options_gives_them(default, arguments, said):
    options = parsed(default, arguments)
    command = command_of("name", options, default)
    python, *given = shlex.split(command)
    assert python == "python" and given[:2] == ["-m", "experiments.name"]
    assert said is None or command == f"python -m experiments.name{said}"
    assert parsed(default, given[2:]) == options
    assert ("last,numbers=4" in command) == isinstance(options, Options)
    # Where and in what order models are trained is no part of the command.
    elsewhere = parsed(default, [*arguments, "--output", "here", "--at-once", "1"])
    assert command_of("name", elsewhere, default) == command


def test_the_folder_depends_on_the_training_alone():
    usual = lm.Config()
    others = ["--mechanisms", "mamba", "--seeds", "9", "--at-once", "1", "--output", "x"]
    for more in ([], ["--learning-rate", "0.5"], ["--sweep", "0.5"]):
        assert lm.parse([*others, *more]).of_folder() == usual.of_folder()
    assert not OF_RUNS & usual.of_folder().keys()
    for changes in (["--key-heads", "1"], ["--redraw", "4"], ["--precision", "float16"]):
        assert lm.parse(changes).of_folder() != usual.of_folder()
    # Folders without experts say nothing of experts.
    assert not OF_EXPERTS & usual.of_folder().keys()
    assert OF_EXPERTS <= lm.parse(["--experts", "4"]).of_folder().keys()
    # An option of its default value is no other option.
    given = ["--evaluate-every", str(usual.steps_between_evaluations)]
    assert lm.parse(given).of_folder() == usual.of_folder()


def test_options_of_experts_fit_together():
    for arguments, message in {
        "--experts-per-token 1": "--experts-per-token must be left out without --experts, got 1",
        "--expert-capacity 2": "--expert-capacity must be left out without --experts, got 2",
        "--shared-experts 1": "--shared-experts must be left out without --experts, got 1",
        "--experts 0": "--experts must be at least 1, got 0",
        "--experts 1": "--experts-per-token must be at most --experts 1, got 2",
        "--experts 4 --expert-capacity 0": "--expert-capacity must be positive and finite",
        "--experts 4 --shared-experts -1": "--shared-experts must not be negative, got -1",
    }.items():
        with pytest.raises(UserError, match=f"^{message}"):
            lm.parse(arguments.split()).check()
    with pytest.raises(UserError, match="--experts must be left out, because this experiment"):
        adaptive.Config(task="mixed-range", experts=4).check()
    lm.parse("--experts 4 --expert-capacity 1.25 --shared-experts 1".split()).check()


def test_the_runs_of_a_report_are_those_that_are_asked_for():
    config = lm.parse(["--sweep", "0.5", "0.1", "--seeds", "3", "--mechanisms", "mamba"])
    chosen = {"mechanisms": ("mamba",), "seeds": (3,), "learning_rate": (0.5, 0.1)}
    assert config.of_runs() == chosen
    assert lm.parse(["--import", "a"]).of_runs()["imports"] == ("a",)
    assert mlm.Config().of_runs()["learning_rate"] == (0.01,)


def test_mechanisms_of_all_that_cannot_be_built_are_left_out(monkeypatch):
    failing = {"linear"}

    def build(text, config, task):
        if text in failing:
            raise ValueError("too large")

    monkeypatch.setattr(models, "builder", build)
    monkeypatch.setattr(models, "check_call", lambda *arguments: None)
    some = lm.parse(["--mechanisms", "softmax", "all"])
    assert checks.check_mechanisms(some, None) == {"linear": "too large"}
    with pytest.raises(UserError, match="--mechanisms: too large"):
        checks.check_mechanisms(lm.parse(["--mechanisms", "linear", "all"]), None)
    failing.update(some.with_all().mechanisms)
    with pytest.raises(UserError, match="no mechanism fits; softmax: too large"):
        checks.check_mechanisms(lm.parse(["--mechanisms", "all"]), None)
