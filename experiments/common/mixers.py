"""What `--mechanisms` says: a registered name, its options, and mixtures of them.

bigbird,block_size=8           with options, as Python literals
sliding_window/softmax         layers take turns
softmax+sliding_window         each has its share of the heads
"""

import ast
import inspect
import re
from typing import Any

from effattn import registry
from effattn.nn import SelfAttention
from effattn.nn.binding import bind


def parse(text: str, layers: int, heads: int, window: int) -> tuple[dict[str, Any], ...]:
    """The mixer of each layer, as `effattn.nn.TransformerConfig` takes it.

    Args:
      text: as above.
      layers: how many.
      heads: N, to be shared.
      window: tokens that a windowed mechanism sees, the present one included.

    Raises:
      ValueError: a text that is none of these, a mechanism that is unknown or not causal, an
        option that it does not have, or more mechanisms than layers or heads to share.
    """
    turns = [_layer(part, heads, window) for part in text.split("/")]
    if len(turns) > layers:
        raise ValueError(
            f"{text!r} has {len(turns)} kinds of layers, and there are {layers} layers"
        )
    return tuple(turns[layer % len(turns)] for layer in range(layers))


def folder_name(text: str) -> str:
    """The text, as a name of a folder."""
    return text.replace("/", "--")


def _layer(text: str, heads: int, window: int) -> dict[str, Any]:
    groups = [_mechanism(part, window) for part in text.split("+")]
    if len(groups) == 1:
        return groups[0]
    share, rest = divmod(heads, len(groups))
    if rest:
        raise ValueError(f"{text!r} shares {heads} heads among {len(groups)} mechanisms")
    return {"heads": tuple({**group, "num_heads": share} for group in groups)}


def _mechanism(text: str, window: int) -> dict[str, Any]:
    # Commas between brackets belong to a value.
    name, *given = re.split(r",(?![^()\[\]]*[)\]])", text)
    causal = registry.names("causal")
    if name not in causal:
        raise ValueError(f"unknown mechanism {name!r}; causal ones are {', '.join(causal)}")
    mixer: dict[str, Any] = {"name": name}
    if "local_window_size" in registry.get(name).options:
        mixer["local_window_size"] = (window - 1, 0)
    for option in given:
        key, _, value = option.partition("=")
        try:
            mixer[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise ValueError(
                f"{key}={value!r} is not a number, a word in quotes or a pair"
            ) from None
    of_module = _options_of_module(registry.load(registry.get(name).builder))
    bind(name, {k: v for k, v in mixer.items() if k != "name" and k not in of_module})
    return mixer


def _options_of_module(builder: Any) -> set[str]:
    """What a mechanism's own module takes, and neither its function nor other modules do."""
    own, general = (inspect.signature(one.__init__).parameters for one in (builder, SelfAttention))
    return own.keys() - general.keys()
