"""Parser of `--mechanisms`: registered names, patterns of images, options and combinations.

bigbird,block_size=8           a mechanism with options, written as Python literals
sliding_window/softmax         layers take turns
convolution*2/bigbird*2        two layers of convolution below two layers of BigBird
softmax+sliding_window         each mechanism has an equal share of the heads
axial                          softmax attention within rows and columns of a square image
grid,window=2                  softmax attention to pixels at most 2 rows and columns away
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from effattn import registry, sparse_attention
from effattn.nn.binding import Binding, bind
from effattn.patterns import Axial, Grid, Pattern
from experiments.harness.naming import options_of

# Options by mechanism.
OfLength = Mapping[str, Mapping[str, Any]]


def sizes(
    length: int, window: int | None, is_causal: bool, longest: int | None = None
) -> dict[str, dict[str, Any]]:
    """Returns the options that follow from the length, by mechanism.

    Windows have a quarter of the tokens, as have the projections, landmarks and segments of
    mechanisms with a fixed number of those. Blocks, strides, chunks, buckets, clusters and the
    global tokens of Longformer, the first of a row, have about the square root of the number of
    tokens, which costs least where a mechanism attends within and across them. A mixture of
    mechanisms chooses between this window and exact attention.

    Args:
      length: T, the largest number of tokens in training.
      window: tokens in windows, the present token included; default T / 4.
      is_causal: whether windows are on one side; otherwise they are half on each side.
      longest: largest number of tokens in tests; default T.
    """
    root = 2 ** (max(1, round(math.log2(length))) // 2)
    quarter = max(1, length // 4)
    window = window or quarter
    after = 0 if is_causal else (window - 1) // 2
    # Windows are no longer than the sequence, so that decode states are no larger.
    reach = tuple(min(reach, length - 1) for reach in (window - 1 - after, after))
    windowed = {
        name: {"local_window_size": reach}
        for name in registry.names()
        if registry.get(name).options.get("local_window_size") is not None
    }
    window_mixer = {"name": "sliding_window", **windowed["sliding_window"]}
    return windowed | {
        "longformer": {**windowed["longformer"], "global_tokens": root},
        "mixture_of_mechanisms": {"mechanisms": (window_mixer, "softmax")},
        "streaming": {"window_size": window},
        "adaptive_span": {"max_span": window},
        "sparse_transformer": {"stride": root},
        "block_sparse": {"block_size": root},
        "bigbird": {"block_size": root},
        "random": {"block_size": root},
        "moba": {"block_size": root},
        "learned_blocks": {"block_size": root},
        "sinkhorn": {"block_size": root},
        "indexed": {"top_k": quarter},
        "native_sparse": {
            "compression_size": max(2, root // 2),
            "compression_stride": max(1, root // 4),
            "block_size": root,
            "num_selected": 4,
            "window_size": window,
        },
        "hierarchical": {"segment_size": root, "num_summaries": max(1, root // 4)},
        "cosformer": {"max_length": longest or length},
        "linformer": {"num_projected": quarter},
        "block_linformer": {"block_size": root, "num_projected": max(1, root // 4)},
        "long_short": {"window_size": root},
        "nystrom": {"num_landmarks": quarter},
        "lsh": {"num_buckets": root, "chunk_length": root},
        "routing": {"num_clusters": root, "cluster_size": max(1, length // root)},
        "recurrent_memory": {"segment_size": quarter},
        "infini": {"segment_size": quarter},
        "inducing_points": {"num_points": quarter},
        "luna": {"num_packed": quarter},
        "compressive": {
            "segment_size": max(4, quarter // 4 * 4),
            "memory_size": max(4, quarter // 4 * 4),
            "num_slots": max(1, quarter // 4),
            "compression_rate": 4,
        },
        "transformer_xl": {"segment_size": quarter, "memory_size": quarter},
        "mega": {"chunk_length": quarter},
    }


def parse(
    text: str,
    layers: int,
    heads: int,
    window: int | None,
    length: int,
    is_causal: bool = True,
    longest: int | None = None,
) -> tuple[dict[str, Any], ...]:
    """Returns the mixer of each layer for `effattn.nn.TransformerConfig`.

    Args:
      text: one of the forms in the docstring of this file.
      layers: number of layers.
      heads: N, shared among the mechanisms of a layer.
      window: as in `sizes`.
      length: T, the largest number of tokens; options that are not given follow it (see `sizes`).
      is_causal: whether the mechanisms are causal.
      longest: as in `sizes`.

    Raises:
      ValueError: the text has another form; a mechanism is unknown or does not support the
        direction; an option is unknown or given twice; or there are more mechanisms than layers, or
        mechanisms that do not divide the heads.
    """
    of_length = sizes(length, window, is_causal, longest)
    parts: list[tuple[dict[str, Any], int]] = []
    for part in text.split("/"):
        kind, _, times = part.partition("*")
        if times and not (times.isdecimal() and int(times)):
            raise ValueError(f"{part!r} must have a number of layers after the *, 1 or more")
        layer = _layer(kind, heads, of_length, longest or length, is_causal)
        parts.append((layer, int(times or 1)))
    count = sum(count for _, count in parts)
    if count > layers:
        raise ValueError(f"{text!r} names {count} layers, but --layers is {layers}")
    turns = [layer for layer, count in parts for _ in range(count)]
    return tuple(turns[layer % len(turns)] for layer in range(layers))


def _layer(
    text: str, heads: int, of_length: OfLength, longest: int, is_causal: bool
) -> dict[str, Any]:
    # The plus sign of 1e+3 is part of the number.
    parts = re.split(r"(?<!\d[eE])(?<!\.[eE])\+", text)
    groups = [_mechanism(part, of_length, longest, is_causal) for part in parts]
    if len(groups) == 1:
        return groups[0]
    share, rest = divmod(heads, len(groups))
    if rest:
        raise ValueError(
            f"the number of mechanisms in {text!r} must divide --heads {heads}, got {len(groups)}"
        )
    return {"heads": tuple({**group, "num_heads": share} for group in groups)}


def _of_image(name: str, options: dict[str, Any], length: int) -> dict[str, Any]:
    """Returns the mixer of a pattern of images, by default square."""
    side = math.isqrt(length)
    sizes = {"height": side, "width": side} | ({"window": 1} if name == "grid" else {})
    unknown = options.keys() - sizes.keys()
    if unknown:
        raise ValueError(
            f"{name!r} has no option {', '.join(unknown)}; its options are {', '.join(sizes)}"
        )
    if side**2 != length and not {"height", "width"} <= options.keys():
        raise ValueError(f"{name!r} needs height and width, as {length} is no square number")
    sizes |= options
    if sizes["height"] * sizes["width"] != length:
        raise ValueError(
            f"{name!r} needs height times width to be the {length} pixels of an image, got "
            f"{sizes['height']} and {sizes['width']}"
        )
    pattern = _IMAGES[name](**sizes)
    return {"name": functools.partial(sparse_attention, pattern=pattern)}


_IMAGES: Mapping[str, Callable[..., Pattern]] = {"axial": Axial, "grid": Grid}


def _mechanism(text: str, of_length: OfLength, longest: int, is_causal: bool) -> dict[str, Any]:
    name, options = options_of(text)
    if name in _IMAGES:
        return _of_image(name, options, longest)
    direction = "causal" if is_causal else "bidirectional"
    if name not in registry.names():
        known = ", ".join(registry.names(direction))
        raise ValueError(
            f"unknown mechanism {name!r}; {direction} mechanisms are {known}; --import adds "
            "mechanisms of your own modules"
        )
    entry = registry.get(name)
    Binding.of(name).require(direction, f"is_causal={is_causal}")
    mixer: dict[str, Any] = {"name": name, **of_length.get(name, {})}
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
