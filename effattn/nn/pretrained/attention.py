"""Attention layers of BERT's kind, with biases, which several models of transformers have."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from effattn.nn.pretrained.layer import Layer, check_heads, filled

# Names of the projections to heads: in this library, and in transformers.
PROJECTIONS = {"query": "query", "key": "key", "value": "value"}
_NOT_LOADED = "output.LayerNorm.weight", "output.LayerNorm.bias"


def checked(
    read: Layer, projections: Mapping[str, str], num_heads: int, further: Iterable[str] = ()
) -> tuple[dict[str, str], int]:
    """Checks the names and the heads of a layer, or of its part `self` alone.

    Returns:
      The names of the linear layers in transformers by those here, and the features D.
    """
    alone = read.has("query.weight")
    layers = {ours: name if alone else f"self.{name}" for ours, name in projections.items()}
    if not alone:
        layers["out"] = "output.dense"
    names = [f"{name}.{kind}" for name in layers.values() for kind in ("weight", "bias")]
    read.expect([*names, *further], ignored=_NOT_LOADED)
    weight, bias = names[:2]
    features = read.sizes({bias: "features", weight: "features features"})["features"]
    check_heads(num_heads, features)
    return layers, features


def with_layers(read: Layer, mixer: Any, layers: Mapping[str, str], features: int) -> Any:
    """The mixer with the layers of `checked`; without an output layer, with the identity."""
    arrays = []
    for ours, theirs in layers.items():
        arrays += read.with_bias(getattr(mixer, ours), theirs, features, features)
    if "out" not in layers:
        arrays += [(mixer.out.kernel, np.eye(features)), (mixer.out.bias, np.zeros(features))]
    return filled(mixer, arrays)
