"""Named patterns of papers: Longformer, BigBird and Sparse Transformer."""

from collections.abc import Sequence
from typing import Literal

from effattn.arrays.checks import at_least, is_integer
from effattn.patterns.algebra import Pattern, sides
from effattn.patterns.base import (
    Causal,
    Dilated,
    Fixed,
    Global,
    SlidingWindow,
    Strided,
)
from effattn.patterns.blocks import GlobalBlocks, RandomBlocks


def longformer(
    local_window_size: int | tuple[int, int],
    global_positions: int | Sequence[int],
    dilation: int = 1,
    causal: bool = False,
) -> Pattern:
    """A window, dilated or not, and global positions (Beltagy et al. 2020, "Longformer").

    Args:
      local_window_size: w or (left, right), steps on each side; the token itself is not counted.
      global_positions: global positions, or the number of leading global positions.
      dilation: tokens in a step of the window.
      causal: add the causal mask.
    """
    left, right = sides("local_window_size", local_window_size)
    near: Pattern = SlidingWindow(left, right)
    if dilation != 1:
        near = Dilated((left, right), dilation)
    return _causal(near | Global(global_positions), causal)


def bigbird(
    block_size: int,
    num_window_blocks: int = 3,
    num_global_blocks: int | tuple[int, int] = 1,
    num_random_blocks: int = 3,
    seed: int = 0,
    causal: bool = False,
) -> Pattern:
    """Window, global and random blocks (Zaheer et al. 2020, "Big Bird", internal construction).

    Random blocks exclude the window and the global blocks.

    Args:
      block_size: tokens in a block.
      num_window_blocks: width of the window, which is centred on the query's block; odd.
      num_global_blocks: number of leading global blocks, or (leading, trailing); the published
        models have (1, 1).
      num_random_blocks: random blocks of keys for each block of queries.
      seed: seed of the random blocks.
      causal: add the causal mask, and draw random blocks from earlier blocks.
    """
    if at_least("num_window_blocks", num_window_blocks, 1) % 2 == 0:
        raise ValueError(f"num_window_blocks must be odd, got {num_window_blocks}")
    ends = (num_global_blocks, 0) if is_integer(num_global_blocks) else num_global_blocks
    ends = sides("num_global_blocks", ends)
    side = num_window_blocks // 2
    near = SlidingWindow(side, side, block_size)
    random = RandomBlocks(block_size, num_random_blocks, seed, causal, num_window_blocks, ends)
    return _causal(near | GlobalBlocks(block_size, *ends) | random, causal)


def sparse_transformer(
    stride: int, kind: Literal["strided", "fixed"] = "strided", summary: int = 1
) -> Pattern:
    """Both factors of Sparse Transformer attention, merged in one head (Child et al. 2019).

    "strided": the previous `stride` positions, and every stride-th earlier position. "fixed":
    the query's own block of `stride`, and the last `summary` positions of every block. Causal.
    """
    if kind == "strided":
        if summary != 1:
            raise ValueError(f"summary is for kind='fixed', got {summary!r} with kind='strided'")
        return Causal() & (SlidingWindow(at_least("stride", stride, 1), 0) | Strided(stride))
    if kind == "fixed":
        return Causal() & (SlidingWindow(0, 0, stride) | Fixed(stride, summary))
    raise ValueError(f"kind must be 'strided' or 'fixed', got {kind!r}")


def _causal(pattern: Pattern, causal: bool) -> Pattern:
    return Causal() & pattern if causal else pattern
