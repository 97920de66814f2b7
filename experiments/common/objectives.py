"""Training objectives: prediction of the next token, or of masked tokens."""

import dataclasses
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from experiments.common.tokenizers import Tokenizer

NOTHING = -1

SAMPLE_TEMPERATURE = 0.8
MAX_SAMPLE_TOKENS = 256

# BERT (Devlin et al. 2019): share of the tokens that are targets; shares of the targets that are
# replaced by the mask token and by random tokens.
PREDICTED = 0.15
SEEN_AS_MASK, SEEN_AS_RANDOM = 0.8, 0.1

PARTS = 7
BLANK = "_"


class Examples(NamedTuple):
    """Input and target tokens of examples, as NumPy or JAX arrays.

    Attributes:
      inputs: int32 `(*, T)`.
      targets: int32 `(*, T)`, `NOTHING` at positions without a target.
    """

    inputs: Any
    targets: Any


class Words(NamedTuple):
    """Texts of a report about an objective: title, headings of samples, explanation of losses."""

    title: str
    prompt: str
    sample: str
    measured: str


class Objective(Protocol):
    """Training objective on windows `(B, T + 1)`, whose last T tokens may be targets.

    Attributes:
      is_causal: whether models are causal.
      extra_tokens: number of token ids in addition to those of the tokenizer.
      words: texts for the report.
    """

    is_causal: ClassVar[bool]
    extra_tokens: ClassVar[int]
    words: ClassVar[Words]

    @classmethod
    def of(cls, vocab_size: int) -> Self:
        """Returns the objective for a tokenizer with this vocabulary size."""
        ...

    def training(self, windows: np.ndarray, seed: int, step: int) -> Examples:
        """Returns one example per window, each with the same number of targets; deterministic."""
        ...

    def validation(self, windows: np.ndarray) -> Examples:
        """Returns examples in which each token is a target once; deterministic."""
        ...

    def prompt(self, window: np.ndarray, tokenizer: Tokenizer) -> str:
        """Returns the text of one window `(T + 1,)` that a model gets as a prompt."""
        ...

    def sample(self, model: Any, window: np.ndarray, tokenizer: Tokenizer, seed: int) -> str | None:
        """Returns the model's answer to the prompt; None if the model does not decode."""
        ...


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Prediction of each token from the tokens before it."""

    is_causal: ClassVar[bool] = True
    extra_tokens: ClassVar[int] = 0
    words: ClassVar[Words] = Words(
        title="Language models compared",
        prompt="Continuing this held-out text",
        sample="writes",
        measured="Bits per byte and perplexity (per token) are measured on the same held-out "
        "windows for all models. The decode state is that of one row at the context length.",
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
        """Returns a continuation of the first quarter of the window, if the model decodes."""
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
    """Prediction of masked tokens from the other tokens (Devlin et al. 2019, "BERT").

    Training selects 15 % of the tokens of each window as targets. 80 % of the targets are replaced
    by the mask token and 10 % by a random token; 10 % are left as they are.

    Validation divides the positions of a window at random into `PARTS` parts of equal size. The
    model gets the window once for each part, with mask tokens in that part. So every token is
    predicted once, from the tokens of the other parts. This is the pseudo-perplexity of Salazar et
    al. 2020 with T / PARTS tokens masked at a time instead of one.

    Attributes:
      vocab_size: V, vocabulary size of the tokenizer; token V is the mask token.
    """

    vocab_size: int

    is_causal: ClassVar[bool] = False
    extra_tokens: ClassVar[int] = 1
    words: ClassVar[Words] = Words(
        title="Masked language models compared",
        prompt=f"Filling in the tokens masked as {BLANK} in this held-out text",
        sample="fills in",
        measured="Bits per byte and perplexity (per token) are pseudo-perplexities: each token of "
        f"the held-out windows is predicted once, with a random {PARTS}th of its window masked, "
        f"itself included. The {PARTS} disjoint sets of masks of each window are the same for all "
        "models. Pseudo-perplexities do not compare with perplexities of models that predict the "
        "next token.",
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
        """Returns the prompt with the likeliest token in each blank."""
        seen = self.validation(window[None]).inputs[0]
        # The last logit is that of the mask token.
        likeliest = np.asarray(model(seen[None])[0, :, : self.vocab_size]).argmax(-1)
        return tokenizer.decode(np.where(seen == self.vocab_size, likeliest, seen))

    def _decode(self, tokens: np.ndarray, tokenizer: Tokenizer) -> str:
        blanks = np.flatnonzero(tokens == self.vocab_size)
        first, *others = np.split(tokens, blanks)
        decoded = (tokenizer.decode(tokens) for tokens in (first, *(o[1:] for o in others)))
        return BLANK.join(decoded)


def _shuffled(rng: np.random.Generator, row: np.ndarray, count: int) -> np.ndarray:
    """Returns `count` copies of the row, each shuffled separately: `(count, *row.shape)`."""
    return rng.permuted(np.broadcast_to(row, (count, len(row))), axis=1)
