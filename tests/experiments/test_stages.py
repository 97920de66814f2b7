"""Arrays of stages, by the names of layers."""

import numpy as np

from experiments.harness import stages

LEAVES = {
    "[0]['trained']['stages'][0]['kernel']": np.array([[0.0], [20.0], [40.0]]),
    "[0]['trained']['stages'][1]['kernel']": np.array([[10.0], [30.0], [50.0]]),
    "[1].count": np.array(7),
}


def test_layers_are_in_order():
    """Three stages of two layers."""
    found = stages.apart(LEAVES)
    layers = {f"[0]['trained']['blocks'][{n}]['kernel']": np.array([10.0 * n]) for n in range(6)}
    assert found == layers | {"[1].count": 7}
    shapes = {name: (x.shape, x.dtype) for name, x in stages.shapes_apart(LEAVES).items()}
    assert shapes == {name: (np.shape(x), x.dtype) for name, x in found.items()}


def test_together_they_are_the_same_again():
    found = stages.together(LEAVES, stages.apart(LEAVES))
    assert found.keys() == LEAVES.keys()
    for name, array in LEAVES.items():
        np.testing.assert_array_equal(found[name], array)


def test_models_without_stages_keep_their_names():
    leaves = {"['blocks'][0]['kernel']": np.zeros(2)}
    assert stages.apart(leaves) == stages.together(leaves, leaves) == leaves
