"""Windows of tokens: a seeded, resumable training order and a fixed validation set."""

import dataclasses

import grain
import numpy as np

from experiments.common.corpora import Corpus
from experiments.common.errors import UserError
from experiments.common.objectives import Examples, NextToken, Objective
from experiments.common.tokenizers import Tokenizer


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


@dataclasses.dataclass(frozen=True)
class Data:
    """Data that every run of an experiment reads.

    Attributes:
      train: training windows.
      valid: `(n, context + 1)`, the validation windows.
      valid_bytes: bytes of text in the last `context` tokens of all validation windows.
      objective: makes examples from windows.
    """

    train: Windows
    valid: np.ndarray
    valid_bytes: int
    objective: Objective = NextToken()

    @property
    def valid_tokens(self) -> int:
        """Number of targets in the validation windows."""
        return self.valid[:, 1:].size

    def valid_batches(self, batch: int) -> tuple[Examples, int]:
        """Returns the validation examples as `(n, batch, context)`, and the number of examples.

        The last batch is filled up with the first examples.
        """
        examples = self.objective.validation(self.valid)
        count, length = examples.inputs.shape
        filled = (np.resize(rows, (count + -count % batch, length)) for rows in examples)
        return Examples(*(rows.reshape(-1, batch, length) for rows in filled)), count


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    context: int,
    batch: int,
    eval_windows: int,
    objective: Objective = NextToken(),  # noqa: B008, it is frozen
) -> Data:
    """Tokenizes a corpus and selects `eval_windows` validation windows, evenly spaced.

    Raises:
      UserError: the text is shorter than one batch, or than one validation window.
    """
    train = Windows(tokenizer.encode(corpus.train), context)
    held_out = Windows(tokenizer.encode(corpus.valid), context)
    for part, windows, needed in (("training", train, batch), ("validation", held_out, 1)):
        if len(windows) < needed:
            raise UserError(
                f"the corpus is too short: its {part} part has {len(windows.stream)} tokens, and "
                f"{needed} window{'s' * (needed > 1)} of {context} need {needed * context + 1}; "
                "give more text, or a smaller --context or --batch"
            )
    picked = np.linspace(0, len(held_out) - 1, min(eval_windows, len(held_out))).astype(int)
    valid = np.stack([held_out[i] for i in picked])
    return Data(train, valid, int(tokenizer.token_bytes[valid[:, 1:]].sum()), objective)


def batches(windows: Windows, batch: int, seed: int) -> grain.DatasetIterator:
    """Returns an endless iterator of batches `(batch, context + 1)`, shuffled anew every epoch.

    The order depends only on the seed. `get_state` and `set_state` save and restore the position.
    """
    order = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    # A window is a slice of an array in memory: threads would only take cores from the training.
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(order.batch(batch, drop_remainder=True).to_iter_dataset(read))
