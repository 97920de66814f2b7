"""Windows of a stream of tokens, in a seeded order with random access."""

import dataclasses

import grain
import numpy as np


@dataclasses.dataclass(frozen=True)
class Windows:
    """Token stream in windows of `context + 1` tokens; each token is a target at most once."""

    stream: np.ndarray
    context: int

    def __len__(self) -> int:
        return max(0, len(self.stream) - 1) // self.context

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.context
        return self.stream[start : start + self.context + 1]

    def spread(self, count: int) -> np.ndarray:
        """Returns `count` windows, evenly spaced, or all: `(count, context + 1)`."""
        picked = np.linspace(0, len(self) - 1, min(count, len(self))).astype(int)
        return np.stack([self[i] for i in picked])


def batches(windows: Windows, batch: int, seed: int) -> grain.MapDataset:
    """Returns an endless sequence of batches `(batch, context + 1)`, shuffled anew every epoch.

    The order depends only on the seed; any batch can be read by its number.
    """
    order = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    return order.batch(batch, drop_remainder=True)
