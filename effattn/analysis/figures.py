"""The figures. Matplotlib is imported when one is drawn."""

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

    A pattern is drawn by its mask, a layout by its tiles, the partial ones lighter. A mechanism is
    drawn by what it really does: by its `mixing_weights`, read off from a call of the function. A
    pair is as dark as its weight is large beside the largest of its row. With all queries and keys
    alike, the default, softmax attention spreads evenly over its pattern. The title has the
    density, the share of the pairs (of a layout: of the tiles) in which something attends. O(N^2)
    in the number of tokens, or of tiles.

    Args:
      what: a pattern of `effattn.patterns`, a `BlockLayout`, or a mechanism: a registered name, a
        function of query, key and value, or a `functools.partial` of one.
      length: tokens, up to `effattn.analysis.LONGEST`, by default 64. A layout has its own.
      head: which one, where heads differ; through all leading axes of a layout.
      name: for the title; by default what the thing calls itself.
      ax: where to draw; by default a new figure.
      **options: arguments of a mechanism's function, `is_causal=True` say; `query` and `key` too,
        `(length, heads, features)`, where they should not be alike or heads differ.

    Returns:
      The axes; `.figure.savefig(path)` writes them.

    Raises:
      ValueError: sizes out of range, a head that is not there, options of what takes none.
      ImportError: there is no matplotlib.
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
    """Draws how many tokens an output depends on, against the number of layers.

    It is the mean over all positions of `receptive_field`. A causal pattern reaches half of the
    tokens at most.

    Args:
      layers: what each layer is, a pattern or a mechanism (with its options in a
        `functools.partial`), by the name for the legend.
      depth: the largest number of layers.
      length: tokens, up to `effattn.analysis.LONGEST`.
      ax: where to draw; by default a new figure.

    Returns:
      The axes.

    Raises:
      ValueError: sizes out of range.
      ImportError: there is no matplotlib.
    """
    plt = style.pyplot()
    from matplotlib.ticker import MaxNLocator

    if ax is None:
        ax = plt.subplots(figsize=(6, 4.2), layout="constrained")[1]
    for index, (name, what) in enumerate(layers.items()):
        reach = receptive_field(what, depth, length).mean(-1)
        colour = style.COLOURS[index % len(style.COLOURS)]
        marker = style.MARKERS[index % len(style.MARKERS)]
        # The later ones smaller, or they would hide the others where all reach everything.
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
    """Draws the weights that each head of a layer really gives to each key, for one example.

    They are those of `attention_weights`. The title says "attention weight" for softmax attention,
    whatever its pattern, and "effective mixing weight" for mechanisms that have no such weights.
    Exact zeros have the colour of the background; the scale is that of square roots.

    Args:
      module: a `SelfAttention`, `CrossAttention` or `TransformerLM` of `effattn.nn`.
      *inputs: what it is called with.
      layer: of a `TransformerLM`.
      example: which one of the batch.
      figure: where to draw, a figure or a subfigure; by default a new one.
      **arguments: further ones of the call, as in `attention_weights`.

    Returns:
      The figure.

    Raises:
      ValueError: as `attention_weights`, or an example that is not in the batch.
      ImportError: there is no matplotlib.
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
    """Cells with zeros masked; position 0 is the middle of the first one."""
    rows, columns = extent
    image = ax.imshow(
        np.ma.masked_equal(matrix, 0),
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
        interpolation="nearest",
        **look,
    )
    ax.set(xlabel="key position", ylabel="query position")
    for axis, side in ((ax.xaxis, columns), (ax.yaxis, rows)):
        # Every so many, a power of two as tiles and blocks are.
        axis.set_ticks(range(0, side, 2 ** max(0, math.ceil(math.log2(side / 4)))))
    return image
