"""Default models of every command that trains: those of each task and preset can be built."""

import dataclasses

import pytest

from experiments import adaptive, classify, finetune, lm, lra, mlm, recall, scaling, seq2seq, states
from experiments.harness import models
from experiments.tasks.corpora import Corpus

DOCUMENTS = tuple(b"The state of the Union. " * 400 for _ in range(8))

NAMED = [
    pytest.param(command, task, preset, id=f"{command.__name__}-{task}-{preset}")
    for command in (adaptive, classify, lra, recall, states)
    for task in command.Config.tasks
    for preset in command.Config.tasks[task]
]
TEXT = [
    pytest.param(command, preset, id=f"{command.__name__}-{preset}")
    for command in (lm, mlm, finetune, scaling)
    for preset in command.PRESETS
]

# Examples that the publications train on, for each task: epochs times examples, or steps times
# batch, and the learning rates.
EXAMPLES = {
    "multi-query": (32 * 180_000, (1e-3, 10**-2.5, 1e-2, 10**-1.5)),
    "associative": (16 * 100_000, (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)),
    "tree": (32 * 100_000, (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)),
    "selective-copying": (400_000 * 64, (1e-4,)),
    "induction": (25 * 8192 * 8, (2e-4, 1e-3)),
    "mad-recall": (200 * 12_800, (1e-4, 5e-4, 1e-3)),
    "mad-memorisation": (200 * 256, (1e-4, 5e-4, 1e-3)),
    "parity": (5_120_000, (1e-3,)),
    "bracket-arithmetic": (100_000 * 256, (1e-3,)),
    "S5": (100 * 99_000, (1e-3,)),
    # Their rate is 0.05, times the inverse square root of the step or of the warmup.
    "listops": (5000 * 32, (0.05 / 1000**0.5,)),
    "imdb": (20_000 * 32, (0.05 / 8000**0.5,)),
    "papers": (5000 * 32, (0.05 / 8000**0.5 * 5000 / 8000,)),
    "cifar": (200 * 45_000, (5e-4,)),
    "pathfinder": (200 * 160_000, (1e-3,)),
    "pathfinder64": (200 * 160_000, (1e-3,)),
    "pathx": (200 * 160_000, (1e-3,)),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_published_presets_train_as_long_as_the_publications(name):
    (command,) = (each for each in (lra, recall, states) if name in each.Config.tasks)
    defaults = command.DEFAULTS[name]["published"]
    config = command.Config(**{"task": name, "preset": "published", **defaults})
    examples, rates = EXAMPLES[name]
    assert config.steps * config.batch == pytest.approx(examples, rel=0.02)
    assert config.rates == pytest.approx(rates, rel=0.02)


@pytest.mark.parametrize("command", [adaptive, classify, lra, recall, seq2seq, states, lm, mlm])
def test_short_runs_are_evaluated_several_times(command):
    """Curves of 50 steps have eight points."""
    config = command.Config(steps=50)
    assert config.steps // config.steps_between_evaluations == 8


def check_builds(config, task):
    for mechanism in config.mechanisms:
        assert models.count_parameters(models.builder(mechanism, config, task)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name", "preset"), NAMED)
def test_default_models_of_tasks_can_be_built(command, name, preset, tmp_path):
    defaults = command.DEFAULTS.get(name, {}).get(preset, {})
    config = command.Config(**{"task": name, "preset": preset, **defaults})
    if getattr(config.make_task(None), "path", None) == "":
        for part in ("train/neg", "train/pos", "test/neg", "test/pos"):
            (tmp_path / part).mkdir(parents=True)
            (tmp_path / part / "0.txt").write_text("Some text.")
        config = dataclasses.replace(config, task=f"{name},path={str(tmp_path)!r}")
    config.check()
    check_builds(config, config.make_task(None))


@pytest.mark.slow
@pytest.mark.parametrize(("command", "preset"), TEXT)
def test_default_models_of_text_can_be_built(command, preset, tmp_path, monkeypatch):
    config = command.PRESETS[preset]
    config.check()
    monkeypatch.setattr(type(config), "_corpus", Corpus(DOCUMENTS, DOCUMENTS))
    task = config.make_task(tmp_path)
    if command is finetune:
        assert finetune.conversions_of(config, task).keys() == set(config.mechanisms)
        return
    cells = config.cells().values() if command is scaling else (config,)
    for cell in {cell.width: cell for cell in cells}.values():
        check_builds(cell, task)


@pytest.mark.slow
@pytest.mark.parametrize("preset", seq2seq.PRESETS)
def test_default_models_of_pairs_can_be_built(preset):
    config = dataclasses.replace(seq2seq.PRESETS[preset], examples=64, held_out=8)
    config.check()
    check_builds(config, config.make_task(None))
