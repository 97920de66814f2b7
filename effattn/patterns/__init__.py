"""Attention patterns: which (query, key) pairs may attend, and block-sparse layouts of patterns.

    pattern = Causal() & (SlidingWindow(2047, 0) | Global(64))
    pattern.mask(512)                            # dense mask, bool (512, 512)
    pattern.layout(2**20, tile=(512, 512))       # tiles that a kernel visits; no N x N array

A query has position i, a key has position j. Patterns combine with `&`, `|` and `~`; they are
frozen, hashable and equal by value. Methods that take lengths, such as `mask` and `layout`, check
that the pattern fits the sequence (positions inside the sequence, a block mask that covers it).
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
