"""Recall of values by their keys: multi-query, single-query and hierarchical."""

import dataclasses

import numpy as np

from experiments.tasks.grammars import grammar, sentences
from experiments.tasks.synthetic import Synthetic
from experiments.tasks.task import NOTHING, Batch, generator, require

POWER = 0.01
PAD, BEGIN, END, FIRST = range(4)
MIN_WORDS = 3


def different(rng: np.random.Generator, size: int, low: int, high: int, count: int) -> np.ndarray:
    """Returns integers of [low, high), different in each row: `(size, count)`."""
    drawn, again = np.empty((size, count), int), np.ones((size, count), bool)
    # Repetitions are drawn again, which favours no number.
    while again.any():
        drawn[again] = rng.integers(low, high, size=again.sum())
        order = drawn.argsort(axis=1, kind="stable")
        in_order = np.take_along_axis(drawn, order, 1)
        again[:] = False
        np.put_along_axis(again, order[:, 1:], in_order[:, 1:] == in_order[:, :-1], axis=1)
    return drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiQueryRecall(Synthetic):
    """The sequence shows pairs of a key and a value, and later asks for the value of each key.

    All keys are asked for once, at places that a power law draws towards the pairs; fillers are
    between them, unless all places are taken, as in the training of the small preset. With two
    pairs and vocabulary 12, `.` for a position without a target:

        tokens   2 8 4 7 9 1 4 0 5 5 2 3
        targets  . . . . . . 7 . . . 8 .

    The sizes of an example are its numbers of tokens and of pairs.

    Attributes:
      fillers: number of different fillers: 1 for a blank, which is no key; or more tokens of the
        vocabulary at random.
    """

    fillers: int

    reference = (
        "Arora et al. 2023, Zoology (arXiv 2312.04927), where fillers are blank; random fillers, "
        "lengths and pairs are those of figure 2 of Arora et al. 2024, Based (arXiv 2402.18668). "
        "Differs: new examples at each step, where the publication repeats 180,000."
    )
    title = "Multi-query associative recall"
    explained = "Accuracy is the share of keys whose value is the likeliest token."
    held_out_name = "{} tokens, {} pairs"

    def check(self, *sizes: int) -> None:
        length, pairs = sizes
        require(pairs >= 1, f"pairs must be at least 1, got {pairs}")
        require(
            pairs < self.vocabulary // 2,
            f"{pairs} pairs need a vocabulary of {2 * pairs + 2} or more",
        )
        require(
            length % 2 == 0 and 4 * pairs <= length,
            f"{pairs} pairs need an even length of {4 * pairs} or more, got {length}",
        )
        require(
            1 <= self.fillers <= self.vocabulary,
            f"fillers must be 1 to {self.vocabulary}, got {self.fillers}",
        )

    def draw(self, rng: np.random.Generator, size: int, *sizes: int) -> Batch:
        length, pairs = sizes
        half = self.vocabulary // 2
        # Token 0 is no key, as published.
        keys = different(rng, size, 1, half, pairs)
        values = different(rng, size, half, self.vocabulary, pairs)
        # Place n = 1, 2, ... has a weight of n ** (POWER - 1). The places with the largest sums of
        # log-weight and Gumbel noise, in this order, are a draw by weight without replacement.
        log_weights = (POWER - 1) * np.log(np.arange(1, length // 2 - pairs + 1))
        noisy = log_weights + rng.gumbel(size=(size, len(log_weights)))
        places = 2 * pairs + 2 * np.argsort(-noisy, axis=1)[:, :pairs]
        tokens = rng.integers(self.fillers, size=(size, length), dtype=np.int32)
        tokens[:, 0 : 2 * pairs : 2] = keys
        tokens[:, 1 : 2 * pairs : 2] = values
        np.put_along_axis(tokens, places, keys, axis=1)
        targets = np.full_like(tokens, NOTHING)
        np.put_along_axis(targets, places, values, axis=1)
        return Batch((tokens,), targets)


class AssociativeRecall(Synthetic):
    """The sequence shows pairs of a key and a value, and ends with one of the keys.

    The target at the end is the value of this key. With keys a to c, values x to z, and `.` for a
    position without a target:

        tokens   <begin> b x a z c y <end> a
        targets  .       . . . . . . .     z

    Half of the vocabulary are keys, and half are values. Padding, `<begin>` and `<end>` are three
    tokens more.
    """

    reference = (
        "Arora et al. 2025, Mechanistic evaluation of Transformers and state space models (arXiv "
        "2505.15105), section 5.1. Differs: new examples at each step, where the publication "
        "repeats 100,000."
    )
    title = "Associative recall"

    @property
    def vocab_size(self) -> int:
        return FIRST + self.vocabulary

    def check(self, *sizes: int) -> None:
        (length,) = sizes
        require(
            length % 2 == 1 and 5 <= length <= 3 + self.vocabulary // 2 * 2,
            "the length must be odd, 5 or more, and at most the vocabulary and 3",
        )

    def draw(self, rng: np.random.Generator, size: int, *sizes: int) -> Batch:
        (length,) = sizes
        pairs, half = (length - 3) // 2, FIRST + self.vocabulary // 2
        tokens = np.full((size, length), END, np.int32)
        tokens[:, 0] = BEGIN
        tokens[:, 1:-2:2] = keys = different(rng, size, FIRST, half, pairs)
        tokens[:, 2:-2:2] = values = different(rng, size, half, self.vocab_size, pairs)
        asked = np.arange(size), rng.integers(pairs, size=size)
        tokens[:, -1] = keys[asked]
        targets = np.full_like(tokens, NOTHING)
        targets[:, -1] = values[asked]
        return Batch((tokens,), targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeRecall(Synthetic):
    """A sentence of a random grammar is followed by one of its words; the target is its head.

    A constituent is some words and smaller constituents, and its head at the end: associations are
    not only between neighbours. Here `(b c)` is a constituent with the head c, and d is the head of
    the sentence, so d is the head of the words a and c; `.` is a position without a target:

        tokens   <begin> a b c d <end> c <pad>
        targets  .       . . . . .     d .

    The word in question is asked for by its last occurrence in the sentence. Short sentences occur
    in training and in the held-out sets, because few of them exist.

    Attributes:
      nonterminals: number of nonterminals of the grammar.
      rules: largest number of rules of a nonterminal.
      width: largest number of symbols on the right-hand side of a rule, besides the head.
      depth: largest depth of a sentence.
    """

    nonterminals: int = 40
    rules: int = 5
    width: int = 4
    depth: int = 10

    reference = (
        "Arora et al. 2025, Mechanistic evaluation of Transformers and state space models (arXiv "
        "2505.15105), section 5.2, Associative Treecall with right heads and parent queries. "
        "Differs: another random grammar, since the published one is not part of the publication; "
        "new examples at each step."
    )
    title = "Associative treecall"

    @property
    def vocab_size(self) -> int:
        return FIRST + self.vocabulary

    def check(self, *sizes: int) -> None:
        (length,) = sizes
        require(length >= 3 + MIN_WORDS, f"the length must be at least {3 + MIN_WORDS}")
        for field in ("vocabulary", "nonterminals", "rules", "width", "depth"):
            require(getattr(self, field) >= 1, f"{field} must be at least 1")
        tokens, _ = self._examples(generator(0, 0, 0, 2), 256, length)
        require(len(tokens) > 0, f"the grammar has no sentences of {MIN_WORDS} words or more")

    def draw(self, rng: np.random.Generator, size: int, *sizes: int) -> Batch:
        (length,) = sizes
        tokens, targets = np.empty((2, 0, length), np.int32)
        while len(tokens) < size:
            more = self._examples(rng, size, length)
            tokens, targets = np.append(tokens, more[0], 0), np.append(targets, more[1], 0)
        return Batch((tokens[:size],), targets[:size])

    def _examples(
        self, rng: np.random.Generator, count: int, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and targets of those of `count` sentences that have a question."""
        rules = grammar(self.vocabulary, self.nonterminals, self.rules, self.width, self.depth)
        terminal, sentence, head = sentences(rules, rng, count, length - 3)
        words = np.bincount(sentence, minlength=count)
        place = np.arange(len(sentence)) - (words.cumsum() - words)[sentence]
        last = np.zeros((count, self.vocabulary), int)
        np.maximum.at(last, (sentence, terminal), place)
        asked = np.flatnonzero(
            (head >= 0) & (last[sentence, terminal] == place) & (words[sentence] >= MIN_WORDS)
        )
        # A random head of those that words can ask for, then a random one of these words.
        by_head, by_word = rng.random((2, len(sentence)))
        asked = asked[np.lexsort((by_word[asked], by_head[head[asked]], sentence[asked]))]
        chosen, first = np.unique(sentence[asked], return_index=True)
        asked = asked[first]

        tokens = np.full((count, length), PAD, np.int32)
        tokens[:, 0] = BEGIN
        tokens[sentence, 1 + place] = FIRST + terminal
        tokens[np.arange(count), 1 + words] = END
        tokens[chosen, 2 + words[chosen]] = FIRST + terminal[asked]
        targets = np.full_like(tokens, NOTHING)
        targets[chosen, 2 + words[chosen]] = FIRST + terminal[head[asked]]
        return tokens[chosen], targets[chosen]


TASKS: dict[str, dict[str, Synthetic]] = {
    "multi-query": {
        "small": MultiQueryRecall(
            vocabulary=64,
            fillers=1,
            trained=((32, 8),),
            tested=((32, 8), (64, 8), (64, 16), (128, 16)),
            held_out_tokens=2**16,
        ),
        "published": MultiQueryRecall(
            vocabulary=8192,
            fillers=8192,
            # The publication has 100,000 examples of the first size and 20,000 of each other.
            trained=5 * ((64, 4),) + ((128, 8), (256, 16), (256, 32), (256, 64)),
            # Validation has the longest examples of the training.
            tested=((256, 64), (64, 4), (64, 8), (64, 16), (128, 32), (512, 128), (1024, 256)),
        ),
    },
    "associative": {
        "small": AssociativeRecall(vocabulary=32, trained=((19,),), held_out_tokens=2**15),
        "published": AssociativeRecall(vocabulary=8192, trained=((35,),)),
    },
    "tree": {
        "small": TreeRecall(vocabulary=20, trained=((64,),), held_out_tokens=2**16),
        "published": TreeRecall(vocabulary=20, width=9, trained=((1024,),)),
    },
}
