"""Compiled calls of layers and models, and functions of NumPy, which tests of layers share."""

import jax
import numpy as np


@jax.jit
def call(module, x, lengths=None, segment_ids=None, **given):
    return module(x, lengths=lengths, segment_ids=segment_ids, **given)


@jax.jit
def extend(module, x, state, lengths=None, **given):
    return module.extend(x, state, lengths=lengths, **given)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)
