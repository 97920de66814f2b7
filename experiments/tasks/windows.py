"""Windows of a stream of tokens, in a seeded order with random access."""

import dataclasses
import functools
from collections.abc import Sequence

import grain
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Token stream in windows of `context + 1` tokens; each token is a target at most once.

    Attributes:
      stream: `(n,)`, all tokens.
      context: T, number of targets of a window.
      ends: ends of documents in the stream, in order: no window extends over one. Default: windows
        follow each other through the whole stream.
    """

    stream: np.ndarray
    context: int
    ends: Sequence[int] | np.ndarray | None = None

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Place of the first token of each window."""
        ends = np.array([len(self.stream)] if self.ends is None else self.ends)
        begins = np.concatenate([[0], ends[:-1]])
        counts = np.maximum(0, ends - begins - 1) // self.context
        each = [b + self.context * np.arange(n) for b, n in zip(begins, counts, strict=True)]
        return np.concatenate(each)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> np.ndarray:
        start = self.starts[index]
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
