"""What `--mechanisms` says: a registered name, its options, and mixtures of them.

bigbird,block_size=8           with options, as Python literals
sliding_window/softmax         layers take turns
convolution*2/bigbird*2        two layers below of one kind, two above of the other
softmax+sliding_window         each has its share of the heads
"""

import ast
import hashlib
import re
from typing import Any

from effattn import registry
from effattn.nn.binding import Binding, bind

# Names of folders have at most 255 bytes: the rest is for what else a name says.
LONGEST_NAME = 160


def parse(
    text: str, layers: int, heads: int, window: int, context: int, is_causal: bool = True
) -> tuple[dict[str, Any], ...]:
    """The mixer of each layer, as `effattn.nn.TransformerConfig` takes it.

    Args:
      text: as above.
      layers: how many.
      heads: N, to be shared.
      window: tokens that a windowed mechanism sees, the present one included.
      context: T; no window is longer, as its decode state would be too.
      is_causal: whether a token sees those before it alone; if not, a window is half on each side.

    Raises:
      ValueError: a text that is none of these, a mechanism that is unknown or cannot be causal (or
        not causal), an option that it does not have or has twice, or more mechanisms than layers or
        heads to share.
    """
    parts: list[tuple[dict[str, Any], int]] = []
    for part in text.split("/"):
        kind, _, times = part.partition("*")
        if times and not (times.isdecimal() and int(times)):
            raise ValueError(f"{part!r} must have a number of layers after its *, 1 or more")
        parts.append((_layer(kind, heads, window, context, is_causal), int(times or 1)))
    count = sum(count for _, count in parts)
    if count > layers:
        raise ValueError(f"{text!r} is of {count} layers in turns, and there are {layers} layers")
    turns = [layer for layer, count in parts for _ in range(count)]
    return tuple(turns[layer % len(turns)] for layer in range(layers))


def folder_name(text: str) -> str:
    """The text, as a name of a folder; a long one is cut, and has its hash at the end."""
    name = text.replace("/", "--").replace("*", "x")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _layer(text: str, heads: int, window: int, context: int, is_causal: bool) -> dict[str, Any]:
    # The plus of 1e+3 belongs to the number.
    parts = re.split(r"(?<!\d[eE])(?<!\.[eE])\+", text)
    groups = [_mechanism(part, window, context, is_causal) for part in parts]
    if len(groups) == 1:
        return groups[0]
    share, rest = divmod(heads, len(groups))
    if rest:
        raise ValueError(f"{text!r} shares {heads} heads among {len(groups)} mechanisms")
    return {"heads": tuple({**group, "num_heads": share} for group in groups)}


def _mechanism(text: str, window: int, context: int, is_causal: bool) -> dict[str, Any]:
    # Commas between brackets belong to a value.
    name, *given = re.split(r",(?![^()\[\]]*[)\]])", text)
    direction = "causal" if is_causal else "bidirectional"
    if name not in registry.names():
        known = ", ".join(registry.names(direction))
        raise ValueError(
            f"unknown mechanism {name!r}; {direction} ones are {known}; --import adds those of "
            "your own modules"
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
            raise ValueError(f"{text!r} gives {key} twice")
        # All that `literal_eval` is said to raise.
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise ValueError(
                f"{key}={value!r} is not a number, a word in quotes or a pair"
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
