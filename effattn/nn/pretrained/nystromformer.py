"""Loader of attention layers of Nystromformer."""

from collections.abc import Mapping
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx

from effattn.arrays import checks
from effattn.nn.options import Dtypes
from effattn.nn.pretrained.attention import PROJECTIONS, checked, with_layers
from effattn.nn.pretrained.layer import Layer, loader
from effattn.nn.self_attention import SelfAttention


@loader
def nystromformer_from_transformers(
    parameters: Mapping[str, Any],
    *,
    num_heads: int,
    num_landmarks: int = 64,
    prefix: str = "",
    **dtypes: Unpack[Dtypes],
) -> SelfAttention:
    """Loads a pretrained Nystromformer layer (`NystromformerAttention` of transformers).

        mixer = nystromformer_from_transformers(
            model.state_dict(), prefix="nystromformer.encoder.layer.0.attention.", num_heads=12)

    As in `longformer_from_transformers`, the mixer returns the update that the layer adds to its
    input. Without padding, it agrees with a transformers layer whose `init_option` is "exact". By
    default, transformers scales the start of the iterative inverse by the largest column sum of all
    heads and examples, not of each one; after the same 6 steps, both are close to the inverse.

    Args:
      parameters: as in `mamba_from_transformers`.
      num_heads: `num_attention_heads` of the transformers config.
      num_landmarks: `num_landmarks` of the transformers config.
      prefix: the part of the names before `self.query.weight`.
      **dtypes: see `effattn.nn.options.Dtypes`.

    Returns:
      A bidirectional `SelfAttention` with biases, and with the convolution of the values if the
      layer has one.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, an array has another shape, or
        heads that do not divide the features.
    """
    checks.at_least("num_landmarks", num_landmarks, 1)
    read = Layer(parameters, prefix, **dtypes)
    convolution = [name for name in ("self.conv.weight", "conv.weight") if read.has(name)]
    layers, features = checked(read, PROJECTIONS, num_heads, convolution)
    options: dict[str, Any] = {}
    for name in convolution:
        width = read.shape(name, 4)[2]
        taps = read(name, num_heads, 1, width, 1)[:, 0, :, 0]
        options["skip_kernel"] = nnx.Param(jnp.asarray(taps, read.dtypes["param_dtype"]))
    mixer = read.build(
        SelfAttention,
        features,
        num_heads,
        "nystrom",
        num_landmarks=num_landmarks,
        is_causal=False,
        use_bias=True,
        **options,
    )
    return with_layers(read, mixer, layers, features)
