"""The command `experiments.finetune`, on models of a few thousand parameters."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effattn import nn
from effattn.testing.functions import assert_close
from experiments import finetune
from experiments.harness import meshes
from experiments.harness.optimisers import make_optimiser
from experiments.harness.programs import Programs, in_parts
from experiments.harness.schedules import Schedule
from experiments.harness.training import Run, train
from experiments.recovery.programs import Distillation, FineTuning
from tests.experiments.conftest import Lines
from tests.experiments.counting import Counting

TASK = Counting(is_ragged=True)
STEPS = 4
OPTIONS = (
    make_optimiser("adamw", STEPS, warmup=0.0, clip=1.0, weight_decay=0.5),
    Schedule(STEPS, batch=4, accumulate=1, evaluate_every=1),
    TASK,
)
# Rematerialised, to show that the originals can be recorded all the same.
MODEL = nn.TransformerConfig(
    vocab_size=16, num_layers=2, features=8, num_heads=2, hidden_features=8, remat=True
)
RATE = np.float32(0.01)


def build(rngs):
    return nn.TransformerLM(MODEL, rngs=rngs)


def to(mechanism):
    return lambda model, rngs: nn.convert(model, mechanism, rngs=rngs)


@pytest.fixture(scope="module")
def original():
    return Programs(build, *OPTIONS)


@pytest.fixture(scope="module")
def trained(original):
    """Parameters by seed; those of the seed 3, drawn anew, pass for a trained model."""
    return {3: original.init(30)[0]}


@pytest.fixture(scope="module")
def distillation(trained):
    """The first two of four steps learn the outputs of mixers."""
    return Distillation(2, build, to("hedgehog"), trained, *OPTIONS)


@pytest.fixture
def batch():
    return in_parts(TASK.training(4, 0, 0), 4)


def means(values, targets):
    """Mean over the positions with a target."""
    return np.asarray(values)[np.asarray(targets) >= 0].mean()


def test_a_converted_model_starts_with_the_parameters_of_its_original(original, trained):
    params, _ = FineTuning(build, to("hedgehog"), trained, *OPTIONS).init(3)
    kept = dict(nnx.traversals.flatten_mapping(params["trained"]))
    for path, array in nnx.traversals.flatten_mapping(trained[3]["trained"]).items():
        np.testing.assert_array_equal(kept.pop(path), array)
    assert {path[-1] for path in kept} == {"query_projection", "key_projection"}


def test_the_loss_of_the_first_steps_is_the_squared_error_of_mixers(
    original, trained, distillation, batch
):
    params, state = distillation.init(3)
    converted, model = distillation.model(params), original.model(trained[3])
    tokens = batch.inputs[0][0]
    x, errors = model.embed(tokens), []
    for block, own in zip(model.blocks, converted.blocks, strict=True):
        read = block.mixer_norm(x)
        errors.append(np.square(own.mixer(read) - block.mixer(read)).mean(-1))
        x = block(x)
    _, _, loss = distillation.step(params, state, RATE, batch)
    assert loss > 1e-5
    np.testing.assert_allclose(loss, means(np.mean(errors, 0), batch.targets[0]), rtol=1e-4)


def test_the_loss_of_later_steps_is_the_divergence_from_the_original(
    original, trained, distillation, batch
):
    params, state = distillation.init(3)
    # Far from the original: near it, the divergence is a small sum of large rounded terms.
    params["trained"] = jax.tree.map(lambda x: 3 * x, params["trained"])
    tokens = batch.inputs[0][0]
    wanted = jax.nn.log_softmax(original.model(trained[3])(tokens))
    found = jax.nn.log_softmax(distillation.model(params)(tokens))
    divergence = (np.exp(wanted) * (wanted - found)).sum(-1)
    _, _, loss = distillation.step({**params, "step": jnp.int32(2)}, state, RATE, batch)
    assert loss > 0.01
    np.testing.assert_allclose(loss, means(divergence, batch.targets[0]), rtol=1e-4)


def test_the_first_steps_change_mixers_alone(distillation, batch):
    params, state = distillation.init(3)
    for step in range(3):
        before = jax.tree.map(np.asarray, params)
        params, state, _ = distillation.step(params, state, RATE, batch)
        flat = nnx.traversals.flatten_mapping(before["trained"])
        after = nnx.traversals.flatten_mapping(params["trained"])
        changed = {path for path in flat if not np.array_equal(flat[path], after[path])}
        of_mixers = {path for path in flat if "mixer" in path}
        assert of_mixers and changed == (of_mixers if step < 2 else set(flat))
        jax.tree.map(np.testing.assert_array_equal, params["original"], before["original"])


def test_softmax_has_nothing_to_learn_from_softmax(trained, batch):
    same = Distillation(1, build, to("softmax"), trained, *OPTIONS)
    params, state = same.init(3)
    for _ in range(2):
        params, state, loss = same.step(params, state, np.float32(0), batch)
        assert abs(loss) < 1e-6


def test_evaluations_measure_the_predictions_of_targets(trained, distillation, batch):
    params, _ = distillation.init(3)
    plain = Programs(lambda rngs: to("hedgehog")(build(rngs), rngs), *OPTIONS)
    of_converted = {name: params[name] for name in ("trained", "moved", "fixed")}
    expected, found = plain.evaluate(of_converted, batch), distillation.evaluate(params, batch)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_killed_distillation_ends_with_the_same_parameters(distillation, tmp_path):
    class Killer(Lines):
        def step(self, step, loss, tokens_per_second):
            if step == 3:
                raise KeyboardInterrupt

    run = Run("run", tmp_path / "run", "run", 3, 0.01)
    whole = dataclasses.replace(run, folder=tmp_path / "whole")
    expected, _ = train(whole, OPTIONS[1], distillation, TASK, Lines())
    with pytest.raises(KeyboardInterrupt):
        train(run, OPTIONS[1], distillation, TASK, Killer())
    found, _ = train(run, OPTIONS[1], distillation, TASK, Lines())
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.devices
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        pytest.param({"data": 4, "sequence": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_distillation_on_a_mesh_learns_the_same(batch, sizes):
    def after(steps, devices):
        options = (*OPTIONS, "float32", 0, devices)
        originals = {3: Programs(build, *options).init(30)[0]}
        programs = Distillation(1, build, to("hedgehog"), originals, *options)
        params, state = programs.init(3)
        for _ in range(steps):
            params, state, loss = programs.step(params, state, RATE, batch)
        return loss, jax.tree.map(np.asarray, params["trained"])

    loss, trained = after(2, meshes.Devices(sizes))
    expected, of_one = after(2, meshes.ONE_DEVICE)
    # A divergence of 5e-5 between logits of about 1.
    np.testing.assert_allclose(loss, expected, rtol=1e-3)
    assert_close(trained, of_one, 1e-4)


TINY = """--layers 1 --heads 2 --width 8 --context 16 --batch 4 --eval-windows 4 --steps 4
    --recovery-steps 2 --optimiser adamw --mechanisms hedgehog""".split()


@pytest.mark.slow
def test_only_missing_models_are_trained(tmp_path, folder_of_text, capsys):
    folder = tmp_path / "run"
    command = [*TINY, "--corpus", str(folder_of_text), "--output", str(folder)]
    assert finetune.main(command) == 0
    assert "distill-hedgehog-rate0.003-seed0 (2 of 2)  step 2/2" in capsys.readouterr().out
    assert finetune.main(command) == 0
    assert "This run is finished" in capsys.readouterr().out
    assert finetune.main([*command, "--mechanisms", "hedgehog", "softmax"]) == 0
    shown = capsys.readouterr().out
    assert "step 2/2" in shown
    assert "hedgehog-rate0.003-seed0 (1 of 4)  step" not in shown

    summary = json.loads((folder / "summary.json").read_text())
    (loss,) = (r["bits_per_byte"] for r in summary["runs"] if r["way"] == "original")
    curves = {(r["way"], r["mechanism"]): r["curve"] for r in summary["runs"]}
    assert len(curves) == 1 + 2 * 2 + 2
    assert curves["distill", "softmax"][0]["bits_per_byte"] == pytest.approx(loss)
    assert curves["distill", "hedgehog"][0] == curves["finetune", "hedgehog"][0]
    assert [record["tokens"] for record in curves["finetune", "hedgehog"]] == [0, 64, 128]
    assert curves["scratch", "hedgehog"][-1]["tokens"] == 4 * 64 + 128
    # Two projections of 4 by 4 for each of two heads.
    assert sum(summary["conversions"]["hedgehog"]["new"].values()) == 2 * 2 * 16
    assert (folder / "recovery.png").is_file()


def test_the_table_shows_the_share_of_the_loss_that_was_regained():
    def run(way, mechanism, *losses):
        curve = [
            {"step": n, "tokens": 64 * n, "bits_per_byte": loss} for n, loss in enumerate(losses)
        ]
        sizes = {"seed": 0, "learning_rate": 0.1, "state_bytes": None, "tokens": 128}
        return {"way": way, "mechanism": mechanism, **sizes, "curve": curve, **curve[-1]}

    summary = {
        "headline": "bits_per_byte",
        "heading": "bits/byte",
        "command": "",
        "environment": {},
        "config": {
            "mechanisms": ["linear"],
            "ways": ["finetune"],
            "seeds": [0],
            "transfer": 0.5,
        },
        "conversions": {"linear": {"kept": {"kernel": 2000}, "new": {}, "dropped": {"sink": 3}}},
        "runs": [
            run("original", "softmax", math.nan, 2.0),
            run("scratch", "softmax", math.nan, 1.5),
            run("finetune", "linear", 4.0, 3.5, 2.5),
            run("scratch", "linear", math.nan, 3.0),
        ],
    }
    text = finetune.markdown(summary)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n")]
    assert ["linear", "finetune", "4.000", "3.500", "2.500", "75 %", "3.000", "-", "0.1"] in rows
    assert ["softmax", "original", "2.000", "-", "-", "-", "1.500", "-", "0.1"] in rows
    assert ["linear", "2,000", "0", "3 (sink)"] in rows


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--mechanisms", "all"], "--mechanisms must not be all, as models cannot be converted to"),
        (["--mechanisms", "mamba"], "--mechanisms: the mixer of 'mamba' has no projections"),
        (["--mechanisms", "nothing"], "--mechanisms: unknown mechanism 'nothing'"),
        (["--ways", "distill", "distill"], "--ways must name finetune, distill or both, each once"),
        (["--ways"], "--ways must name finetune, distill or both, each once, got none"),
        (["--transfer", "1.5"], "--transfer must be a fraction from 0 to 1, got 1.5"),
        (
            ["--transfer", "0.5", "--ways", "finetune"],
            "--transfer must be left out without distill in --ways, got 0.5",
        ),
        (["--recovery-steps", "0"], "--recovery-steps must be at least 1, got 0"),
        (["--recovery-rate", "0"], "--recovery-rate must be positive"),
        (
            ["--recovery-rate", "1", "--sweep", "1", "2"],
            "--sweep must be left out if --recovery-rate is given, got 1.0 2.0",
        ),
        (["--no-equal-parameters"], "--equal-parameters must stay on"),
        (["--mesh", "stage=2"], "--mesh must have no axis stage, as models with stages cannot"),
        (["--mesh", "data=-1", "--processes", "auto"], "--processes must be left out, as this"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, folder_of_text, capsys, more, sentence):
    command = [*TINY, "--corpus", str(folder_of_text), "--output", str(tmp_path / "run"), *more]
    assert finetune.main(command) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
