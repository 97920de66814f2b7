"""Mesh axes of kernels: which axes partition the batch and the heads, and which share heads."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from effattn.dispatch.places import HEADS, ONCE, SAME, Places, in_use, rows

MESH = jax.sharding.AbstractMesh((4, 2, 3), ("x", "y", "z"))


def places(wanted, *arrays):
    """Mesh axes for arrays, each given by its shape and the names of its axes."""
    shapes, names = zip(*arrays, strict=True)
    return Places.of(MESH, names, shapes, wanted)


def of_tokens(heads):
    return (8, 32, heads, 16), (*rows(1), None, HEADS, None)


@pytest.mark.parametrize(
    ("heads", "key_heads", "wanted", "of_queries", "of_keys"),
    [
        (8, 8, ("x", "y"), ("x", "y"), ("x", "y")),
        (8, 4, ("x", "y"), ("x", "y"), "x"),
        (8, 2, ("x",), "x", None),
        (8, 1, ("x", "y"), ("x", "y"), None),
        # 8 heads on 3 devices, 6 heads on 4, and 4 key heads on 3 of 12 would be uneven.
        (8, 8, ("z",), None, None),
        (8, 8, ("x", "z"), "x", "x"),
        (6, 6, ("x",), None, None),
        (12, 4, ("z",), None, None),
    ],
)
def test_heads_are_divided_evenly_with_their_key_heads(
    heads, key_heads, wanted, of_queries, of_keys
):
    found = places({HEADS: wanted}, of_tokens(heads), of_tokens(key_heads))
    assert found.spec(*of_tokens(heads)) == P(None, None, of_queries, None)
    assert found.spec(*of_tokens(key_heads)) == P(None, None, of_keys, None)


def test_a_mesh_axis_partitions_one_axis():
    found = places({"row0": ("x",), HEADS: ("x", "y")}, of_tokens(8))
    assert found.axes == {"row0": ("x",)}
    assert places({"row0": ("y",), HEADS: ("x",)}, of_tokens(8)).axes == {
        "row0": ("y",),
        HEADS: ("x",),
    }


def test_a_row_that_examples_share_is_on_every_device():
    shared = (1, 32), (*rows(1), None)
    found = places({"row0": ("x",)}, of_tokens(2), shared)
    assert found.spec(*shared) == P(None, None)


def test_names_of_heads_are_one_name():
    names = [("row0", SAME), ("row0", ONCE, None)]
    assert in_use(names, [(None, None), (None, "y", "x")]) == {HEADS: ("y",)}
    assert in_use(names, [("x", ("y", "z")), ("y", "x", None)]) == {
        "row0": ("x",),
        HEADS: ("y", "z"),
    }


def test_wanted_axes_of_other_names_are_left_out():
    assert places({"row1": ("x",)}, of_tokens(8)).axes == {}
