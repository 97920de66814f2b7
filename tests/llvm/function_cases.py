"""Calls of functions with all gradients, by the CPU kernels and in float64."""

import functools

import jax
import numpy as np


def with_gradients(function, arrays, implementation, dtype, **options):
    """Results of a call with a state, and the gradients of all arrays, in `dtype`."""
    call = functools.partial(function, return_state=True, implementation=implementation, **options)

    @jax.jit
    def run(arrays):
        results, pull_back = jax.vjp(lambda given: call(**given), arrays)
        cotangents = jax.tree.map(
            lambda x: ((np.arange(x.size).reshape(x.shape) % 7 - 3) / 4).astype(x.dtype), results
        )
        return results, pull_back(cotangents)

    return run({name: x.astype(dtype) for name, x in arrays.items()})


def by_kernel(function, arrays, **options):
    """`with_gradients` by the kernels, in float32."""
    return with_gradients(function, arrays, "llvm", np.float32, **options)


def exact(function, arrays, **options):
    """`with_gradients` in XLA, in float64."""
    with jax.enable_x64(True):
        return with_gradients(function, arrays, "xla", np.float64, **options)
