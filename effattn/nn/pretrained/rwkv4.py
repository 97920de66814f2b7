"""Loaders of the time mixing and the channel mixing of RWKV-4."""

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np

from effattn.nn.channel_mixing import RWKV4ChannelMix
from effattn.nn.options import Dtypes
from effattn.nn.pretrained.layer import Layer, Pairs, filled, loader
from effattn.nn.rwkv4 import RWKV4


@loader
def rwkv4_from_transformers(
    parameters: Mapping[str, Any],
    *,
    prefix: str = "",
    **dtypes: Unpack[Dtypes],
) -> RWKV4:
    """Loads the pretrained time mixing of RWKV-4 (`RwkvSelfAttention` of transformers).

        mixer = rwkv4_from_transformers(model.state_dict(), prefix="rwkv.blocks.0.attention.")

    In evaluation, a transformers model divides weights of later layers by powers of 2
    (`rescale_every`). So pass its `state_dict()` before the first call, or the arrays of a file.

    Args:
      parameters: as in `mamba_from_transformers`.
      prefix: the part of the names before `time_decay`.
      **dtypes: see `effattn.nn.options.Dtypes`.

    Returns:
      An `RWKV4` mixer.

    Raises:
      ValueError: a name under the prefix is missing or unexpected, or an array has another shape.
    """
    inputs = "receptance", "key", "value"
    read = Layer(parameters, prefix, **dtypes)
    read.expect(("time_decay", "time_first", *_names(inputs, (*inputs, "output"))))
    inner, features = read.shape("key.weight", 2)
    if inner != features:
        raise ValueError(
            f"{prefix}key.weight must be square, because RWKV4 has as many inner features as a "
            f"token has, got {(inner, features)}"
        )
    mixer = read.build(RWKV4, features)
    layers = {"receptance": "receptance", "key": "key", "value": "value", "out": "output"}
    return filled(
        mixer,
        [
            *_shifts(read, mixer, inputs, features),
            (mixer.log_decay, read("time_decay", features)),
            (mixer.bonus, read("time_first", features)),
            *(
                (getattr(mixer, ours).kernel, read.kernel(f"{theirs}.weight", features, features))
                for ours, theirs in layers.items()
            ),
        ],
    )


@loader
def rwkv4_channel_mix_from_transformers(
    parameters: Mapping[str, Any],
    *,
    prefix: str = "",
    **dtypes: Unpack[Dtypes],
) -> RWKV4ChannelMix:
    """Loads the pretrained channel mixing of RWKV-4 (`RwkvFeedForward` of transformers).

    Args:
      parameters: as in `mamba_from_transformers`.
      prefix: the part of the names before `key.weight`, such as "rwkv.blocks.0.feed_forward.".
      **dtypes: see `effattn.nn.options.Dtypes`.

    Returns:
      An `RWKV4ChannelMix` layer.

    Raises:
      ValueError: as `rwkv4_from_transformers`.
    """
    inputs = "receptance", "key"
    read = Layer(parameters, prefix, **dtypes)
    read.expect(_names(inputs, (*inputs, "value")))
    hidden, features = read.shape("key.weight", 2)
    layer = read.build(RWKV4ChannelMix, features, hidden)
    return filled(
        layer,
        [
            *_shifts(read, layer, inputs, features),
            (layer.receptance.kernel, read.kernel("receptance.weight", features, features)),
            (layer.key.kernel, read.kernel("key.weight", features, hidden)),
            (layer.value.kernel, read.kernel("value.weight", hidden, features)),
        ],
    )


def _names(inputs: tuple[str, ...], layers: tuple[str, ...]) -> list[str]:
    return [*(f"time_mix_{name}" for name in inputs), *(f"{name}.weight" for name in layers)]


def _shifts(read: Layer, ours: Any, inputs: tuple[str, ...], features: int) -> Pairs:
    """The amounts of the token shift of each input."""
    amounts = [read(f"time_mix_{name}", 1, 1, features).ravel() for name in inputs]
    return [(ours.shifts, np.stack(amounts))]
