"""Recall of values by their keys, against readers that see a sequence from the left."""

import dataclasses
import functools

import numpy as np
import pytest

from experiments.tasks.grammars import choose, grammar, sentences
from experiments.tasks.recall import BEGIN, END, FIRST, PAD, TASKS, different
from experiments.tasks.task import NOTHING

MULTI_QUERY = TASKS["multi-query"]
ASSOCIATIVE = TASKS["associative"]
TREE = TASKS["tree"]
POWER = 0.01  # Arora et al. 2023, appendix E


def rows(batch):
    (tokens,), targets = batch
    return zip(tokens.tolist(), targets.tolist(), strict=True)


def draw(task, size, *sizes):
    return task.draw(np.random.default_rng(0), size, *sizes)


def test_different_integers_are_uniform_and_never_repeat():
    drawn = different(np.random.default_rng(0), 30_000, 3, 8, 3)
    assert all(len(set(row)) == 3 for row in drawn.tolist())
    # All 60 ordered choices are equally likely: 500 of each, with a standard deviation of 22.
    _, counts = np.unique(drawn @ [100, 10, 1], return_counts=True)
    assert len(counts) == 60 and abs(counts - 500).max() < 90


# Multi-query recall.


def test_multi_query_sizes_are_published():
    task = MULTI_QUERY["published"]
    assert task.vocabulary == task.vocab_size == task.fillers == 8192
    assert task.trained.count((64, 4)) == 5
    assert set(task.trained) == {(64, 4), (128, 8), (256, 16), (256, 32), (256, 64)}
    assert set(task.tested) == {
        (64, 4),
        (64, 8),
        (64, 16),
        (128, 32),
        (256, 64),
        (512, 128),
        (1024, 256),
    }


