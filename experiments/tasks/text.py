"""Text as a task: prediction of the next token, or of masked tokens."""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import grain
import numpy as np

from experiments.harness.errors import UserError
from experiments.tasks import probes
from experiments.tasks.corpora import Corpus
from experiments.tasks.task import NOTHING, Batch, Scores, Task
from experiments.tasks.tokenizers import Tokenizer
from experiments.tasks.windows import Windows, batches

SAMPLE_TEMPERATURE = 0.8
MAX_PROMPT_TOKENS = MAX_SAMPLE_TOKENS = 256

# BERT (Devlin et al. 2019): share of the tokens that are targets; shares of the targets that are
# replaced by the mask token and by random tokens.
PREDICTED = 0.15
SEEN_AS_MASK, SEEN_AS_RANDOM = 0.8, 0.1

PARTS = 7
BLANK = "_"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Text(Task):
    """Base of the tasks on a corpus.

    Attributes:
      windows: training windows.
      valid: `(n, T + 1)`, the validation windows.
      tokenizer: tokenizer of the text.
      bytes_per_word: mean word length in the validation text, if the corpus defines words.
    """

    windows: Windows
    valid: np.ndarray
    tokenizer: Tokenizer
    bytes_per_word: float | None = None

    headline: ClassVar[str] = "bits_per_byte"
    more_is_better: ClassVar[bool] = False
    columns: ClassVar[Mapping[str, str]] = {
        "bits/byte": "bits_per_byte",
        "perplexity": "perplexity",
        "word perplexity": "word_perplexity",
    }

    @classmethod
    def of(
        cls,
        corpus: Corpus,
        tokenizer: Tokenizer,
        context: int,
        batch: int,
        eval_windows: int,
        whole_documents: bool = False,
        **options: Any,
    ) -> Self:
        """Returns the task on a corpus.

        Args:
          corpus: training and validation documents.
          tokenizer: tokenizer of the text.
          context: T, tokens per window.
          batch: windows per training step.
          eval_windows: number of validation windows.
          whole_documents: whether each window is part of one document.
          **options: other fields of the task.

        Raises:
          UserError: the text is shorter than one batch, or than one validation window.
        """

        def windows(documents: Sequence[bytes]) -> Windows:
            if not whole_documents:
                return Windows(tokenizer.encode(documents), context)
            each = [tokenizer.encode([document]) for document in documents]
            ends = np.cumsum([len(part) for part in each]).tolist()
            return Windows(np.concatenate(each), context, ends)

        train, held_out = windows(corpus.train), windows(corpus.valid)
        for part, of_part, needed in (("training", train, batch), ("validation", held_out, 1)):
            if len(of_part) < needed:
                windows_needed = f"{needed} window{'s' * (needed > 1)} of {context}"
                reason = (
                    f"has documents for {len(of_part)} windows, and needs {windows_needed} tokens"
                    if whole_documents
                    else f"has {len(of_part.stream)} tokens, and {windows_needed} need "
                    f"{needed * context + 1}"
                )
                more = "more or longer documents" if whole_documents else "more text"
                raise UserError(
                    f"the corpus is too short: its {part} part {reason}; give {more}, or a smaller "
                    "--context or --batch"
                )
        return cls(
            windows=train,
            valid=held_out.spread(eval_windows),
            tokenizer=tokenizer,
            bytes_per_word=corpus.bytes_per_word,
            **options,
        )

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def length(self) -> int:
        return self.windows.context

    def training(self, size: int, seed: int, step: int) -> Batch:
        return self._examples(self._order(size, seed)[step], seed, step)

    @functools.cache  # noqa: B019, a task lives as long as its process
    def _order(self, size: int, seed: int) -> grain.MapDataset:
        return batches(self.windows, size, seed)

    @abc.abstractmethod
    def _examples(self, windows: np.ndarray, seed: int, step: int) -> Batch:
        """Returns one example per window."""

    def measure(self, name: str, batch: Batch, scores: Scores) -> dict[str, Any]:
        """Returns loss, bits per byte and perplexities.

        Perplexities are exp(nats per token), and per word if the corpus defines words. A perplexity
        that overflows a float is None.
        """
        counts = batch.targets != NOTHING
        nats = scores.nats.sum(dtype=np.float64)
        loss = nats / counts.sum()
        text_bytes = self.tokenizer.token_bytes[batch.targets[counts]].sum()
        bits_per_byte = nats / math.log(2) / text_bytes
        words = None
        if self.bytes_per_word is not None:
            words = _power(math.exp2, bits_per_byte * self.bytes_per_word)
        return {
            "loss": float(loss),
            "bits_per_byte": float(bits_per_byte),
            "perplexity": _power(math.exp, loss),
            "word_perplexity": words,
        }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NextToken(Text):
    """Prediction of each token from the tokens before it.

    Attributes:
      probes: whether the probes of `experiments.tasks.probes` are further held-out sets.
    """

    probes: bool = False

    reference: ClassVar[str] = "Bengio et al. 2003, A neural probabilistic language model"
    title: ClassVar[str] = "Language models compared"
    explained: ClassVar[str] = (
        "Bits per byte and perplexity (per token) are measured on the same held-out windows for "
        "all models."
    )
    prompted: ClassVar[str] = "Continuing this held-out text"
    answered: ClassVar[str] = "writes"

    def held_out(self) -> Mapping[str, Batch]:
        found: dict[str, Batch] = {"validation": self._examples(self.valid, 0, 0)}
        return {**found, **probes.probes(self.valid)} if self.probes else found

    def measure(self, name: str, batch: Batch, scores: Scores) -> dict[str, Any]:
        """Returns the measures of `Text`, and bits per token by the number of tokens before it.

        The numbers are powers of two: the value at 64 is the mean for 64 to 127 tokens before. If T
        is a power of two, the last value also includes the position with all T tokens before it.
        """
        measures = super().measure(name, batch, scores)
        if name == "validation":
            edges = 2 ** np.arange(math.ceil(math.log2(self.length)))
            of_place = scores.nats.mean(0, dtype=np.float64) / math.log(2)
            parts = np.split(of_place, edges - 1)[1:]  # the first target has one token before it
            measures["bits_by_position"] = {
                str(edge): float(part.mean()) for edge, part in zip(edges, parts, strict=True)
            }
        return measures

    def _examples(self, windows: np.ndarray, seed: int, step: int) -> Batch:
        tokens = windows.astype(np.int32)
        return Batch((tokens[:, :-1],), tokens[:, 1:])

    def sample(self, model: Any, seed: int) -> dict[str, str | None]:
        """Returns the beginning of a held-out window, and a model's continuation.

        The sample is None if the model does not decode.
        """
        import jax
        import jax.numpy as jnp

        from effattn.decode import generate

        window = self.valid[0]
        prompt = window[: min((len(window) - 1) // 4, MAX_PROMPT_TOKENS)]
        more = min(len(window) - 1 - len(prompt), MAX_SAMPLE_TOKENS)
        try:
            tokens = generate(
                model,
                jnp.asarray(prompt[None], jnp.int32),
                max_new_tokens=more,
                temperature=SAMPLE_TEMPERATURE,
                rng=jax.random.key(seed),
            )
            written = self.tokenizer.decode(np.asarray(tokens[0]))
        except NotImplementedError:
            written = None
        return {"prompt": self.tokenizer.decode(prompt), "sample": written}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MaskedTokens(Text):
    """Prediction of masked tokens from the other tokens (Devlin et al. 2019, "BERT").

    Training selects 15 % of the tokens of each window as targets. 80 % of the targets are replaced
    by the mask token and 10 % by a random token; 10 % are left as they are. The mask token is the
    last token of the vocabulary.

    Validation divides the positions of a window at random into `PARTS` parts of equal size. The
    model gets the window once for each part, with mask tokens in that part. So every token is
    predicted once, from the tokens of the other parts. This is the pseudo-perplexity of Salazar et
    al. 2020 with T / PARTS tokens masked at a time instead of one.
    """

    reference: ClassVar[str] = "Devlin et al. 2019, BERT; Salazar et al. 2020"
    is_causal: ClassVar[bool] = False
    title: ClassVar[str] = "Masked language models compared"
    explained: ClassVar[str] = (
        "Bits per byte and perplexity (per token) are pseudo-perplexities: each token of the "
        f"held-out windows is predicted once, with a random {PARTS}th of its window masked, itself "
        f"included. The {PARTS} disjoint sets of masks of each window are the same for all models. "
        "Pseudo-perplexities do not compare with perplexities of models that predict the next "
        "token."
    )
    prompted: ClassVar[str] = f"Filling in the tokens masked as {BLANK} in this held-out text"
    answered: ClassVar[str] = "fills in"

    @property
    def vocab_size(self) -> int:
        return self.mask + 1

    @property
    def mask(self) -> int:
        """Id of the mask token."""
        return self.tokenizer.vocab_size

    def _examples(self, windows: np.ndarray, seed: int, step: int) -> Batch:
        tokens = windows[:, 1:].astype(np.int32)
        rng = np.random.default_rng((seed, step))
        count = max(1, round(PREDICTED * tokens.shape[1]))
        predicted = _shuffled(rng, np.arange(tokens.shape[1]) < count, len(tokens))
        seen_as = rng.random(tokens.shape)
        is_mask, is_kept = seen_as < SEEN_AS_MASK, seen_as >= SEEN_AS_MASK + SEEN_AS_RANDOM
        other = rng.integers(self.mask, size=tokens.shape, dtype=np.int32)
        seen = np.where(is_mask, self.mask, np.where(is_kept, tokens, other))
        inputs = np.where(predicted, seen, tokens).astype(np.int32)
        return Batch((inputs,), np.where(predicted, tokens, NOTHING))

    def held_out(self) -> Mapping[str, Batch]:
        tokens = self.valid[:, 1:].astype(np.int32)
        count, length = tokens.shape
        part = _shuffled(np.random.default_rng(0), np.arange(length) % PARTS, count)
        masked = part[:, None] == np.arange(PARTS)[:, None]
        inputs = np.where(masked, np.int32(self.mask), tokens[:, None])
        targets = np.where(masked, tokens[:, None], NOTHING)
        return {"validation": Batch((inputs.reshape(-1, length),), targets.reshape(-1, length))}

    def sample(self, model: Any, seed: int) -> dict[str, str | None]:
        """Returns a held-out window with masks, and with the likeliest token in their places."""
        (inputs,), _ = self.held_out()["validation"]
        seen = inputs[0]
        # The last logit is that of the mask token.
        likeliest = np.asarray(model(seen[None])[0, :, : self.mask]).argmax(-1)
        filled = self.tokenizer.decode(np.where(seen == self.mask, likeliest, seen))
        return {"prompt": self._decode(seen), "sample": filled}

    def _decode(self, tokens: np.ndarray) -> str:
        first, *others = np.split(tokens, np.flatnonzero(tokens == self.mask))
        decoded = (self.tokenizer.decode(tokens) for tokens in (first, *(o[1:] for o in others)))
        return BLANK.join(decoded)


def _shuffled(rng: np.random.Generator, row: np.ndarray, count: int) -> np.ndarray:
    """Returns `count` copies of the row, each shuffled separately: `(count, *row.shape)`."""
    return rng.permuted(np.broadcast_to(row, (count, len(row))), axis=1)


def _power(of: Callable[[float], float], exponent: float) -> float | None:
    try:
        return of(exponent)
    except OverflowError:
        return None  # JSON has no infinity
