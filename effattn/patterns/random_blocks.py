"""Random numbers for each row, drawn from the seed and the row alone."""

import numpy as np


def drawn(seed: int, limit: np.ndarray, per_row: int) -> np.ndarray:
    """`per_row` distinct numbers below each row's limit: int32 `(rows, per_row)`, -1 for none.

    Rows ascend. Algorithm L (Li 1994): of the numbers that have come so far each is as likely to be
    held, so that a higher limit only puts new ones in the place of old ones. Rows with `per_row` or
    fewer take them all. Time O(rows per_row log(limit / per_row)).
    """
    chosen = np.tile(np.arange(per_row), (len(limit), 1))
    chosen[chosen >= limit[:, None]] = -1
    live = np.flatnonzero(limit > per_row)
    if not per_row:
        live = live[:0]
    # The rest come one after the other: how many to pass over, and whose place the next one takes.
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
    """A number in (0, 1) for each row, from (seed, row, draw) alone."""
    state = _mixed(np.array([seed], np.uint64))
    state = _mixed(_mixed(state + row.astype(np.uint64)) + np.uint64(draw))
    return ((state >> 11).astype(np.float64) + 0.5) * 2.0**-53


def _mixed(x: np.ndarray) -> np.ndarray:
    """The output of splitmix64 (Steele et al. 2014) at state x."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27)) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> 31)
