"""Named patterns of papers: Longformer, BigBird and Sparse Transformer."""

import functools
import operator
from collections.abc import Sequence

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
    num_heads: int | None = None,
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
      num_heads: number of heads that draw different random blocks, head h with seed + h; None for
        one draw.
    """
    parts = bigbird_parts(
        block_size, num_window_blocks, num_global_blocks, num_random_blocks, seed, causal, num_heads
    )
    return _causal(functools.reduce(operator.or_, parts), causal)


def bigbird_parts(
    block_size, num_window_blocks, num_global_blocks, num_random_blocks, seed, causal, num_heads
) -> tuple[SlidingWindow, GlobalBlocks, RandomBlocks]:
    """Returns the window, the global blocks and the random blocks of `bigbird`."""
    block_size = at_least("block_size", block_size, 1, "tokens in a block")
    num_window_blocks = at_least("num_window_blocks", num_window_blocks, 1)
    if num_window_blocks % 2 == 0:
        raise ValueError(
            f"num_window_blocks must be odd, got {num_window_blocks}: the query's block and "
            "as many blocks before as after it"
        )
    at_least("num_random_blocks", num_random_blocks, 0)
    ends = (num_global_blocks, 0) if is_integer(num_global_blocks) else num_global_blocks
    first, last = sides("num_global_blocks", ends)
    side = num_window_blocks // 2
    return (
        SlidingWindow(side, side, block_size),
        GlobalBlocks(block_size, first, last),
        RandomBlocks(
            block_size,
            num_random_blocks,
            seed,
            causal,
            num_window_blocks,
            (first, last),
            num_heads=num_heads,
        ),
    )


def sparse_transformer(
    stride: int,
    kind: str = "strided",
    summary: int = 1,
    factor: str = "merged",
) -> Pattern:
    """Factorised attention of Sparse Transformers (Child et al. 2019). Causal.

    Args:
      stride: tokens in a stride, or in a block.
      kind: "strided": the previous `stride` positions (first factor), and every stride-th earlier
        position (second factor). "fixed": the query's own block of `stride` (first factor), and the
        last `summary` positions of every block (second factor).
      summary: positions at the end of each block; only for "fixed".
      factor: "merged" for the union of both factors, or "first" or "second" for one of them.
    """
    at_least("stride", stride, 1, "tokens")
    if kind not in ("strided", "fixed"):
        raise ValueError(f"kind must be 'strided' or 'fixed', got {kind!r}")
    if factor not in ("merged", "first", "second"):
        raise ValueError(f"factor must be 'merged', 'first' or 'second', got {factor!r}")
    if not is_integer(summary) or not 1 <= summary <= stride:
        raise ValueError(
            f"summary must be an int from 1 to stride={stride}, the number of tokens at the end of "
            f"a block, got {summary!r}"
        )
    first: Pattern = SlidingWindow(stride, 0)
    second: Pattern = Strided(stride)
    if kind == "fixed":
        first, second = SlidingWindow(0, 0, stride), Fixed(stride, summary)
    elif summary != 1:
        raise ValueError(
            f"summary needs kind='fixed', got summary={summary!r} and kind='strided'; leave "
            "summary out"
        )
    return Causal() & {"merged": first | second, "first": first, "second": second}[factor]


def _causal(pattern: Pattern, causal: bool) -> Pattern:
    return Causal() & pattern if causal else pattern
