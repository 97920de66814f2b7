"""Text pictures of token-by-token matrices, for terminals."""

from typing import Any

import jax
import numpy as np

from effattn.arrays import checks

# Most tokens of a picture: T x T weights in float32 then take 16 MB for each head and example.
LONGEST = 2048

_SHADES = "·░▒▓█"


def check_length(name: str, length: Any) -> int:
    """Returns the length; `ValueError` unless it is an int from 1 to `LONGEST`."""
    if not checks.is_integer(length) or not 1 <= length <= LONGEST:
        raise ValueError(
            f"{name} must be an int from 1 to {LONGEST}, because the picture has all pairs of "
            f"tokens, got {length!r}"
        )
    return int(length)


def layout_shades(layout: Any, head: int) -> np.ndarray:
    """Returns the tiles of one head of a layout: 0 is not visited, 1/2 is partial, 1 is full."""
    if isinstance(layout.partial_indices, jax.core.Tracer):
        raise ValueError(
            "layout must have known arrays to be drawn, got traced ones; draw it outside of jit"
        )
    for name, tiles in zip(("query tiles", "key tiles"), layout.grid, strict=True):
        check_length(f"the number of {name}", tiles)
    visited, full = np.asarray(layout.block_mask()), np.asarray(layout._mask("full"))
    return one_head((visited / 2 + full / 2).reshape(-1, *layout.grid), head)


def one_head(shades: np.ndarray, head: int) -> np.ndarray:
    """Returns `shades[head]`; raises `ValueError` if the head is out of range."""
    if not checks.is_integer(head) or not 0 <= head < len(shades):
        raise ValueError(f"head must be an int from 0 to {len(shades) - 1}, got {head!r}")
    return shades[head]


def lines(shades: np.ndarray, width: int) -> str:
    """Renders a matrix in [0, 1] as text: two characters a cell, at most `width` in a line."""
    if not checks.is_integer(width) or width < 2:
        raise ValueError(f"width must be an int, 2 or more, got {width!r}")
    step = -(-2 * max(shades.shape) // width)
    rows, columns = (np.arange(0, side, step) for side in shades.shape)
    total = np.add.reduceat(np.add.reduceat(shades, rows, 0), columns, 1)
    area = np.add.reduceat(np.ones(shades.shape[0]), rows)[:, None] * np.add.reduceat(
        np.ones(shades.shape[1]), columns
    )
    share = total / area
    level = np.where(share == 0, 0, np.where(share > 1 - 1e-6, 4, 1 + (3 * share).astype(int)))
    return "\n".join("".join(2 * _SHADES[shade] for shade in line) for line in level)
