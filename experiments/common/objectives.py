"""What models learn to predict, and what that is measured by: the next token, or masked ones."""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from experiments.common.tokenizers import Tokenizer

NOTHING = -1

SAMPLE_TEMPERATURE = 0.8
MAX_SAMPLE_TOKENS = 256

# Of Devlin et al. 2019, BERT: the share of tokens to predict, and what is seen in their place.
PREDICTED = 0.15
SEEN_AS_MASK, SEEN_AS_RANDOM = 0.8, 0.1

PARTS = 7
BLANK = "_"


class Examples(NamedTuple):
    """What models see, and what they are to predict: arrays of NumPy or of JAX.

    Attributes:
      inputs: int32 `(*, T)`.
      targets: int32 `(*, T)`, `NOTHING` where nothing is to be predicted.
    """

    inputs: Any
    targets: Any


class Words(NamedTuple):
    """How a report speaks of an objective: its title, samples and numbers."""

    title: str
    prompt: str
    sample: str
    measured: str


class Objective(Protocol):
    """What models learn to predict in windows `(B, T + 1)`, of whose tokens the last T count.

    Attributes:
      is_causal: whether a token may see those before it alone.
      extra_tokens: ids that models need beside the tokenizer's.
      words: for the report.
    """

    is_causal: ClassVar[bool]
    extra_tokens: ClassVar[int]
    words: ClassVar[Words]

    @classmethod
    def of(cls, vocab_size: int) -> Self:
        """The objective for the tokens of a tokenizer."""
        ...

    def training(self, windows: np.ndarray, seed: int, step: int) -> Examples:
        """One example a window, with equally many targets each; the same for equal arguments."""
        ...

    def validation(self, windows: np.ndarray) -> Examples:
        """Examples in which each of the tokens is a target once; the same for every model."""
        ...

    def prompt(self, window: np.ndarray, tokenizer: Tokenizer) -> str:
        """What a model is shown of one window `(T + 1,)` to see what it makes of it."""
        ...

    def sample(self, model: Any, window: np.ndarray, tokenizer: Tokenizer, seed: int) -> str | None:
        """What it makes of it; None if it cannot be asked."""
        ...


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Each token from those before it."""

    is_causal: ClassVar[bool] = True
    extra_tokens: ClassVar[int] = 0
    words: ClassVar[Words] = Words(
        title="Language models compared",
        prompt="Continuing this held-out text",
        sample="writes",
        measured="Bits a byte and perplexity (a token) are of the same held-out windows for all. "
        "The decode state is of one row at the context length.",
    )

    @classmethod
    def of(cls, vocab_size: int) -> Self:
        return cls()

    def training(self, windows: np.ndarray, seed: int, step: int) -> Examples:
        return self.validation(windows)

    def validation(self, windows: np.ndarray) -> Examples:
        tokens = windows.astype(np.int32)
        return Examples(tokens[:, :-1], tokens[:, 1:])

    def prompt(self, window: np.ndarray, tokenizer: Tokenizer) -> str:
        return tokenizer.decode(self._prompt(window))

    def sample(self, model: Any, window: np.ndarray, tokenizer: Tokenizer, seed: int) -> str | None:
        """The continuation of the first quarter of the window, if the model decodes."""
        import jax
        import jax.numpy as jnp

        from effattn.decode import generate

        prompt = self._prompt(window)
        more = min(len(window) - 1 - len(prompt), MAX_SAMPLE_TOKENS)
        try:
            tokens = generate(
                model,
                jnp.asarray(prompt[None], jnp.int32),
                max_new_tokens=more,
                temperature=SAMPLE_TEMPERATURE,
                rng=jax.random.key(seed),
            )
        except NotImplementedError:
            return None
        return tokenizer.decode(np.asarray(tokens[0]))

    def _prompt(self, window: np.ndarray) -> np.ndarray:
        return window[: (len(window) - 1) // 4]


@dataclasses.dataclass(frozen=True)
class MaskedTokens:
    """Masked tokens from all the others (Devlin et al. 2019, "BERT").

    In training, 15 % of each window's tokens are drawn. A mask token is seen in the place of 80 %
    of them, any token in that of 10 %, and the rest as they are.

    In validation a window's positions are dealt at random into `PARTS` parts of equal size, and the
    model sees the window once for each part, with mask tokens in its place. So every token is
    predicted once, from those of the other parts, which is the pseudo-perplexity of Salazar et al.
    2020 with T / PARTS tokens masked at a time instead of one.

    Attributes:
      vocab_size: V, the tokenizer's; token V is the mask.
    """

    vocab_size: int

    is_causal: ClassVar[bool] = False
    extra_tokens: ClassVar[int] = 1
    words: ClassVar[Words] = Words(
        title="Masked language models compared",
        prompt=f"Filling in the tokens masked as {BLANK} in this held-out text",
        sample="fills in",
        measured="Bits a byte and perplexity (a token) are pseudo-perplexities: each token of the "
        f"held-out windows is predicted once, with a random {PARTS}th of its window masked, itself "
        f"included, and the rest seen; the {PARTS} disjoint sets of masks of each window are the "
        "same for all. They are no probabilities of the text, and not to be compared with those of "
        "models that predict the next token.",
    )

    @classmethod
    def of(cls, vocab_size: int) -> Self:
        return cls(vocab_size)

    def training(self, windows: np.ndarray, seed: int, step: int) -> Examples:
        tokens = windows[:, 1:].astype(np.int32)
        rng = np.random.default_rng((seed, step))
        count = max(1, round(PREDICTED * tokens.shape[1]))
        predicted = _shuffled(rng, np.arange(tokens.shape[1]) < count, len(tokens))
        seen_as = rng.random(tokens.shape)
        is_mask, is_kept = seen_as < SEEN_AS_MASK, seen_as >= SEEN_AS_MASK + SEEN_AS_RANDOM
        other = rng.integers(self.vocab_size, size=tokens.shape, dtype=np.int32)
        seen = np.where(is_mask, self.vocab_size, np.where(is_kept, tokens, other))
        inputs = np.where(predicted, seen, tokens).astype(np.int32)
        return Examples(inputs, np.where(predicted, tokens, NOTHING))

    def validation(self, windows: np.ndarray) -> Examples:
        tokens = windows[:, 1:].astype(np.int32)
        count, length = tokens.shape
        part = _shuffled(np.random.default_rng(0), np.arange(length) % PARTS, count)
        masked = part[:, None] == np.arange(PARTS)[:, None]
        inputs = np.where(masked, np.int32(self.vocab_size), tokens[:, None])
        targets = np.where(masked, tokens[:, None], NOTHING)
        return Examples(inputs.reshape(-1, length), targets.reshape(-1, length))

    def prompt(self, window: np.ndarray, tokenizer: Tokenizer) -> str:
        return self._decode(self.validation(window[None]).inputs[0], tokenizer)

    def sample(self, model: Any, window: np.ndarray, tokenizer: Tokenizer, seed: int) -> str | None:
        """The prompt with the likeliest token in each blank."""
        seen = self.validation(window[None]).inputs[0]
        # The mask itself has a logit too.
        likeliest = np.asarray(model(seen[None])[0, :, : self.vocab_size]).argmax(-1)
        return tokenizer.decode(np.where(seen == self.vocab_size, likeliest, seen))

    def _decode(self, tokens: np.ndarray, tokenizer: Tokenizer) -> str:
        blanks = np.flatnonzero(tokens == self.vocab_size)
        first, *others = np.split(tokens, blanks)
        decoded = (tokenizer.decode(tokens) for tokens in (first, *(o[1:] for o in others)))
        return BLANK.join(decoded)


def _shuffled(rng: np.random.Generator, row: np.ndarray, count: int) -> np.ndarray:
    """`(count, *row.shape)`, each row shuffled by itself."""
    return rng.permuted(np.broadcast_to(row, (count, len(row))), axis=1)
