"""Training on a mesh: options, equality with one device, and resumption on another mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.harness import checks, meshes, models, training
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
        meshes.check_model(options, models.builder("synthesizer", options, TASK))


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
    return lines.losses, jax.tree.map(np.asarray, params), record["loss"]


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
    # Also from a mesh to one device.
    trained(tmp_path / "back", 3, "data=8")
    found, *_ = trained(tmp_path / "back", 6)
    np.testing.assert_allclose(found, expected[3:], rtol=1e-5)
