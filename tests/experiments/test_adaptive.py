"""Costs of mixtures of mechanisms in the loss, and the command that compares them."""

import json

import numpy as np
import optax
import pytest

from effattn.nn import TransformerConfig, TransformerLM
from experiments import adaptive
from experiments.harness.programs import Programs, in_parts
from experiments.harness.schedules import Schedule
from tests.experiments.counting import Counting

TASK = Counting()


def build(rngs):
    window = {"name": "sliding_window", "local_window_size": (1, 0)}
    mixer = {"name": "mixture_of_mechanisms", "mechanisms": (window, "softmax"), "costs": (1, 3)}
    config = TransformerConfig(vocab_size=16, num_layers=2, features=8, num_heads=2, mixer=mixer)
    return TransformerLM(config, rngs=rngs)


def test_the_loss_of_training_has_the_mean_cost_of_a_token_and_evaluations_do_not():
    schedule = Schedule(steps=1, batch=4, accumulate=2, evaluate_every=1)
    batch = in_parts(TASK.training(4, 0, 0), 2)
    losses, nats, costs = [], [], []
    for with_costs in (False, True):
        programs = Programs(build, optax.sgd(1.0), schedule, TASK, with_costs=with_costs)
        params, state = programs.init(0)
        nats.append(programs.evaluate(params, batch).nats)
        costs = [programs.model(params).with_costs(part)[1].mean() for part in batch.inputs[0]]
        losses.append(programs.step(params, state, np.float32(0), batch)[-1])
    np.testing.assert_array_equal(*nats)
    np.testing.assert_allclose(losses[1] - losses[0], np.mean(costs), rtol=1e-5)
    # A token costs from 1 to 3 in each of two layers.
    assert 2 < np.mean(costs) < 6


@pytest.mark.slow
def test_the_command_compares_mixtures_with_their_mechanisms(tmp_path, capsys):
    tiny = "--layers 1 --width 8 --heads 2 --batch 4 --steps 2 --seeds 0 --at-once 1".split()
    mixture = f"{adaptive.MIXTURE},costs=(0,0.1),capacity=0.5"
    task = "mixed-range,trained=((64,),),held_out_tokens=1024"
    arguments = ["--task", task, "--mechanisms", "softmax", mixture, "--output", str(tmp_path)]
    assert adaptive.main([*arguments, *tiny]) == 0
    assert "near tokens in exact attention" in capsys.readouterr().out
    runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert [run["far_exact_share"] for run in runs][0] == 1 and runs[1]["far_exact_share"] <= 0.6
    assert (tmp_path / "operations.png").is_file()
