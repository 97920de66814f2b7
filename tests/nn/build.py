"""Modules for tests to which no initial value matters."""

import jax
import numpy as np


def filled(build, seed=0, spread=1 / 4):
    """The module that `build()` returns, with random parameters, none drawn by a compiled program.

    Scales are near 1, all others near 0, and integers are 0: what needs the initial values of a
    module, its tables or its keys must build it.
    """
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        values = rng.normal(scale=spread, size=leaf.shape)
        if "scale" in jax.tree_util.keystr(path):
            values += 1
        return values.astype(leaf.dtype)

    return jax.tree.map_with_path(fill, jax.eval_shape(build))


def floats(*shape, seed=0):
    """Normal numbers of float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
