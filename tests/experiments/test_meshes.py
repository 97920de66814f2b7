"""Training on a mesh: options, equality with one device, and resumption on another mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.harness import checkpoints, checks, meshes, models, stages, training
from experiments.harness.errors import UserError
from experiments.harness.optimisers import make_optimiser
from experiments.harness.programs import Programs
from experiments.harness.schedules import Schedule
from tests.experiments.conftest import Lines
from tests.experiments.counting import Counting, Options

TASK = Counting()
OPTIONS = Options(batch=8, steps=6, equal_parameters=False)
MESHES = "data=2,fsdp=2,tensor=2", "sequence=2,tensor=4", "fsdp=4,data=2"
MUON = make_optimiser("muon", steps=6, warmup=0.2, clip=1.0, weight_decay=0.01)


@pytest.mark.parametrize("text", ["data", "data=2 tensor=2", "rows=2", "data=1,data=2", "data=x"])
def test_a_mesh_of_another_form_is_refused(text):
    with pytest.raises(UserError, match=r"--mesh must be like data=2,tensor=4.*got"):
        checks.check_training(dataclasses.replace(OPTIONS, mesh=text))


def test_runs_on_a_mesh_run_one_after_the_other():
    with pytest.raises(UserError, match="at-once must be 1 with --mesh"):
        checks.check_training(dataclasses.replace(OPTIONS, mesh="data=2", at_once=2))


def test_the_mesh_is_no_part_of_a_run():
    on_mesh = dataclasses.replace(OPTIONS, mesh="data=2")
    assert on_mesh.of_folder() == OPTIONS.of_folder()


@pytest.mark.devices
@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("data=3", r"product of the sizes must be the number of devices, 8"),
        ("data=8,tensor=2", r"product of the sizes must be the number of devices, 8"),
        ("expert=8", r"expert=8 needs --experts, a multiple of 8; or use data=8"),
        ("tensor=8", r"tensor=8 must divide --heads, 4; choose another --heads"),
        ("sequence=8", r"sequence=8 must divide the tokens of a training example, 12"),
        ("data=4,fsdp=2", r"data x fsdp x expert, 8, must divide --batch / --accumulate, 4"),
    ],
)
def test_a_mesh_must_fit_devices_and_sizes(mesh, message):
    options = dataclasses.replace(OPTIONS, mesh=mesh, accumulate=1 if "expert" in mesh else 2)
    with pytest.raises(UserError, match=message):
        meshes.check(options, TASK)


@pytest.mark.devices
def test_a_mesh_must_divide_the_hidden_features():
    options = dataclasses.replace(OPTIONS, mesh="data=2,tensor=4", equal_parameters=True)
    message = "tensor=4 must divide the hidden features, .*; pass --no-equal-parameters"
    with pytest.raises(UserError, match=message):
        build = models.builder("synthesizer", options, TASK)
        meshes.check_model(options, build, TASK)


@pytest.mark.devices
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, "stage=2 must divide --layers, 3; choose another --layers"),
        ({"redraw": 2}, "stage=2 cannot be combined with --redraw; leave one of them out"),
        ({"experts": 4, "mesh": "stage=2,sequence=4"}, "sequence cannot be combined with --exp"),
    ],
)
def test_stages_must_fit_the_options(changes, message):
    options = dataclasses.replace(OPTIONS, **{"mesh": "stage=2,data=4", **changes})
    with pytest.raises(UserError, match=message):
        meshes.check(options, TASK)


@pytest.mark.devices
@pytest.mark.parametrize(
    ("mechanism", "mesh", "message"),
    [
        ("softmax/linear", "stage=2,data=4", "layer 1 is built differently from layer 0"),
        (
            "mixture_of_mechanisms,mechanisms=('gru','softmax'),gate='top1',capacity=0.5",
            "stage=2,sequence=4",
            "MixtureOfMechanisms cannot be called on parts of the tokens",
        ),
    ],
)
def test_models_must_fit_the_stages(mechanism, mesh, message):
    options = dataclasses.replace(OPTIONS, mesh=mesh)
    build = models.builder(mechanism, options, TASK)
    with pytest.raises(ValueError, match=message):
        meshes.check_model(options, build, TASK)


def trained(folder, steps, mesh=None, **changes):
    """Losses, parameters and scores after these steps of six, from the last checkpoint."""
    options = dataclasses.replace(OPTIONS, **changes)
    devices = meshes.Devices(None if mesh is None else checks.mesh_sizes(mesh))
    schedule = Schedule(steps, options.batch, options.accumulate, evaluate_every=3)
    build = models.builder("linear", options, TASK)
    programs = Programs(build, MUON, schedule, TASK, options.precision, devices=devices)
    lines = Lines()
    run = training.Run("linear", folder, "identity", seed=1, learning_rate=0.01)
    params, record = training.train(run, schedule, programs, TASK, lines)
    arrays = stages.apart(checkpoints._by_name(jax.tree.map(np.asarray, params)))
    return lines.losses, arrays, record["loss"]


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"accumulate": 2, "remat": True}, {"precision": "float16"}],
    ids=["plain", "accumulated", "float16"],
)
def test_training_on_a_mesh_equals_that_on_one_device(tmp_path, changes):
    expected, *params = trained(tmp_path / "one", 6, **changes)
    error = 1e-3 if "precision" in changes else 1e-5
    for number, mesh in enumerate(MESHES):
        found, *others = trained(tmp_path / str(number), 6, mesh, **changes)
        np.testing.assert_allclose(found, expected, rtol=error)
        for x, y in zip(jax.tree.leaves(others), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(x, y, rtol=10 * error, atol=10 * error)


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("stage=2,data=4", {"accumulate": 4}),
        ("stage=2,fsdp=2,tensor=2", {"accumulate": 2, "remat": True}),
        ("stage=2,sequence=2,tensor=2", {"accumulate": 2, "precision": "float16"}),
        ("stage=2,expert=2,data=2", {"accumulate": 2, "experts": 4}),
    ],
    ids=str,
)
def test_training_in_stages_equals_that_on_one_device(tmp_path, mesh, changes):
    expected, params, loss = trained(tmp_path / "one", 6, **changes)
    found, others, same = trained(tmp_path / "mesh", 6, mesh, **changes)
    error = 1e-3 if "precision" in changes else 1e-5
    np.testing.assert_allclose([*found, same], [*expected, loss], rtol=error)
    assert others.keys() == params.keys()
    for name, array in params.items():
        np.testing.assert_allclose(others[name], array, rtol=10 * error, atol=10 * error)


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 1.5])
def test_experts_on_a_mesh_equal_those_on_one_device(tmp_path, capacity):
    changes = {"experts": 4, "expert_capacity": capacity}
    expected, *params = trained(tmp_path / "one", 6, **changes)
    found, *others = trained(tmp_path / "mesh", 6, "expert=4,tensor=2", **changes)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(others), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.devices
@pytest.mark.slow
def test_a_run_resumes_on_another_mesh(tmp_path):
    expected, *params = trained(tmp_path / "one", 6)
    trained(tmp_path / "moved", 3, "data=2,tensor=4")
    found, *others = trained(tmp_path / "moved", 6, "fsdp=8")
    np.testing.assert_allclose(found, expected[3:], rtol=1e-5)
    for x, y in zip(jax.tree.leaves(others), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    # Also from a mesh with stages to one device, and to stages.
    trained(tmp_path / "back", 2, "stage=2,data=4")
    trained(tmp_path / "back", 4)
    found, *_ = trained(tmp_path / "back", 6, "stage=2,tensor=4")
    np.testing.assert_allclose(found, expected[4:], rtol=1e-5)
