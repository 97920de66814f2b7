"""Random numbers for each row that depend only on the seed and the row."""

import numpy as np


def drawn(seed: int, limit: np.ndarray, per_row: int) -> np.ndarray:
    """Draws `per_row` distinct numbers below the limit of each row: int32 `(rows, per_row)`.

    Numbers ascend in each row; -1 means no number. Reservoir sampling by algorithm L (Li 1994): all
    numbers below the limit are equally likely, and a higher limit only replaces some numbers by new
    ones. A row with a limit of at most `per_row` takes all numbers. Time
    O(rows per_row log(limit / per_row)).
    """
    chosen = np.tile(np.arange(per_row), (len(limit), 1))
    chosen[chosen >= limit[:, None]] = -1
    live = np.flatnonzero(limit > per_row)
    if not per_row:
        live = live[:0]
    # Each draw skips `passed` numbers; the next number replaces a random chosen number.
    newest = np.full(len(live), per_row - 1)
    threshold = _uniform(seed, live, 0) ** (1 / per_row) if per_row else newest
    draw = 1
    while len(live):
        with np.errstate(divide="ignore"):
            passed = np.log(_uniform(seed, live, draw)) / np.log1p(-threshold)
        newest = newest + 1 + np.minimum(passed, 2**40).astype(np.int64)
        held = newest < limit[live]
        live, newest, threshold = live[held], newest[held], threshold[held]
        chosen[live, (_uniform(seed, live, draw + 1) * per_row).astype(np.int64)] = newest
        threshold = threshold * _uniform(seed, live, draw + 2) ** (1 / per_row)
        draw += 3
    return np.sort(chosen, axis=-1).astype(np.int32)


def _uniform(seed: int, row: np.ndarray, draw: int) -> np.ndarray:
    """Returns a number in (0, 1) for each row, a function of (seed, row, draw)."""
    state = _mixed(np.array([seed], np.uint64))
    state = _mixed(_mixed(state + row.astype(np.uint64)) + np.uint64(draw))
    return ((state >> 11).astype(np.float64) + 0.5) * 2.0**-53


def _mixed(x: np.ndarray) -> np.ndarray:
    """Returns the output of splitmix64 (Steele et al. 2014) at state x."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27)) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> 31)
