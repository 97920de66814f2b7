"""Tokenizers: bytes, and byte pairs trained on the corpus."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from experiments.harness.errors import UserError
from experiments.harness.metrics import write_atomically
from experiments.tasks.corpora import SEPARATOR

# Maximum bytes per word in the training of byte pairs, whose time grows with the square.
LONGEST_WORD = 1024


class Tokenizer(Protocol):
    """Protocol of a tokenizer.

    Attributes:
      vocab_size: number of token ids.
      token_bytes: `(vocab_size,)` int, number of bytes of text per token.
    """

    vocab_size: int
    token_bytes: np.ndarray

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """Returns the token ids of all documents, joined by blank lines."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of token ids, with replacement characters for invalid UTF-8."""
        ...


class ByteTokenizer:
    """Tokenizer with one token per byte."""

    vocab_size = 256
    token_bytes = np.ones(256, np.int64)

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        return np.frombuffer(SEPARATOR.join(documents), np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        return np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class BytePairTokenizer:
    """Byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019).

    Args:
      backend: a `tokenizers.Tokenizer` from `train`.
    """

    def __init__(self, backend: Any):
        self._backend = backend
        self.vocab_size = backend.get_vocab_size()
        # In the byte-level alphabet one character stands for one byte.
        self.token_bytes = np.array(
            [len(backend.id_to_token(i)) for i in range(self.vocab_size)], np.int64
        )

    @classmethod
    def train(cls, documents: Sequence[bytes], vocab_size: int) -> "BytePairTokenizer":
        """Merges the most frequent pairs of `documents` until there are `vocab_size` tokens.

        Words longer than `LONGEST_WORD` bytes, as in text without spaces, are cut.
        """
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers

        backend = tokenizers.Tokenizer(models.BPE())
        # After the first pre-tokenizer a character is a byte, so FixedLength counts bytes.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.ByteLevel(add_prefix_space=False),
                pre_tokenizers.FixedLength(LONGEST_WORD),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            # The trainer allocates memory for all tokens, but each merge needs a byte of text.
            vocab_size=min(vocab_size, 256 + sum(map(len, documents))),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[],
            show_progress=False,
        )
        backend.train_from_iterator((document.decode() for document in documents), trainer)
        return cls(backend)

    @classmethod
    def read(cls, path: Path) -> "BytePairTokenizer":
        """Returns a tokenizer from a file of `write`."""
        import tokenizers

        # The package raises a bare Exception for a file that it cannot parse.
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:
            reason = f"{path} is not a tokenizer ({error}); delete {path} to train it again"
            raise UserError(reason) from error

    def write(self, path: Path) -> None:
        """Writes the vocabulary atomically."""
        write_atomically(path, self._backend.to_str(pretty=True))

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        texts = [document.decode() for document in documents]
        separator = self._backend.encode(SEPARATOR.decode()).ids
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        pieces = []
        for encoding in self._backend.encode_batch(texts):
            pieces += [np.array(separator, dtype), np.array(encoding.ids, dtype)]
        return np.concatenate(pieces[1:])

    def decode(self, tokens: np.ndarray) -> str:
        return self._backend.decode(np.asarray(tokens).tolist())


def load(kind: str, vocabulary: int, documents: Sequence[bytes], cache: Path) -> Tokenizer:
    """Returns the tokenizer of a run; "bpe" is read from `cache` if it exists, or else trained."""
    if kind == "bytes":
        return ByteTokenizer()
    if cache.is_file():
        return BytePairTokenizer.read(cache)
    return BytePairTokenizer.train(documents, vocabulary)


def save(tokenizer: Tokenizer, cache: Path) -> None:
    """Writes a trained tokenizer for `load`."""
    if isinstance(tokenizer, BytePairTokenizer) and not cache.is_file():
        tokenizer.write(cache)
