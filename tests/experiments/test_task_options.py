"""Options of the experiments on generated tasks: `--task NAME,OPTION=VALUE` and presets."""

import dataclasses
import json
import pathlib
import re

import pytest

from experiments import lra, recall
from experiments.harness import command, task_options
from experiments.harness.errors import UserError
from experiments.harness.options import OF_EXPERTS
from experiments.tasks import images
from experiments.tasks.task import Task
from tests.experiments.counting import Counting, Last, Options

DEFAULTS = {"counting": {"published": {"layers": 7}}, "last": {"small": {"width": 24, "steps": 3}}}
TINY = "--layers 1 --width 8 --heads 2 --batch 4 --steps 2 --optimiser adamw --seeds 0".split()


@pytest.fixture
def asked(monkeypatch):
    """Options that the command was run with, in order."""
    found = []
    monkeypatch.setattr(
        command, "run", lambda experiment, options, default: found.append(options) or 0
    )
    return found


def main(*arguments):
    return task_options.main("numbers", Options, DEFAULTS, list(arguments))


def task_of(**options) -> Task:
    return Options(**options).make_task(None)


def test_a_task_has_the_sizes_of_its_preset_and_those_that_are_given():
    assert task_of(task="counting") == Counting()
    assert task_of(task="counting", preset="published") == Counting(numbers=64)
    given = "counting,lengths=(8,16),is_ragged=True"
    assert task_of(task=given) == Counting(lengths=(8, 16), is_ragged=True)
    assert task_of(task="last,numbers=32") == Last(numbers=32)


def test_defaults_are_those_of_the_task_and_the_preset(asked):
    main()
    main("--preset", "published")
    main("--task", "last")
    main("--task=last,numbers=32", "--steps", "9")
    main("--task", "last", "--preset=published")
    first, published, last, changed, both = asked
    assert (first.task, first.preset, first.layers) == ("counting", "small", Options().layers)
    assert (published.task, published.preset, published.layers) == ("counting", "published", 7)
    assert (last.task, last.width, last.steps) == ("last", 24, 3)
    assert (changed.task, changed.width, changed.steps) == ("last,numbers=32", 24, 9)
    assert (both.width, both.steps) == (Options().width, Options().steps)


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("", "--task must be one of counting, last, got ''"),
        ("cuonting", "--task must be one of counting, last, got 'cuonting'"),
        ("counting,size=4", "--task counting has no option 'size'; its options are numbers, "),
        ("counting,numbers=", "--task: option numbers must be a Python literal, .* got ''"),
        ("counting,numbers=4,numbers=5", "--task: 'counting,.*' gives numbers twice; give it once"),
        ("counting,numbers=1", "--task counting,numbers=1: numbers must be at least 2, got 1"),
        ("counting,numbers=1e3", r"counting: option numbers must be like 16, got 1000\.0"),
        ("counting,numbers=True", "option numbers must be like 16, got True"),
        ("counting,lengths=8", r"option lengths must be like \(12,\), got 8"),
        ("counting,lengths=(8,9.5)", r"option lengths must be like \(12,\), got \(8, 9\.5\)"),
        ("counting,is_ragged=1", "option is_ragged must be like False, got 1"),
    ],
)
def test_what_is_no_task_is_one_sentence(tmp_path, capsys, task, sentence):
    with pytest.raises(UserError, match=sentence):
        Options(task=task).check()
    assert main("--task", task, "--output", str(tmp_path / "run")) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(sentence, error)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("multi-query,trained=(32,8)", r"must be like \(\(32, 8\),\), got \(32, 8\)"),
        ("multi-query,trained=((32,),)", r"must be like \(\(32, 8\),\), got \(\(32,\),\)"),
        ("associative,tested=(19,)", r"tested must be like \(\(19,\),\), got \(19,\)"),
        ("associative,tested=((19,),(17,))", None),
        ("multi-query,tested=()", None),
        ("mad-noisy-recall,noise=0", None),
    ],
)
def test_options_have_the_form_of_those_of_the_preset(task, sentence):
    if sentence is None:
        recall.Config(task=task).check()
    else:
        with pytest.raises(UserError, match=sentence):
            recall.Config(task=task).check()


def test_a_whole_number_in_the_preset_does_not_make_an_option_whole():
    preset = lra.Config.tasks["pathfinder"]["small"]
    assert isinstance(preset.dash, int)
    config = lra.Config(task="pathfinder,dash=1.5")
    config.check()
    assert config.make_task(pathlib.Path()).dash == 1.5
    with pytest.raises(UserError, match=r"option dashes must be like 3, got 3\.0"):
        lra.Config(task="pathfinder,dashes=3.0").check()


