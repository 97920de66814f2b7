"""Meshes by the names of their axes."""

import functools

import jax
import jax.numpy as jnp
import pytest

import effattn
from effattn import parallel

pytestmark = pytest.mark.devices


def test_a_mesh_has_all_axes_in_order():
    mesh = parallel.make_mesh(tensor=2, data=2, sequence=2)
    assert mesh.axis_names == parallel.AXES
    assert dict(mesh.shape) == {
        "stage": 1,
        "data": 2,
        "fsdp": 1,
        "expert": 1,
        "sequence": 2,
        "tensor": 2,
    }
    # Neighbours along the last axis are neighbours of the list.
    assert mesh.devices.reshape(2, 2, 2)[0, 0].tolist() == jax.devices()[:2]


def test_the_rest_and_fewer_devices():
    assert parallel.make_mesh(data=-1, tensor=4).shape["data"] == 2
    some = parallel.make_mesh(sequence=2, devices=jax.devices()[:2])
    assert some.size == 2
    kind = jax.sharding.AxisType.Explicit
    assert set(parallel.make_mesh(data=8, axis_type=kind).axis_types) == {kind}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch": 8}, "the axes of a mesh are stage, data, .*; got 'batch'"),
        ({"data": 3}, "must be the number of devices, 8, got data=3; choose other sizes"),
        ({"data": 3, "tensor": -1}, "the number of devices, 8, got data=3, tensor=-1"),
        ({"data": -1, "tensor": -1}, "one axis may be -1, got data=-1, tensor=-1"),
        ({"data": 0}, "data must be a positive int, or -1 for the rest, got 0"),
        ({"data": 2.0}, "data must be a positive int, or -1 for the rest, got 2.0"),
        ({}, "the number of devices, 8, got no sizes"),
        ({"data": -1, "devices": []}, "the number of devices, 0, got data=-1"),
    ],
)
def test_meshes_that_do_not_fit_are_one_sentence(sizes, message):
    with pytest.raises(ValueError, match=message):
        parallel.make_mesh(**sizes)


@pytest.mark.parametrize(
    "call",
    [
        parallel.exchange_heads(effattn.dot_product_attention, "sequence"),
        parallel.pass_states(effattn.retention, "sequence"),
        functools.partial(parallel.ring_attention, axis_name="sequence"),
        functools.partial(parallel.pipeline(max, max, "sequence"), None),
    ],
    ids=["heads", "states", "ring", "pipeline"],
)
def test_calls_outside_of_shard_map_are_one_sentence(call):
    with pytest.raises(ValueError, match="axis_name must be a mesh axis .*, got 'sequence'; call "):
        call(*[jnp.ones((1, 8, 2, 4))] * 3)
