"""Probes of language models of bytes: what counts stands in the text before."""

import re

import numpy as np

from experiments.tasks.probes import probes
from experiments.tasks.task import NOTHING

WINDOWS = np.random.default_rng(0).integers(32, 127, size=(20, 513), dtype=np.uint8)


def rows(name):
    (tokens,), targets = probes(WINDOWS)[name]
    assert tokens.shape == targets.shape == (20, 512)
    for row, target in zip(tokens, targets, strict=True):
        counted = np.flatnonzero(target != NOTHING)
        whole = bytes([*row[:1], *np.append(row[1:], target[-1])])
        yield whole, counted, bytes(target[counted].astype(np.uint8))


def test_every_probe_that_fits_is_there():
    assert list(probes(WINDOWS)) == [
        "needle, 64 bytes back",
        "needle, 256 bytes back",
        "phone book, 4 entries",
        "phone book, 16 entries",
    ]
    assert probes(WINDOWS[:, :60]) == {}


def test_the_word_of_a_needle_stands_at_its_distance():
    words = set()
    for distance in (64, 256):
        for text, counted, word in rows(f"needle, {distance} bytes back"):
            assert re.fullmatch(rb"[a-z]{8}", word)
            np.testing.assert_array_equal(counted, np.arange(504, 512))
            places = [found.start() for found in re.finditer(re.escape(word), text)]
            assert places == [513 - 8 - distance, 513 - 8]
            before = b"\nThe secret word of this speech is "
            assert all(text[:place].endswith(before) for place in places)
            words.add(word)
    assert len(words) == 40


def test_the_number_of_a_name_stands_in_its_line():
    for entries in (4, 16):
        for text, counted, number in rows(f"phone book, {entries} entries"):
            np.testing.assert_array_equal(counted, np.arange(506, 512))
            lines = re.findall(rb"(?<=\n)([a-z]{6}) (\d{6})(?=\n|$)", text)
            assert len(lines) == entries + 1
            assert lines[-1] in lines[:-1] and lines[-1][1] == number


def test_the_text_before_is_left_as_it_is():
    for name in probes(WINDOWS):
        (tokens,), _ = probes(WINDOWS)[name]
        np.testing.assert_array_equal(tokens[:, :100], WINDOWS[:, :100])