@pytest.mark.parametrize("path", ["a,b", "a(b", "it's", "a\"b,'c"])
def test_a_path_may_have_any_letters(tmp_path, path):
    folder = tmp_path / path
    for part in ("neg", "pos"):
        (folder / part).mkdir(parents=True)
    config = lra.Config(task=f"imdb,length=8,path={str(folder)!r}")
    config.check()
    task = config.make_task(pathlib.Path())
    assert (task.length, task.path) == (8, str(folder))


def test_data_that_cannot_be_read_are_one_sentence(tmp_path, capsys):
    assert lra.main(["--task", "imdb", "--output", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: this task needs the path of a folder with a folder of text")
    assert error.count("\n") == 1


def test_mechanisms_that_mask_nothing_fit_tasks_without_padding():
    nothing = frozenset({"bidirectional"})
    assert lra.Config(task="pathfinder").fits(nothing)
    assert not lra.Config(task="listops").fits(nothing)


def test_options_are_literals(monkeypatch):
    monkeypatch.setattr(
        Options, "tasks", {"pixels": {"small": images.NextPixel(images=images.Digits())}}
    )
    with pytest.raises(UserError, match="pixels has no option 'images'; its options are none"):
        Options(task="pixels,images=3").check()


def test_a_preset_or_task_without_a_value_is_explained(capsys):
    for given in (["--preset", "huge"], ["--preset"], ["--task"]):
        with pytest.raises(SystemExit):
            main(*given)
        assert given[0] in capsys.readouterr().err


def test_folders_are_named_after_the_preset_and_the_task():
    assert Options(task="counting,lengths=(8,16)").label == "small-counting,lengths=(8,16)"
    settings = Options(task="last,numbers=8").prepare()
    assert settings == {
        "task_sizes": {"numbers": 8, "lengths": (12,), "is_ragged": False},
    }


def test_all_mechanisms_that_fit_are_those_of_the_task():
    causal = Options(task="counting", mechanisms=("mamba", "all", "linear")).with_all().mechanisms
    padded = Options(task="last", mechanisms=("all",)).with_all().mechanisms
    assert causal[:2] == ("mamba", "softmax") and len(set(causal)) == len(causal)
    assert "nystrom" not in causal and {"nystrom", "softmax"} <= set(padded)
    # FNet mixes the padding into all tokens.
    assert "fnet" not in padded and "mamba" not in padded
    some = Options(task="counting", mechanisms=("softmax", "linear"))
    assert some.with_all() is some


@pytest.mark.slow
@pytest.mark.parametrize("task", ["counting", "last"])
def test_tasks_are_learnt_by_the_command(tmp_path, capsys, task):
    output = tmp_path / "run"
    given = ["--task", f"{task},lengths=(8,12)", "--output", str(output), *TINY]
    assert main(*given) == 0, capsys.readouterr().err
    assert "| softmax " in capsys.readouterr().out
    summary = json.loads((output / "summary.json").read_text())
    (run,) = summary["runs"]
    assert list(run["held_out"]) == ["validation", "longer"]
    assert [record["step"] for record in run["curve"]] == [1, 2]
    assert run["tokens"] == 4 * (8 + 12)
    assert (run["state_bytes"] is None) == (task == "last")
    assert ("exact" in run["held_out"]["longer"]) == (task == "counting")
    assert summary["config"]["task_sizes"]["lengths"] == [8, 12]
    fields = {field.name for field in dataclasses.fields(Options)}
    left_out = {"sweep", "at_once", "output", "imports", "mesh", "processes", *OF_EXPERTS}
    assert fields - left_out <= summary["config"].keys()


def test_the_help_names_the_tasks(capsys):
    with pytest.raises(SystemExit):
        recall.main(["--help"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(name in said for name in ("multi-query, ", "induction, ", "mad-compression"))


def test_a_sweep_that_is_given_is_not_dropped(capsys):
    """Also one that is the default; a rate alone replaces the default."""
    rates = ["--learning-rate", "0.1"]
    sweep = ["--sweep", *map(str, recall.DEFAULTS["multi-query"]["small"]["sweep"])]
    other = ["--warmup", "2"]  # an error that comes after that of rates
    assert recall.main([*rates, *sweep, *other]) == 1
    assert "--sweep must be left out if --learning-rate is given" in capsys.readouterr().err
    assert recall.main([*rates, *other]) == 1
    assert "--warmup must be a fraction" in capsys.readouterr().err
