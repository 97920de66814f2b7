"""Sentences of a random grammar, drawn for many examples at once."""

import functools
from typing import NamedTuple

import numpy as np

from experiments.tasks.task import generator


class Grammar(NamedTuple):
    """Probabilistic context-free grammar in which each constituent ends with a terminal, its head.

    Symbols from 0 are the V terminals; the N nonterminals follow.

    Attributes:
      rules: `(N, R, W)`, right-hand sides without the head; -1 after their end.
      rule: `(N, R)`, cumulated probabilities of the rules.
      head: `(N, V)`, cumulated probabilities of the heads.
    """

    rules: np.ndarray
    rule: np.ndarray
    head: np.ndarray


@functools.cache
def grammar(terminals: int, nonterminals: int, rules: int, width: int, depth: int) -> Grammar:
    """Returns a random grammar, always the same.

    Each nonterminal has a level in 1 to `depth`, and 1 to `rules` rules of 1 to `width` symbols:
    terminals, and nonterminals of higher levels.
    """
    rng = generator(0, 0, 0, 1)
    level = rng.integers(1, depth + 1, size=nonterminals)
    sides = np.full((nonterminals, rules, width), -1)
    chances = np.zeros((nonterminals, rules))
    for lhs in range(nonterminals):
        symbols = np.append(np.arange(terminals), terminals + np.flatnonzero(level > level[lhs]))
        count = rng.integers(1, rules + 1)
        chances[lhs, :count] = rng.dirichlet(np.ones(count))
        for rule in range(count):
            side = rng.choice(symbols, size=rng.integers(1, width + 1))
            sides[lhs, rule, : len(side)] = side
    heads = rng.dirichlet(np.ones(terminals), size=nonterminals)
    cumulated = (x.cumsum(1) / x.sum(1, keepdims=True) for x in (chances, heads))
    return Grammar(sides, *cumulated)


def choose(rng: np.random.Generator, cumulated: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns a random column for each of the rows, by its cumulated probabilities."""
    width = cumulated.shape[1]
    increasing = (np.arange(len(cumulated))[:, None] + cumulated).ravel()
    found = np.searchsorted(increasing, rows + rng.random(len(rows)), side="right")
    return np.minimum(found - width * rows, width - 1)


class Words(NamedTuple):
    """Words of several sentences, in order.

    Attributes:
      terminal: terminal of each word.
      sentence: number of the sentence of each word.
      head: index of the word that is the head of each word's constituent, or of the constituent
        around it if the word is itself the head; -1 for the head of the sentence.
    """

    terminal: np.ndarray
    sentence: np.ndarray
    head: np.ndarray


def sentences(rules: Grammar, rng: np.random.Generator, count: int, longest: int) -> Words:
    """Returns `count` sentences, without those of more than `longest` words."""
    nonterminals, terminals = rules.head.shape
    symbol = terminals + rng.integers(nonterminals, size=count)
    sentence = np.arange(count)
    # Heads are named by numbers, since their places are known at the end only; other words have
    # the name -1.
    name, head = np.full(count, -1), np.full(count, -1)
    named = 0
    while (opened := symbol >= terminals).any():
        rows = symbol[opened] - terminals
        new = named + np.arange(len(rows))
        named += len(rows)
        # Each symbol becomes a row of symbols: itself alone, or the right-hand side and the head.
        shape = len(symbol), rules.rules.shape[-1] + 1
        symbols, names = np.full(shape, -1), np.full(shape, -1)
        symbols[:, 0], names[:, 0] = symbol, name
        symbols[opened, :-1] = rules.rules[rows, choose(rng, rules.rule, rows)]
        symbols[opened, -1] = choose(rng, rules.head, rows)
        names[opened, -1] = new
        heads = np.broadcast_to(head[:, None], shape).copy()
        heads[opened, :-1] = new[:, None]
        kept = symbols >= 0
        sentence = np.repeat(sentence, kept.sum(1))
        short = np.bincount(sentence)[sentence] <= longest
        symbol, name, head = symbols[kept][short], names[kept][short], heads[kept][short]
        sentence = sentence[short]
    places = np.full(named + 1, -1)
    places[name] = np.arange(len(name))
    places[-1] = -1
    return Words(symbol, sentence, places[head])
