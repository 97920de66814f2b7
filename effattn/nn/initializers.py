"""How parameters start."""

from collections.abc import Callable
from typing import Any

from flax import nnx

kernel_init = nnx.initializers.lecun_normal()

embedding_init = nnx.initializers.normal(0.02)


def residual_init(num_layers: int) -> Callable[..., Any]:
    """For projections that end a residual branch: 1 / (2 L) of the usual variance.

    Two branches a layer add to the residual stream, so that their sum starts with a variance that
    does not grow with L. Radford et al. 2019, "Language Models are Unsupervised Multitask
    Learners".
    """
    return nnx.initializers.variance_scaling(1 / (2 * num_layers), "fan_in", "truncated_normal")
