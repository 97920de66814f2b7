"""The matrices that pictures show: of a pattern, of a layout, or of what a mechanism does."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from effattn.analysis.probes import mixing_weights
from effattn.arrays import checks
from effattn.nn.binding import resolve
from effattn.patterns import Pattern, graphs
from effattn.patterns.characters import check_length, layout_shades, lines, one_head
from effattn.patterns.layouts import BlockLayout

# What can be drawn: a pattern, a layout, or a mechanism as a name or a function.
Drawable = Pattern | BlockLayout | str | Callable[..., Any]

_LENGTH = 64
# Below this share of a row's largest weight is rounding: of Fourier transforms, say.
_NOTHING = 1e-6


@dataclasses.dataclass(frozen=True)
class Picture:
    """A matrix to look at, queries down and keys across.

    Attributes:
      shades: float `(rows, columns)` in [0, 1]; 0 where nothing attends.
      name: of what it shows.
      tile: queries and keys in a cell.
      lengths: queries and keys in all.
    """

    shades: np.ndarray
    name: str
    tile: tuple[int, int]
    lengths: tuple[int, int]

    @property
    def density(self) -> float:
        """The share of cells in which something attends."""
        return float((self.shades > 0).mean())


def picture(what: Drawable, length: int | None, head: int, options: dict[str, Any]) -> Picture:
    """What `draw` and `text` show; their arguments."""
    if isinstance(what, BlockLayout):
        if length is not None:
            raise ValueError(f"length is for patterns and mechanisms, got {length} and a layout")
        _without_options(what, options)
        return _of_layout(what, head)
    length = check_length("length", _LENGTH if length is None else length)
    if isinstance(what, Pattern):
        shades = pairs(what, length, options).astype(float)
    else:
        shades = relative_weights(what, length, options)
    return Picture(one_head(shades, head), name_of(what), (1, 1), (length, length))


def pairs(what: Pattern | str | Callable[..., Any], length: int, options: dict[str, Any]):
    """Bool `(N, T, T)`, which pairs may attend; N is 1 where heads are alike."""
    if isinstance(what, Pattern):
        _without_options(what, options)
        mask = what.mask(length)
        return mask if what.heads else mask[None]
    return relative_weights(what, length, options) > 0


def relative_weights(mechanism: str | Callable[..., Any], length: int, options: dict[str, Any]):
    """`(N, T, T)`, magnitudes of weights as shares of the largest of their row."""
    alike = np.ones((length, 1, 8), np.float32)
    given = {"query": alike, "key": alike} | options
    for name in ("query", "key"):
        shape = np.shape(given[name])
        if len(shape) != 3 or shape[0] != length:
            raise ValueError(f"{name} must have shape ({length}, heads, features), got {shape}")
    weights = np.abs(np.asarray(mixing_weights(mechanism, **given)))
    largest = weights.max(-1, keepdims=True)
    share = np.divide(weights, largest, out=np.zeros_like(weights), where=largest > 0)
    return np.where(share > _NOTHING, share, 0)


def text(
    what: Drawable,
    length: int | None = None,
    *,
    width: int = 64,
    head: int = 0,
    **options: Any,
) -> str:
    """The picture that `effattn.analysis.draw` makes, in characters, for terminals.

    Queries go down and keys to the right, two characters a cell; `█` is a full one, `·` an empty
    one, and `░▒▓` lie between them: a partial tile, a weight below the row's largest, or the mean
    where a cell stands for several.

    Args:
      what: as in `draw`.
      length: tokens, as in `draw`.
      width: the most characters in a line, 2 or more.
      head: which one, where heads differ, as in `draw`.
      **options: arguments of a mechanism's function, as in `draw`.

    Returns:
      The lines.

    Raises:
      ValueError: as `draw`, or a `width` below 2.
    """
    return lines(picture(what, length, head, options).shades, width)


def receptive_field(
    what: Pattern | str | Callable[..., Any], depth: int, length: int = 256, **options: Any
) -> np.ndarray:
    """How many tokens each output depends on after 0, 1, ..., `depth` layers.

    A layer is a pattern or a mechanism, with a residual around it: row d counts the ones in the
    rows of (M | I)^d, a boolean matrix power, M the mask joined over heads. The pairs of a
    mechanism are those of its `mixing_weights` that are not zero. O(edges T / 64) a layer.

    Args:
      what: a pattern, or a mechanism as in `draw`.
      depth: layers, 0 or more.
      length: T, tokens, up to `LONGEST`.
      **options: of the mechanism, as in `draw`; a pattern has none.

    Returns:
      int `(depth + 1, T)`.

    Raises:
      ValueError: sizes out of range, or options of a pattern.
    """
    if not checks.is_integer(depth) or depth < 0:
        raise ValueError(f"depth must be an int, 0 or more layers, got {depth!r}")
    if isinstance(what, BlockLayout):
        raise ValueError("what must be a pattern or a mechanism; a layout knows no single tokens")
    edges = pairs(what, check_length("length", length), options).any(0)
    counts = [count for _, count in zip(range(depth + 1), graphs.reached(edges), strict=False)]
    return np.stack(counts + counts[-1:] * (depth + 1 - len(counts)))


def _of_layout(layout: BlockLayout, head: int) -> Picture:
    name = f"layout in tiles of {layout.tile[0]} x {layout.tile[1]}"
    return Picture(layout_shades(layout, head), name, layout.tile, layout.lengths)


def _without_options(what: Pattern | BlockLayout, options: dict[str, Any]) -> None:
    if options:
        kind = "pattern" if isinstance(what, Pattern) else "layout"
        raise ValueError(f"a {kind} takes no options, got {', '.join(options)}")


def name_of(what: Pattern | str | Callable[..., Any]) -> str:
    """A mechanism's name, with the options of a `functools.partial`; a pattern's own form."""
    if isinstance(what, functools.partial):
        options = ", ".join(f"{name}={value}" for name, value in what.keywords.items())
        return f"{name_of(what.func)}({options})"
    return repr(what) if isinstance(what, Pattern) else resolve(what, {})[1].name
