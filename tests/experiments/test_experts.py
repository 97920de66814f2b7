"""Experts in the experiments: losses of training, and the load in metrics and tables."""

import functools
import json

import jax
import numpy as np
import optax
import pytest

from effattn.nn import Experts, TransformerConfig, TransformerLM
from experiments import recall
from experiments.harness import models, training
from experiments.harness.programs import Programs, in_parts
from experiments.harness.schedules import Schedule
from tests.experiments.counting import Counting, Last, Options

TASK = Counting()
SCHEDULE = Schedule(steps=1, batch=4, accumulate=2, evaluate_every=1)


def build(rngs):
    sizes = {"vocab_size": 16, "num_layers": 2, "features": 8, "num_heads": 2}
    return TransformerLM(
        TransformerConfig(**sizes, experts=Experts(3, capacity_factor=1.0)), rngs=rngs
    )


@functools.cache
def programs():
    return Programs(build, optax.sgd(1.0), SCHEDULE, TASK)


def test_the_loss_of_training_has_the_losses_of_the_experts():
    """0.01 times the balancing loss and 0.001 times the z-loss, as means over the microbatches."""
    batch = in_parts(TASK.training(4, 0, 0), 2)
    params, state = programs().init(0)
    model = programs().model(params)
    routing = jax.jit(lambda model, tokens: model.with_routing(tokens)[1])
    parts = [routing(model, tokens) for tokens in batch.inputs[0]]
    balance, z = (
        sum(float(getattr(stats, name)) for part in parts for stats in part) / 2
        for name in ("load_balancing_loss", "router_z_loss")
    )
    nats = programs().evaluate(params, batch).nats.mean()
    loss = programs().step(params, state, np.float32(0), batch)[-1]
    np.testing.assert_allclose(loss, nats + 0.01 * balance + 0.001 * z, rtol=1e-6)
    assert balance > 1.9 and z > 0.1


def test_the_load_is_measured_on_a_batch():
    params, _ = programs().init(0)
    batch = TASK.training(4, 0, 0)
    found = training.expert_loads(programs(), params, batch, SCHEDULE)
    _, routing = jax.jit(lambda model: model.with_routing(*batch.inputs))(programs().model(params))
    np.testing.assert_allclose(found["expert_load"], [s.load for s in routing], rtol=1e-5)
    np.testing.assert_allclose(found["expert_dropped"], [s.dropped for s in routing], rtol=1e-5)
    assert max(found["expert_dropped"]) > 0
    json.dumps(found)


def test_classifiers_have_experts():
    task, options = Last(), Options(task="last", layers=1, width=8, heads=2, experts=2)
    of_classes = Programs(models.builder("softmax", options, task), optax.sgd(1.0), SCHEDULE, task)
    batch = in_parts(task.training(4, 0, 0), 2)
    params, _ = of_classes.init(0)
    load, dropped = jax.eval_shape(of_classes._load, params, batch)
    assert (load.shape, dropped.shape) == ((1, 2), (1,))


@pytest.mark.slow
def test_the_command_reports_the_load(tmp_path, capsys):
    tiny = "--layers 2 --width 8 --heads 2 --batch 4 --steps 2 --seeds 0 --at-once 1".split()
    task = "multi-query,trained=((32,4),),held_out_tokens=256,tested=()"
    arguments = ["--task", task, "--mechanisms", "softmax", "--output", str(tmp_path)]
    assert (
        recall.main(
            [
                *arguments,
                *tiny,
                "--experts",
                "4",
                "--expert-capacity",
                "1",
                "--learning-rate",
                "0.01",
            ]
        )
        == 0
    )
    assert "| expert load | dropped |" in " ".join(capsys.readouterr().out.split())
    (run,) = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert np.shape(run["expert_load"]) == (2, 4)
    np.testing.assert_allclose(np.sum(run["expert_load"]), 2, rtol=1e-5)
    (folder,) = tmp_path.glob("softmax-*")
    *_, last = (folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["expert_load"] == run["expert_load"]
    assert "Dropped choices are those" in (tmp_path / "summary.md").read_text()
