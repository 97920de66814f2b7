"""Parser of `--mechanisms`: registered names, options and combinations.

bigbird,block_size=8           a mechanism with options, written as Python literals
sliding_window/softmax         layers take turns
convolution*2/bigbird*2        two layers of convolution below two layers of BigBird
softmax+sliding_window         each mechanism has an equal share of the heads
"""

import ast
import hashlib
import re
from typing import Any

from effattn import registry
from effattn.nn.binding import Binding, bind

# Folder names have at most 255 bytes; learning rate and seed follow the mechanism's name.
LONGEST_NAME = 160


def parse(
    text: str, layers: int, heads: int, window: int, context: int, is_causal: bool = True
) -> tuple[dict[str, Any], ...]:
    """Returns the mixer of each layer for `effattn.nn.TransformerConfig`.

    Args:
      text: one of the forms in the docstring of this file.
      layers: number of layers.
      heads: N, shared among the mechanisms of a layer.
      window: tokens in the window of a windowed mechanism, the present token included.
      context: T; windows are no longer than T, so that decode states are no larger.
      is_causal: whether the mechanisms are causal; bidirectional windows are half on each side.

    Raises:
      ValueError: the text has another form; a mechanism is unknown or does not support the
        direction; an option is unknown or given twice; or there are more mechanisms than layers, or
        mechanisms that do not divide the heads.
    """
    parts: list[tuple[dict[str, Any], int]] = []
    for part in text.split("/"):
        kind, _, times = part.partition("*")
        if times and not (times.isdecimal() and int(times)):
            raise ValueError(f"{part!r} must have a number of layers after the *, 1 or more")
        parts.append((_layer(kind, heads, window, context, is_causal), int(times or 1)))
    count = sum(count for _, count in parts)
    if count > layers:
        raise ValueError(f"{text!r} names {count} layers, but --layers is {layers}")
    turns = [layer for layer, count in parts for _ in range(count)]
    return tuple(turns[layer % len(turns)] for layer in range(layers))


def folder_name(text: str) -> str:
    """Returns a folder name for the text; a long name is cut and ends in a hash."""
    name = text.replace("/", "--").replace("*", "x")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _layer(text: str, heads: int, window: int, context: int, is_causal: bool) -> dict[str, Any]:
    # The plus sign of 1e+3 is part of the number.
    parts = re.split(r"(?<!\d[eE])(?<!\.[eE])\+", text)
    groups = [_mechanism(part, window, context, is_causal) for part in parts]
    if len(groups) == 1:
        return groups[0]
    share, rest = divmod(heads, len(groups))
    if rest:
        raise ValueError(
            f"the number of mechanisms in {text!r} must divide --heads {heads}, got {len(groups)}"
        )
    return {"heads": tuple({**group, "num_heads": share} for group in groups)}


def _mechanism(text: str, window: int, context: int, is_causal: bool) -> dict[str, Any]:
    # Commas between brackets are part of a value.
    name, *given = re.split(r",(?![^()\[\]]*[)\]])", text)
    direction = "causal" if is_causal else "bidirectional"
    if name not in registry.names():
        known = ", ".join(registry.names(direction))
        raise ValueError(
            f"unknown mechanism {name!r}; {direction} mechanisms are {known}; --import adds "
            "mechanisms of your own modules"
        )
    entry = registry.get(name)
    Binding.of(name).require(direction, f"is_causal={is_causal}")
    mixer: dict[str, Any] = {"name": name}
    if entry.options.get("local_window_size") is not None:
        after = 0 if is_causal else (window - 1) // 2
        mixer["local_window_size"] = tuple(
            min(reach, context - 1) for reach in (window - 1 - after, after)
        )
    options: dict[str, Any] = {}
    for option in given:
        key, _, value = option.partition("=")
        if key in options:
            raise ValueError(f"{text!r} gives {key} twice; give it once")
        # All errors that the documentation of `literal_eval` names.
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise ValueError(
                f"option {key} must be a number, a word in quotes or a pair, got {value!r}"
            ) from None
    of_mixer = entry.mixer_options()
    others = {key: value for key, value in options.items() if key not in of_mixer}
    if entry.takes_heads:
        bind(name, others)
    elif others:
        raise ValueError(
            f"{name!r} has no option {', '.join(others)}; its options are "
            f"{', '.join(sorted(of_mixer)) or 'none'}"
        )
    return mixer | options
