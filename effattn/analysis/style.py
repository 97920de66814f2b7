"""The look of figures: colours that are told apart with any colour vision."""

from typing import Any

# Okabe and Ito's palette; the markers tell lines apart without colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"

EMPTY = "#f2f2f2"


def pyplot() -> Any:
    """`matplotlib.pyplot`, or an `ImportError` that says how to get it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError(
            "figures of effattn.analysis need matplotlib, which is not installed: "
            "pip install 'effattn[analysis]'"
        ) from None
    return plt


def shades() -> Any:
    """From light to dark blue; what is masked is nearly white."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = ["#cfe5f3", COLOURS[0], "#003a61"]
    return LinearSegmentedColormap.from_list("shades", colours).with_extremes(bad=EMPTY)


def signed_shades() -> Any:
    """From orange for negative to blue for positive, pale between; what is masked is white."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = ["#7a3300", COLOURS[1], "#dddddd", COLOURS[0], "#003a61"]
    return LinearSegmentedColormap.from_list("signed", colours).with_extremes(bad="white")
