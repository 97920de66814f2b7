"""Modules for tests to which no initial value matters."""

import jax
import jax.numpy as jnp
import numpy as np


def filled(build, seed=0, spread=1 / 4):
    """The module that `build()` returns, with random parameters, none drawn by a compiled program.

    Scales are near 1, all others near 0, integers are 0 and keys alike: what needs the initial
    values of a module, or its tables, must build it.
    """
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        values = rng.normal(scale=spread, size=leaf.shape)
        if "scale" in jax.tree_util.keystr(path):
            values += 1
        return values.astype(leaf.dtype)

    return jax.tree.map_with_path(fill, jax.eval_shape(build))


def floats(*shape, seed=0):
    """Normal numbers of float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
