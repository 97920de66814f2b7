"""Which pairs may attend: a small algebra of patterns, and the layouts that they compile to.

    pattern = Causal() & (SlidingWindow(2047, 0) | Global(64))
    pattern.mask(512)                            # the dense oracle, bool (512, 512)
    pattern.layout(2**20, tile=(512, 512))       # what a kernel visits; never N x N elements

A query stands at position i, a key at j. Patterns are frozen, hashable and equal by value. What
depends on the sequence (a position outside of it, a mask of blocks that does not cover it) is
checked where the lengths are first known: in `mask`, `layout` and the like.
"""

from effattn.patterns.algebra import Pattern
from effattn.patterns.base import (
    Axial,
    Causal,
    Custom,
    Dilated,
    Documents,
    Fixed,
    Full,
    Global,
    Grid,
    Prefix,
    SlidingWindow,
    Strided,
)
from effattn.patterns.blocks import BlockMask, GlobalBlocks, RandomBlocks
from effattn.patterns.named import bigbird, longformer, sparse_transformer

__all__ = [
    "Axial",
    "BlockMask",
    "Causal",
    "Custom",
    "Dilated",
    "Documents",
    "Fixed",
    "Full",
    "Global",
    "GlobalBlocks",
    "Grid",
    "Pattern",
    "Prefix",
    "RandomBlocks",
    "SlidingWindow",
    "Strided",
    "bigbird",
    "longformer",
    "sparse_transformer",
]