@pytest.mark.parametrize(
    "task, length, pairs",
    [(MULTI_QUERY["published"], *sizes) for sizes in MULTI_QUERY["published"].tested]
    + [(MULTI_QUERY["small"], 64, 16)],
)
def test_a_reader_of_the_pairs_knows_the_value_of_each_key(task, length, pairs):
    for tokens, targets in rows(draw(task, 20, length, pairs)):
        value_of = dict(zip(tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        assert len(value_of) == len(set(value_of.values())) == pairs
        half = task.vocabulary // 2
        assert 1 <= min(value_of) and max(value_of) < half <= min(value_of.values())
        asked = [place for place, target in enumerate(targets) if target != NOTHING]
        assert all(place >= 2 * pairs and place % 2 == 0 for place in asked)
        assert all(targets[place] == value_of[tokens[place]] for place in asked)
        # Each key is asked for once.
        assert sorted(tokens[place] for place in asked) == sorted(value_of)


def test_places_of_queries_follow_the_power_law():
    size, length, pairs = 20_000, 32, 4
    (tokens,), targets = draw(MULTI_QUERY["published"], size, length, pairs)
    places = np.array(
        [
            [
                next(
                    (place - 2 * pairs) // 2
                    for place in range(2 * pairs, length, 2)
                    if row_targets[place] == row[2 * pair + 1]
                )
                for pair in range(2)
            ]
            for row, row_targets in zip(tokens.tolist(), targets.tolist(), strict=True)
        ]
    )
    law = POWER * np.arange(1, 13) ** (POWER - 1)
    law /= law.sum()
    # The second of two draws without replacement.
    second = [sum(law[i] * law[j] / (1 - law[i]) for i in range(12) if i != j) for j in range(12)]
    for drawn, expected in zip(places.T, (law, second), strict=True):
        found = np.bincount(drawn, minlength=12) / size
        np.testing.assert_allclose(found, expected, atol=4 * (0.25 / size) ** 0.5)


def test_fillers_are_blank_or_random():
    for fillers in (1, 64):
        task = dataclasses.replace(MULTI_QUERY["small"], fillers=fillers)
        (tokens,), targets = draw(task, 2000, 64, 4)
        counts = np.bincount(tokens[:, 8:][targets[:, 8:] == NOTHING])
        assert len(counts) == fillers
        assert abs(counts - counts.mean()).max() < 5 * counts.mean() ** 0.5


# Associative recall.


def test_associative_sizes_are_published():
    task = ASSOCIATIVE["published"]
    assert task.vocabulary == 8192 and task.vocab_size == 3 + 8192
    # 16 pairs, the two marks and the key in question.
    assert task.trained == ((32 + 3,),) and not task.tested


@pytest.mark.parametrize("task", ASSOCIATIVE.values(), ids=ASSOCIATIVE)
def test_a_reader_of_the_pairs_knows_the_value_of_the_last_key(task):
    asked = []
    for tokens, targets in rows(draw(task, 200, 35)):
        begin, *pairs, end, key = tokens
        assert (begin, end) == (BEGIN, END)
        value_of = dict(zip(pairs[::2], pairs[1::2], strict=True))
        assert len(value_of) == len(set(value_of.values())) == 16
        half = FIRST + task.vocabulary // 2
        assert FIRST <= min(value_of) and max(value_of) < half <= min(value_of.values())
        assert targets == [NOTHING] * 34 + [value_of[key]]
        asked.append(list(value_of).index(key))
    assert set(asked) == set(range(16))


# Treecall.


def rules_of(task):
    return grammar(task.vocabulary, task.nonterminals, task.rules, task.width, task.depth)


@pytest.mark.parametrize("task", TREE.values(), ids=TREE)
def test_grammars_are_as_published(task):
    rules = rules_of(task)
    assert (task.vocabulary, task.nonterminals, task.rules, task.depth) == (20, 40, 5, 10)
    assert rules.rules.shape == (40, 5, task.width) and rules.head.shape == (40, 20)
    sizes = (rules.rules >= 0).sum(-1)
    assert sizes.max() == task.width and rules.rules.max() < 60
    # Rules have a symbol or more exactly where they have a probability.
    for row, cumulated in zip(sizes, rules.rule, strict=True):
        np.testing.assert_array_equal(row > 0, np.diff(cumulated, prepend=0) > 0)
    for cumulated in (rules.rule, rules.head):
        np.testing.assert_allclose(cumulated[:, -1], 1)

    @functools.cache
    def depth(symbol):
        if symbol < 20:
            return 0
        below = rules.rules[symbol - 20]
        return 1 + max(map(depth, below[below >= 0].tolist()))

    assert max(map(depth, range(20, 60))) <= 10


def test_columns_are_chosen_by_their_probabilities():
    chances = np.array([[0.5, 0.3, 0.2, 0.0], [0.0, 0.1, 0.0, 0.9]])
    picked = np.repeat([0, 1], 20_000)
    found = choose(np.random.default_rng(0), chances.cumsum(1), picked).reshape(2, -1)
    for columns, expected in zip(found, chances, strict=True):
        counts = np.bincount(columns, minlength=4)
        np.testing.assert_allclose(counts / 20_000, expected, atol=0.015)
        assert not counts[expected == 0].any()


@pytest.mark.parametrize("task", TREE.values(), ids=TREE)
def test_constituents_end_with_their_heads_and_never_cross(task):
    terminal, sentence, head = sentences(rules_of(task), np.random.default_rng(0), 200, 60)
    assert (np.bincount(sentence) <= 60).all() and (np.diff(sentence) >= 0).all()
    assert 0 <= terminal.min() and terminal.max() < 20
    for number in set(sentence.tolist()):
        (words,) = np.nonzero(sentence == number)
        last = words[-1]
        assert head[last] == -1
        for word in words[:-1].tolist():
            assert word < head[word] <= last
            assert all(head[between] <= head[word] for between in range(word, head[word]))


@pytest.mark.parametrize("task", TREE.values(), ids=TREE)
def test_a_parser_with_the_grammar_finds_the_head_that_is_the_target(task):
    rules = rules_of(task)
    sides = [[tuple(side[side >= 0].tolist()) for side in of if side[0] >= 0] for of in rules.rules]
    parsed = ambiguous = 0
    for tokens, targets in rows(draw(task, 300, *task.trained[0])):
        end = tokens.index(END)
        words = [token - FIRST for token in tokens[1:end]]
        assert tokens[0] == BEGIN and set(tokens[end + 2 :]) <= {PAD}
        assert len(words) >= 3 and all(0 <= word < 20 for word in words)
        (answer,) = (place for place, target in enumerate(targets) if target != NOTHING)
        assert answer == end + 1
        asked = len(words) - 1 - words[::-1].index(tokens[answer] - FIRST)
        assert asked < len(words) - 1
        if len(words) > 9:
            continue

        # The heads that a constituent, or the symbols of a side, can give to the word; the empty
        # set if they are not the words of [first, last).
        @functools.cache
        def constituent(symbol, first, last, asked=asked):
            if last - first < 2:
                return frozenset()
            return frozenset().union(
                *(side(of, first, last - 1, last - 1) for of in sides[symbol - 20])
            )

        @functools.cache
        def side(symbols, first, last, head, asked=asked, words=tuple(words)):
            if not symbols:
                return frozenset({None}) if first == last else frozenset()
            found = set()
            for middle in range(first + 1, last + 1):
                if symbols[0] < 20:
                    if middle > first + 1 or words[first] != symbols[0]:
                        continue
                    heads = {head if first == asked else None}
                else:
                    heads = constituent(symbols[0], first, middle)
                    # The head of this constituent has the head of the constituent around it.
                    heads = {head if middle - 1 == asked else place for place in heads}
                rest = side(symbols[1:], middle, last, head)
                found |= {
                    place if place is not None else other for place in heads for other in rest
                }
            return frozenset(found)

        possible = {
            words[place]
            for symbol in range(20, 60)
            for place in constituent(symbol, 0, len(words))
            if place is not None
        }
        assert targets[answer] - FIRST in possible
        parsed += 1
        ambiguous += len(possible) > 1
    assert parsed > 50
    assert ambiguous < 0.5 * parsed


def test_a_word_that_occurs_again_is_asked_for_by_its_last_occurrence():
    again = 0
    for tokens, _ in rows(draw(TREE["small"], 300, 64)):
        end = tokens.index(END)
        again += tokens[1:end].count(tokens[end + 1]) > 1
    assert again > 20
