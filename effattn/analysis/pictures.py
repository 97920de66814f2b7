"""Matrices to draw: the pairs of a pattern, tiles of a layout, or weights of a mechanism."""

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

# A pattern, a layout, or a mechanism given by name or function.
Drawable = Pattern | BlockLayout | str | Callable[..., Any]

_LENGTH = 64
# Weights below this share of the largest weight of a row are rounding errors, for example of FFTs.
_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Picture:
    """Matrix to draw, with queries as rows and keys as columns.

    Attributes:
      shades: float `(rows, columns)` in [0, 1]; 0 at pairs that do not attend.
      name: name of the pattern, layout or mechanism.
      tile: numbers of queries and keys in a cell.
      lengths: total numbers of queries and keys.
    """

    shades: np.ndarray
    name: str
    tile: tuple[int, int]
    lengths: tuple[int, int]

    @property
    def density(self) -> float:
        """Share of cells that are not 0."""
        return float((self.shades > 0).mean())


def picture(what: Drawable, length: int | None, head: int, options: dict[str, Any]) -> Picture:
    """Returns the picture for arguments of `draw` or `text`."""
    if isinstance(what, BlockLayout):
        if length is not None:
            raise ValueError(
                f"length must be None for a layout, which has its own lengths, got {length}"
            )
        _without_options(what, options)
        return _of_layout(what, head)
    length = check_length("length", _LENGTH if length is None else length)
    if isinstance(what, Pattern):
        shades = pairs(what, length, options).astype(float)
    else:
        shades = relative_weights(what, length, options)
    return Picture(one_head(shades, head), name_of(what), (1, 1), (length, length))


def pairs(what: Pattern | str | Callable[..., Any], length: int, options: dict[str, Any]):
    """Returns the mask of pairs, bool `(N, T, T)`; N is 1 if all heads are alike."""
    if isinstance(what, Pattern):
        _without_options(what, options)
        mask = what.mask(length)
        return mask if what.heads else mask[None]
    return relative_weights(what, length, options) > 0


def relative_weights(mechanism: str | Callable[..., Any], length: int, options: dict[str, Any]):
    """Returns magnitudes of weights relative to the largest of each row, `(N, T, T)`."""
    alike = np.ones((length, 1, 8), np.float32)
    given = {"query": alike, "key": alike} | options
    for name in ("query", "key"):
        shape = np.shape(given[name])
        if len(shape) != 3 or shape[0] != length:
            raise ValueError(f"{name} must have shape ({length}, heads, features), got {shape}")
    weights = np.abs(np.asarray(mixing_weights(mechanism, **given)))
    largest = weights.max(-1, keepdims=True)
    share = np.divide(weights, largest, out=np.zeros_like(weights), where=largest > 0)
    return np.where(share > _ROUNDING, share, 0)


def text(
    what: Drawable,
    length: int | None = None,
    *,
    width: int = 64,
    head: int = 0,
    **options: Any,
) -> str:
    """Returns the picture of `effattn.analysis.draw` as text, for terminals.

    Queries go down and keys to the right, two characters a cell. `█` is a full cell, `·` an empty
    cell, and `░▒▓` are values in between: a partial tile, a weight below the largest of its row, or
    the mean of several pairs in one cell.

    Args:
      what: as in `draw`.
      length: number of tokens, as in `draw`.
      width: maximum characters in a line, 2 or more.
      head: head to draw, as in `draw`.
      **options: arguments of a mechanism's function, as in `draw`.

    Returns:
      The picture, lines joined by newlines.

    Raises:
      ValueError: as `draw`, or a `width` below 2.
    """
    return lines(picture(what, length, head, options).shades, width)


def receptive_field(
    what: Pattern | str | Callable[..., Any], depth: int, length: int = 256, **options: Any
) -> np.ndarray:
    """Counts the tokens that each output depends on after 0, 1, ..., `depth` layers.

    A layer is a pattern or a mechanism with a residual connection: row d counts the ones in each
    row of (M | I)^d, a boolean matrix power of the mask M, joined over heads. The mask of a
    mechanism is True where its `mixing_weights` are not zero. Time O(edges T / 64) a layer.

    Args:
      what: a pattern, or a mechanism as in `draw`.
      depth: number of layers, 0 or more.
      length: T, number of tokens, up to `LONGEST`.
      **options: options of a mechanism, as in `draw`; a pattern takes none.

    Returns:
      int `(depth + 1, T)`.

    Raises:
      ValueError: sizes out of range, or options for a pattern.
    """
    if not checks.is_integer(depth) or depth < 0:
        raise ValueError(f"depth must be an int, 0 or more layers, got {depth!r}")
    if isinstance(what, BlockLayout):
        raise ValueError(
            "what must be a pattern or a mechanism, got a BlockLayout, which holds tiles and no "
            "single tokens"
        )
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
    """Returns the name of a mechanism with its partial options, or the repr of a pattern."""
    if isinstance(what, functools.partial):
        options = ", ".join(f"{name}={value}" for name, value in what.keywords.items())
        return f"{name_of(what.func)}({options})"
    return repr(what) if isinstance(what, Pattern) else resolve(what, {})[1].name
