"""Path lengths and spectral gap of the graph of allowed attention pairs."""

from collections.abc import Iterator

import numpy as np


def reached(edges: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the number of nodes that each node reaches in 0, 1, 2, ... steps: int `(T,)` each.

    `edges` is bool `(T, T)`; row i is True at the nodes that node i reaches in one step. A node
    reaches itself. The iterator ends after the last step that reaches new nodes. Memory is one bit
    for each pair; a step costs O(edges T / 64).
    """
    size = len(edges)
    edges = edges | np.eye(size, dtype=bool)
    words = -(-size // 64)
    found = np.zeros((size, 8 * words), np.uint8)
    found[:, : -(-size // 8)] = np.packbits(np.eye(size, dtype=bool), axis=1)
    found = found.view(np.uint64)
    rows = max(1, 2**22 // (size * words))
    count = np.ones(size, int)
    yield count
    while count.sum() < size * size:
        further = np.empty_like(found)
        for start in range(0, size, rows):
            row, to = np.nonzero(edges[start : start + rows])
            first = np.searchsorted(row, np.arange(row[-1] + 1))
            further[start : start + rows] = np.bitwise_or.reduceat(found[to], first)
        now = np.bitwise_count(further).sum(-1, dtype=int)
        if (now == count).all():
            break
        found, count = further, now
        yield count


def distance(edges: np.ndarray) -> tuple[float, int, float]:
    """Returns mean and largest shortest path, and the share of unconnected ordered pairs."""
    size = len(edges)
    pairs = np.array([count.sum() for count in reached(edges)])
    largest, others = len(pairs) - 1, size * (size - 1)
    length = int(np.arange(1, largest + 1) @ np.diff(pairs))
    connected = int(pairs[-1])
    mean = length / max(1, connected - size)
    return mean, largest, (size * size - connected) / max(1, others)


def spectral_gap(edges: np.ndarray) -> float:
    """Returns 1 - the second eigenvalue of D^-1/2 (M | M^T | I) D^-1/2; M is bool `(T, T)`."""
    joined = edges | edges.T | np.eye(len(edges), dtype=bool)
    root = np.sqrt(joined.sum(-1))
    if len(edges) == 1:
        return 1.0
    return float(1 - np.linalg.eigvalsh(joined / root / root[:, None])[-2])
