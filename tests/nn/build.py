"""Modules and arrays for tests in which no value matters."""

import numpy as np

from effattn.testing.subjects import filled_at_random as filled

__all__ = ["filled", "floats"]


def floats(*shape, seed=0):
    """Normal numbers of float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
