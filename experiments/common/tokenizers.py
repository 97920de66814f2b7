"""Tokenizers: bytes, and a byte-pair vocabulary trained on the corpus."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from experiments.common.corpora import SEPARATOR
from experiments.common.errors import UserError
from experiments.common.metrics import write_atomically

# Bytes of a word that byte pairs are sought in. The time that it takes grows with the square.
LONGEST_WORD = 1024


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
      vocab_size: ids are in `[0, vocab_size)`.
      token_bytes: `(vocab_size,)` int, how many bytes of text each id stands for.
    """

    vocab_size: int
    token_bytes: np.ndarray

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        """All documents, joined by a blank line, as one stream of ids."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """The text of these ids; what is no UTF-8 becomes the replacement character."""
        ...


class ByteTokenizer:
    """Every byte is a token."""

    vocab_size = 256
    token_bytes = np.ones(256, np.int64)

    def encode(self, documents: Sequence[bytes]) -> np.ndarray:
        return np.frombuffer(SEPARATOR.join(documents), np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        return np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class BytePairTokenizer:
    """A byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019).

    Args:
      backend: a `tokenizers.Tokenizer` made by `train`.
    """

    def __init__(self, backend: Any):
        self._backend = backend
        self.vocab_size = backend.get_vocab_size()
        # In the byte-level alphabet a character is a byte.
        self.token_bytes = np.array(
            [len(backend.id_to_token(i)) for i in range(self.vocab_size)], np.int64
        )

    @classmethod
    def train(cls, documents: Sequence[bytes], vocab_size: int) -> "BytePairTokenizer":
        """Merges the most frequent pairs of `documents` until there are `vocab_size` tokens.

        Words of over `LONGEST_WORD` bytes are cut, as those of text without spaces.
        """
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers

        backend = tokenizers.Tokenizer(models.BPE())
        # Once their bytes are characters, these are what is counted.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.ByteLevel(add_prefix_space=False),
                pre_tokenizers.FixedLength(LONGEST_WORD),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            # The trainer makes room for as many tokens, and each merge needs a byte of text.
            vocab_size=min(vocab_size, 256 + sum(map(len, documents))),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[],
            show_progress=False,
        )
        backend.train_from_iterator((document.decode() for document in documents), trainer)
        return cls(backend)

    @classmethod
    def read(cls, path: Path) -> "BytePairTokenizer":
        """The tokenizer that `write` wrote."""
        import tokenizers

        # The package raises a bare Exception for a file it cannot parse.
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:
            raise UserError(f"{path} is no tokenizer ({error}); delete it to retrain") from error

    def write(self, path: Path) -> None:
        """Writes the vocabulary; a kill leaves no half of it."""
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
    """The tokenizer of a run: "bytes", or "bpe": read from `cache`, or else trained."""
    if kind == "bytes":
        return ByteTokenizer()
    if cache.is_file():
        return BytePairTokenizer.read(cache)
    return BytePairTokenizer.train(documents, vocabulary)


def save(tokenizer: Tokenizer, cache: Path) -> None:
    """Writes what `load` would have to train again."""
    if isinstance(tokenizer, BytePairTokenizer) and not cache.is_file():
        tokenizer.write(cache)
