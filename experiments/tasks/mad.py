"""The six tasks of mechanistic architecture design (MAD), in their baseline sizes."""

import dataclasses
import itertools

import numpy as np

from experiments.tasks import copying
from experiments.tasks.synthetic import Synthetic
from experiments.tasks.task import NOTHING, Batch, generator, require

PUBLICATION = (
    "Poli et al. 2024, Mechanistic design and scaling of hybrid architectures (arXiv 2403.17844). "
    "Differs: the baseline sizes alone; new examples at each step, where the publication repeats "
    "12,800 (memorisation: 256)"
)


def motifs(tokens: np.ndarray, shortest: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the arrangements of different tokens, and the probability of each.

    All lengths are equally likely, and all arrangements of a length.

    Returns:
      `(M, longest)`, the arrangements, -1 after their end; `(M,)`, their probabilities.
    """
    arranged, chances = [], []
    for length in range(shortest, longest + 1):
        found = np.array(list(itertools.permutations(tokens, length)))
        arranged.append(np.pad(found, ((0, 0), (0, longest - length)), constant_values=-1))
        chances.append(np.full(len(found), 1 / len(found) / (longest - shortest + 1)))
    return np.concatenate(arranged), np.concatenate(chances)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InContextRecall(Synthetic):
    """The sequence is pairs of a key and a value; a key that returns has the same value again.

    Held-out targets are the values of keys that were seen before; in training, every next token is
    a target. With keys a and b, values x and y, and `.` for a position without a target:

        tokens            a x b y b y a x
        held-out targets  . . . . y . x .
        training targets  x b y b y a x .

    The last pair always has a key that was seen before.

    Attributes:
      motif: largest number of tokens of a key or a value. In held-out sets, all keys have this
        number; otherwise all numbers are equally likely. If motifs do not fill a sequence, it
        begins with padding.
      noise_vocabulary: number of tokens of the vocabulary that are noise.
      noise: share of the pairs that are replaced by noise.
    """

    motif: int = 1
    noise_vocabulary: int = 0
    noise: float = 0.0

    reference = f"{PUBLICATION}."
    title = "In-context recall"
    explained = "Accuracy is over the values of keys that were seen before."

    @property
    def content(self) -> int:
        """Number of tokens of keys and values, which precede noise and padding."""
        return self.vocabulary - self.noise_vocabulary - (self.motif > 1)

    def check(self, *sizes: int) -> None:
        (length,) = sizes
        require(self.motif >= 1, "motif must be at least 1")
        require(
            self.content >= 2 * self.motif,
            f"vocabulary leaves {self.content} tokens for keys and values, which need "
            f"{2 * self.motif} or more",
        )
        require(
            length % 2 == 0 and length >= 4 * self.motif,
            f"the length must be even, and {4 * self.motif} or more",
        )
        require(
            0 <= self.noise < 1 and (self.noise_vocabulary > 0 or self.noise == 0),
            "noise must be at least 0 and below 1, and needs a noise_vocabulary",
        )

    def draw_training(self, rng: np.random.Generator, size: int, *sizes: int) -> Batch:
        tokens, _ = self._sequences(rng, size, *sizes, shortest=1)
        return Batch((tokens,), _shifted(tokens))

    def draw(self, rng: np.random.Generator, size: int, *sizes: int) -> Batch:
        tokens, answers = self._sequences(rng, size, *sizes, shortest=self.motif)
        return Batch((tokens,), _shifted(answers))

    def _sequences(
        self, rng: np.random.Generator, size: int, length: int, *, shortest: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens, and those that belong to values of known keys, else `NOTHING`.

        The keys have `shortest` or more tokens.
        """
        content = self.content
        keys, key_chances = motifs(np.arange(content // 2), shortest, self.motif)
        values, value_chances = motifs(np.arange(content // 2, content), 1, self.motif)
        value_of = rng.choice(len(values), p=value_chances, size=(size, len(keys)))

        # Pairs, with -1 where motifs are shorter: (size, most, width).
        most, width, rows = length // 2, 2 * self.motif, np.arange(size)[:, None]
        key = rng.choice(len(keys), p=key_chances, size=(size, most))
        tokens = np.concatenate([keys[key], values[value_of[rows, key]]], axis=-1)
        # The last pair has this number; there is room for it, whichever it is.
        last = ((tokens >= 0).sum(-1).cumsum(1) <= length - width).sum(1, keepdims=True)
        pair = np.arange(most)

        noisy = rng.random((size, most)) < self.noise
        np.put_along_axis(noisy, rng.integers(last), False, axis=1)
        noise = rng.integers(content, content + max(1, self.noise_vocabulary), tokens.shape)
        tokens = np.where(noisy[:, :, None] & (tokens >= 0), noise, tokens)

        # The last pair is one of those before it, by a random choice among their keys.
        shown = (pair < last) & ~noisy
        chosen = np.where(shown, rng.random(value_of.shape)[rows, key], -1).argmax(1)[:, None]
        for array in (key, tokens):
            array[rows, last] = array[rows, chosen]
        tokens[pair > last] = -1

        first = np.full(value_of.shape, most)
        np.minimum.at(first, (rows, key), np.where(shown, pair, most))
        is_known = (first[rows, key] < pair) & (shown | (pair == last))
        is_target = is_known[:, :, None] & (np.arange(width) >= self.motif)
        filled = tokens >= 0
        place = np.arange(length) >= length - filled.sum((1, 2))[:, None]
        stream = np.full((size, length), self.vocabulary - 1, np.int32)
        stream[place] = tokens[filled]
        answers = np.full_like(stream, NOTHING)
        answers[place] = np.where(is_target, tokens, NOTHING)[filled]
        return stream, answers


class FuzzyRecall(InContextRecall):
    """In-context recall in which keys and values are motifs of several tokens."""

    title = "Fuzzy in-context recall"


class NoisyRecall(InContextRecall):
    """In-context recall in which some pairs are replaced by random tokens of a third kind."""

    title = "Noisy in-context recall"


def _shifted(tokens: np.ndarray) -> np.ndarray:
    """Returns the next token at each position, `NOTHING` at the last."""
    return np.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=NOTHING)


class SelectiveCopying(copying.SelectiveCopying):
    """Some tokens are scattered over noise, and then asked for in their order.

    A marker comes first, and then noise at the places of the targets. With the noise 0, the marker
    9, three tokens to copy, and `.` for a position without a target:

        tokens   0 5 0 0 2 0 7 9 0 0 0
        targets  . . . . . . . . 5 2 7
    """

    reference = f"{PUBLICATION}; the tokens to copy are at uniformly random places."

    def question(self) -> list[int]:
        return [self.marker] + [copying.NOISE] * self.copied


class Memorisation(Synthetic):
    """The sequence is keys, each followed by a blank at which its value is the target.

    The values of the keys never change, and the sequence does not show them: a model keeps them in
    its parameters. With keys a and b, values x and y, and `.` for a position without a target:

        tokens   b _ a _ b _
        targets  . y . x . y
    """

    reference = f"{PUBLICATION}."
    title = "Memorisation"

    def check(self, *sizes: int) -> None:
        (length,) = sizes
        require(length >= 2 and length % 2 == 0, "the length must be even, and 2 or more")
        require(self.vocabulary >= 3, "vocabulary must be at least 3: key, value and blank")

    @property
    def value_of(self) -> np.ndarray:
        """Value of each key."""
        blank = self.vocabulary - 1
        half = blank // 2
        return half + generator(0, 0, 0, 1).permutation(blank - half)[:half]

    def draw(self, rng: np.random.Generator, size: int, *sizes: int) -> Batch:
        (length,) = sizes
        value_of = self.value_of
        keys = rng.integers(len(value_of), size=(size, length // 2))
        tokens = np.full((size, length), self.vocabulary - 1, np.int32)
        tokens[:, ::2] = keys
        targets = np.full_like(tokens, NOTHING)
        targets[:, 1::2] = value_of[keys]
        return Batch((tokens,), targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression(Synthetic):
    """Random tokens and an end token are followed by the numbers of all places in turn.

    The target at the number of a place is the token there. With the end token e, numbers in
    brackets, and `.` for a position without a target:

        tokens   5 2 7 e [0] [1] [2] [3]
        targets  . . . .  5   2   7   e
    """

    reference = (
        f"{PUBLICATION}; a language model answers, where the publication decodes each token by a "
        "multilayer perceptron from the features of the end token. Recurrences answer from their "
        "state all the same, but attention can look the tokens up: its score is no measure of "
        "compression."
    )
    title = "Compression"

    @property
    def vocab_size(self) -> int:
        return self.vocabulary + self.length // 2

    def check(self, *sizes: int) -> None:
        (length,) = sizes
        require(length >= 4 and length % 2 == 0, "the length must be even, and 4 or more")
        require(self.vocabulary >= 2, "vocabulary must be at least 2")

    def draw(self, rng: np.random.Generator, size: int, *sizes: int) -> Batch:
        (length,) = sizes
        half, end = length // 2, self.vocabulary - 1
        tokens = np.empty((size, length), np.int32)
        tokens[:, :half] = rng.integers(end, size=(size, half))
        tokens[:, half - 1] = end
        tokens[:, half:] = self.vocabulary + np.arange(half)
        targets = np.full_like(tokens, NOTHING)
        targets[:, half:] = tokens[:, :half]
        return Batch((tokens,), targets)


SMALL = 2**16

TASKS: dict[str, dict[str, Synthetic]] = {
    "mad-recall": {
        "small": InContextRecall(vocabulary=16, trained=((64,),), held_out_tokens=SMALL),
        "published": InContextRecall(vocabulary=16, trained=((128,),)),
    },
    "mad-fuzzy-recall": {
        "small": FuzzyRecall(vocabulary=12, motif=2, trained=((64,),), held_out_tokens=SMALL),
        "published": FuzzyRecall(vocabulary=16, motif=3, trained=((128,),)),
    },
    "mad-noisy-recall": {
        "small": NoisyRecall(
            vocabulary=32,
            noise_vocabulary=16,
            noise=0.2,
            trained=((64,),),
            held_out_tokens=SMALL,
        ),
        "published": NoisyRecall(vocabulary=32, noise_vocabulary=16, noise=0.2, trained=((128,),)),
    },
    "mad-selective-copying": {
        "small": SelectiveCopying(vocabulary=16, copied=8, trained=((64,),), held_out_tokens=SMALL),
        "published": SelectiveCopying(vocabulary=16, copied=16, trained=((256,),)),
    },
    "mad-compression": {
        "small": Compression(vocabulary=16, trained=((32,),), held_out_tokens=SMALL),
        "published": Compression(vocabulary=16, trained=((64,),)),
    },
    "mad-memorisation": {
        "small": Memorisation(vocabulary=256, trained=((32,),), held_out_tokens=SMALL),
        "published": Memorisation(vocabulary=256, trained=((32,),)),
    },
}
