"""Style of figures: colours that readers with any colour vision can tell apart."""

from typing import Any

# Palette of Okabe and Ito; markers distinguish lines without colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"

EMPTY = "#f2f2f2"
_LINES = "-", ":", "-."


def line(index: int) -> dict[str, Any]:
    """Returns colour, marker and line style of the line `index`; up to 21 lines differ in two."""
    turn, index = divmod(index, len(COLOURS))
    marker = MARKERS[(index - turn) % len(MARKERS)]
    return {"color": COLOURS[index], "marker": marker, "linestyle": _LINES[turn % len(_LINES)]}


def pyplot() -> Any:
    """Returns `matplotlib.pyplot`; the `ImportError` says how to install matplotlib."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError(
            "figures of effattn.analysis need matplotlib, which is not installed: "
            "pip install 'effattn[analysis]'"
        ) from None
    return plt


def shades() -> Any:
    """Returns the colour map from light to dark blue; masked cells are nearly white."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = ["#cfe5f3", COLOURS[0], "#003a61"]
    return LinearSegmentedColormap.from_list("shades", colours).with_extremes(bad=EMPTY)


def signed_shades() -> Any:
    """Returns the colour map from orange (negative) to blue (positive); masked cells are white."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = ["#7a3300", COLOURS[1], "#dddddd", COLOURS[0], "#003a61"]
    return LinearSegmentedColormap.from_list("signed", colours).with_extremes(bad="white")
