"""How far and how fast information spreads over the graph of who may attend to whom."""

import numpy as np


def distance(edges: np.ndarray) -> tuple[float, int, float]:
    """Mean and largest shortest path, and the share of ordered pairs that no path connects.

    From bool `(T, T)`, row i true at what i reaches in one step. A bit a pair is held, and a level
    costs O(edges T / 64).
    """
    size = len(edges)
    edges = edges | np.eye(size, dtype=bool)
    words = -(-size // 64)
    reached = np.zeros((size, 8 * words), np.uint8)
    reached[:, : -(-size // 8)] = np.packbits(np.eye(size, dtype=bool), axis=1)
    reached = reached.view(np.uint64)
    rows = max(1, 2**22 // (size * words))
    level, count, length = 0, size, 0
    while count < size * size:
        further = np.empty_like(reached)
        for start in range(0, size, rows):
            row, to = np.nonzero(edges[start : start + rows])
            first = np.searchsorted(row, np.arange(row[-1] + 1))
            further[start : start + rows] = np.bitwise_or.reduceat(reached[to], first)
        now = int(np.bitwise_count(further).sum(dtype=np.int64))
        if now == count:
            break
        level, length = level + 1, length + (level + 1) * (now - count)
        reached, count = further, now
    others = size * (size - 1)
    return length / max(1, count - size), level, (size * size - count) / max(1, others)


def spectral_gap(edges: np.ndarray) -> float:
    """1 - the second eigenvalue of D^-1/2 (M | M^T | I) D^-1/2, from M bool `(T, T)`."""
    joined = edges | edges.T | np.eye(len(edges), dtype=bool)
    root = np.sqrt(joined.sum(-1))
    if len(edges) == 1:
        return 1.0
    return float(1 - np.linalg.eigvalsh(joined / root / root[:, None])[-2])
