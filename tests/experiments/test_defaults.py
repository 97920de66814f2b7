"""Default models of every command that trains: those of each task and preset can be built."""

import dataclasses

import pytest

from experiments import adaptive, classify, finetune, lm, lra, mlm, recall, scaling, seq2seq, states
from experiments.harness import models
from experiments.tasks.corpora import Corpus

pytestmark = pytest.mark.slow

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


def check_builds(config, task):
    for mechanism in config.mechanisms:
        assert models.count_parameters(models.builder(mechanism, config, task)) > 0


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


def test_default_models_of_pairs_can_be_built():
    config = seq2seq.Config(examples=64, held_out=8)
    config.check()
    check_builds(config, config.make_task(None))
