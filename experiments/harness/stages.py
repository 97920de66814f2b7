"""Arrays of a model in stages, by the names that they have in the same model without stages.

In a `PipelinedLM` of S stages, an array of stages[i] has an additional leading axis of S entries,
one for each stage. Entry s is the array of blocks[s * n + i], if a stage has n layers.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

_LAYER = re.compile(r"\['stages'\]\[(\d+)\]")


def apart(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns leaves by path, with an array for each layer; `leaf[s]` is that of stage s."""
    names = _names(leaves)
    found: dict[str, Any] = {}
    for name, leaf in leaves.items():
        layers = names[name]
        found |= {name: leaf} if layers is None else dict(zip(layers, leaf, strict=True))
    return found


def shapes_apart(leaves: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the arrays of `apart`."""

    def of(leaf: Any, axes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype)

    names = _names(leaves)
    return {
        name: of(leaves[each], 0 if names[each] is None else 1)
        for each in leaves
        for name in names[each] or (each,)
    }


def together(like: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inverse of `apart`: stacks the arrays of layers to those with the paths of `like`."""
    return {
        name: arrays[name] if layers is None else np.stack([arrays[layer] for layer in layers])
        for name, layers in _names(like).items()
    }


def _names(leaves):
    """For each path, those of the layers of an array of stages; None for other arrays."""
    matches = {name: _LAYER.search(name) for name in leaves}
    count = 1 + max((int(match[1]) for match in matches.values() if match), default=0)

    def layers(name, leaf):
        if (match := matches[name]) is None:
            return None
        start, end = match.span()
        numbers = (stage * count + int(match[1]) for stage in range(leaf.shape[0]))
        return [f"{name[:start]}['blocks'][{number}]{name[end:]}" for number in numbers]

    return {name: layers(name, leaf) for name, leaf in leaves.items()}
