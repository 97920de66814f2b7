"""Equality of configurations whose options may hold arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx


def same_fields(one: Any, other: Any) -> bool:
    """Returns whether two configurations are equal; arrays among options compare by value."""
    return all(
        same(getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(one)
    )


def same(one: Any, other: Any) -> bool:
    """Returns whether two options are equal; arrays compare by value, parameters by shape."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, nnx.Variable) and isinstance(other, nnx.Variable):
        # Models train copies of the Variable, so only its shape and dtype belong to the config.
        return (type(one), one.shape, one.dtype) == (type(other), other.shape, other.dtype)
    if isinstance(one, nnx.Module) and isinstance(other, nnx.Module):
        # Models train copies of the parameters, so only shapes and dtypes are compared.
        both: Any = [jax.tree.flatten(module) for module in (one, other)]
        shapes = [[(x.shape, x.dtype) for x in leaves] for leaves, _ in both]
        return shapes[0] == shapes[1] and bool(both[0][1] == both[1][1])
    of_arrays = [isinstance(x, (jax.Array, np.ndarray, nnx.Variable)) for x in (one, other)]
    if any(of_arrays):
        return all(of_arrays) and one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)
