"""Comparison of arrays."""

import jax
import numpy as np


def close(actual, expected, tolerance=1e-5):
    """Asserts |actual - expected| <= tolerance (|expected| + max |expected|) for each array."""

    def assert_close(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())

    jax.tree.map(assert_close, actual, expected)
