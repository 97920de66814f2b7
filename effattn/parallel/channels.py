"""Sequence parallelism by exchange of channels, for long convolutions and other token mixers."""

from collections.abc import Callable
from typing import Any

import jax

from effattn.parallel.parts import over_parts


def exchange_channels(function: Callable[..., Any], axis_name: str) -> Callable[..., jax.Array]:
    """Returns a token mixer for a sequence whose tokens the devices of a mesh axis hold in parts.

    The mixer works on each channel separately. An all-to-all gives each of P devices all T tokens
    of D / P channels; it mixes them, and a second all-to-all gives back its own tokens of all D
    channels. Each device sends and receives (P - 1) / P of its parts of the inputs and the output:
    for Hyena N gates, a value and an output. Filters and other parameters are on all devices.

    Call the result inside `jax.shard_map`, with the tokens of this device; lengths count all
    tokens.

    Args:
      function: `hyena_convolution`, `long_convolution`, `attention_free`, `spatial_gating` or
        `fourier_mixing` (which exchanges complex channels) of effattn, `functools.partial` of one,
        or a mixer of one from `effattn.nn`, also `nn.S4`. A short convolution of a mixer gets the
        last tokens of the device before.
      axis_name: the mesh axis that divides the tokens.

    Returns:
      A function with the arguments of `function`, without `segment_ids` and states.

    Raises:
      ValueError: on call, the function is none of these, the devices do not divide the channels, or
        filters are shorter than the whole sequence.
    """
    return over_parts("exchange_channels", function, axis_name)
