"""Figures of attention. Drawing a figure imports Matplotlib."""

import math
import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from effattn.analysis import style
from effattn.analysis.pictures import Drawable, picture, receptive_field
from effattn.analysis.probes import probe
from effattn.arrays import checks
from effattn.patterns import Pattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_HEADS_IN_A_ROW = 4


def draw(
    what: Drawable,
    length: int | None = None,
    *,
    head: int = 0,
    name: str | None = None,
    ax: "Axes | None" = None,
    **options: Any,
) -> "Axes":
    """Draws which keys each query attends to: queries go down, keys to the right.

    The figure of a pattern shows its mask, and that of a layout its tiles (partial tiles lighter).
    The figure of a mechanism shows its `mixing_weights`, measured by a call of the function; the
    shade of a pair is its weight relative to the largest weight of the row. By default all queries
    and all keys are equal, so softmax attention has uniform weights over its pattern. The title
    gives the density: the share of pairs (for a layout: of tiles) that attend. Time O(N^2) in the
    number of tokens or tiles.

    Args:
      what: a pattern of `effattn.patterns`, a `BlockLayout`, or a mechanism: a registered name, a
        function of query, key and value, or a `functools.partial` of one.
      length: number of tokens, up to `effattn.analysis.LONGEST`, default 64; not for layouts.
      head: head to draw, if heads differ; the index counts through all leading axes of a layout.
      name: name in the title; by default the name of the mechanism or the repr of the pattern.
      ax: axes to draw in; by default a new figure.
      **options: arguments of a mechanism's function, such as `is_causal=True`; also `query` and
        `key`, `(length, heads, features)`, in place of the equal ones.

    Returns:
      The axes; `.figure.savefig(path)` writes the figure.

    Raises:
      ValueError: sizes or a head out of range, or options for a pattern or a layout.
      ImportError: matplotlib is not installed.
    """
    plt = style.pyplot()
    shown = picture(what, length, head, options)
    if ax is None:
        ax = plt.subplots(figsize=(4, 4.4), layout="constrained")[1]
    rows, columns = (n * t for n, t in zip(shown.shades.shape, shown.tile, strict=True))
    _show(ax, shown.shades, (rows, columns), cmap=style.shades(), vmin=0, vmax=1)
    ax.set_xlim(-0.5, shown.lengths[1] - 0.5)
    ax.set_ylim(shown.lengths[0] - 0.5, -0.5)
    title = textwrap.fill(shown.name if name is None else name, 40)
    ax.set_title(f"{title}\ndensity {100 * shown.density:.3g} %")
    return ax


def draw_receptive_field(
    layers: Mapping[str, Pattern | str | Callable[..., Any]],
    depth: int,
    length: int = 256,
    *,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the size of the receptive field against the number of layers.

    The figure shows `receptive_field`, averaged over positions. A causal pattern reaches about half
    of the tokens at most.

    Args:
      layers: maps names in the legend to patterns or mechanisms (options of a mechanism come in a
        `functools.partial`).
      depth: maximum number of layers.
      length: number of tokens, up to `effattn.analysis.LONGEST`.
      ax: axes to draw in; by default a new figure.

    Returns:
      The axes.

    Raises:
      ValueError: sizes out of range.
      ImportError: matplotlib is not installed.
    """
    plt = style.pyplot()
    from matplotlib.ticker import MaxNLocator

    if ax is None:
        ax = plt.subplots(figsize=(6, 4.2), layout="constrained")[1]
    for index, (name, what) in enumerate(layers.items()):
        reach = receptive_field(what, depth, length).mean(-1)
        colour = style.COLOURS[index % len(style.COLOURS)]
        marker = style.MARKERS[index % len(style.MARKERS)]
        # Later markers are smaller, so that they do not hide earlier markers at the same point.
        ax.plot(reach, color=colour, marker=marker, markersize=max(4, 11 - index), label=name)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="layers", ylabel=f"tokens reached, of {length} (mean over positions)")
    ax.grid(alpha=0.3)
    ax.legend()
    return ax


def draw_attention(
    module: nnx.Module,
    *inputs: ArrayLike,
    layer: int | None = None,
    example: int = 0,
    figure: "Figure | SubFigure | None" = None,
    **arguments: Any,
) -> "Figure | SubFigure":
    """Draws the `attention_weights` of each head of a layer, for one example.

    The title says "attention weight" for softmax attention over any pattern, and "effective mixing
    weight" for other mechanisms. Exact zeros have the colour of the background. The colour scale is
    a square root, or symmetric logarithmic if weights are negative.

    Args:
      module: a `SelfAttention`, `CrossAttention` or `TransformerLM` of `effattn.nn`.
      *inputs: inputs of the module.
      layer: index of the layer of a `TransformerLM`.
      example: index of the example in the batch.
      figure: figure or subfigure to draw in; by default a new figure.
      **arguments: other arguments of the module, as in `attention_weights`.

    Returns:
      The figure.

    Raises:
      ValueError: as `attention_weights`, or `example` is out of range.
      ImportError: matplotlib is not installed.
    """
    plt = style.pyplot()
    from matplotlib.colors import PowerNorm, SymLogNorm

    found = probe(module, *inputs, layer=layer, **arguments)
    if not checks.is_integer(example) or not 0 <= example < len(found.weights):
        raise ValueError(
            f"example must be an int from 0 to {len(found.weights) - 1}, got {example!r}"
        )
    weights = np.asarray(found.weights[example], np.float64)
    heads, columns = len(weights), min(len(weights), _HEADS_IN_A_ROW)
    rows = -(-heads // columns)
    if figure is None:
        figure = plt.figure(figsize=(1 + 2.5 * columns, 0.8 + 2.6 * rows), layout="constrained")
    largest = np.abs(weights).max() or 1.0
    look: dict[str, Any] = {"cmap": style.shades(), "norm": PowerNorm(0.5, 0, largest)}
    if weights.min() < 0:
        norm = SymLogNorm(largest / 100, vmin=-largest, vmax=largest)
        look = {"cmap": style.signed_shades(), "norm": norm}
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for head, ax in enumerate(grid.flat):
        if head >= heads:
            ax.remove()
            continue
        image = _show(ax, weights[head], weights[head].shape, **look)
        ax.set_title(f"head {head}", fontsize="medium")
        ax.label_outer()
    kind = "attention weight" if found.softmax else "effective mixing weight"
    where = found.name if layer is None else f"{found.name}, layer {layer}"
    figure.suptitle(f"{where}: {kind}", x=0.01, ha="left", weight="bold")
    figure.colorbar(image, ax=list(grid.flat[:heads]), label=kind)
    return figure


def _show(ax: Any, matrix: np.ndarray, extent: tuple[int, int], **look: Any) -> Any:
    """Draws a matrix with zeros masked; position 0 is the centre of the first cell."""
    rows, columns = extent
    image = ax.imshow(
        np.ma.masked_equal(matrix, 0),
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
        interpolation="nearest",
        **look,
    )
    ax.set(xlabel="key position", ylabel="query position")
    for axis, side in ((ax.xaxis, columns), (ax.yaxis, rows)):
        # Ticks at multiples of a power of two, like the sizes of tiles and blocks.
        axis.set_ticks(range(0, side, 2 ** max(0, math.ceil(math.log2(side / 4)))))
    return image
