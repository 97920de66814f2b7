"""Tests of `effattn.arrays.scaled_inputs`."""

import jax.numpy as jnp
import numpy as np

from effattn.arrays.scaled_inputs import Scaled, scaled_inputs


def test_results_that_are_arguments():
    """Indices count all arrays of the arguments, in the order of their pytrees."""

    def function(parameters, tokens):
        a, b = tokens
        return {
            "as it is": b,
            "times a scalar": a * parameters["scale"],
            "by a scalar": parameters["scale"] * b,
            "times another token": a * b,
            "times a number": 2 * a,
            "by token": a * a[..., :1],
            "square of the scalar": parameters["scale"] * parameters["scale"],
            "computed": jnp.exp(a) * parameters["scale"],
            "nothing": None,
        }

    a = np.zeros((3, 4), np.float32)
    assert scaled_inputs(function, {"bias": a, "scale": np.float32(2)}, (a, a)) == {
        "as it is": Scaled(3),
        "times a scalar": Scaled(2, 1),
        "by a scalar": Scaled(3, 1),
        "times another token": None,
        "times a number": None,
        "by token": None,
        "square of the scalar": Scaled(1, 1),
        "computed": None,
        "nothing": None,
    }
