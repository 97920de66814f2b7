"""Comparison of arrays."""

import jax
import numpy as np


def close(actual, expected, tolerance=1e-5):
    """Each number is within `tolerance` of its own size, or of the largest of its array."""

    def assert_close(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())

    jax.tree.map(assert_close, actual, expected)
