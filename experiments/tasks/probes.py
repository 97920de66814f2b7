"""Probes of language models of bytes: do they use what they read long ago?

A probe puts text of its own into held-out windows, and counts only the bytes that can be known from
the text at a given distance before them.
"""

from collections.abc import Mapping

import numpy as np

from experiments.tasks.task import NOTHING, Batch, generator

SEED = 2**31
SECRET = 8
NEEDLE, ASKED = (
    b"\nThe secret word of this speech is %s.\n",
    b"\nThe secret word of this speech is ",
)
ENTRY = b"%s %s\n"
NAME, NUMBER = 6, 6
SMALLEST_BOOK = 4


def probes(windows: np.ndarray) -> Mapping[str, Batch]:
    """Returns the probes that fit into windows of bytes `(n, T + 1)`, by name.

    - "needle, d bytes back": a sentence with a random word of letters stands in the text, and its
      beginning again at the end of the window, so that the word has a distance of d bytes.
    - "phone book, n entries": the window ends with n lines of a random name and a random number,
      and with one of the names again; its number counts.
    """
    length = windows.shape[1] - 1
    found = {}
    distance = 64
    while distance + len(NEEDLE) + SECRET < length:
        found[f"needle, {distance} bytes back"] = _needle(windows, distance)
        distance *= 4
    entries = SMALLEST_BOOK
    while (entries + 1) * (NAME + NUMBER + 2) < length:
        found[f"phone book, {entries} entries"] = _phone_book(windows, entries)
        entries *= 4
    return found


def _needle(windows: np.ndarray, distance: int) -> Batch:
    rng = generator(SEED, distance)
    words = _letters(rng, len(windows), SECRET)
    text = windows.copy()
    for row, word in zip(text, words, strict=True):
        _write(row, len(row) - SECRET, word)
        _write(row, len(row) - SECRET - len(ASKED), ASKED)
        needle = NEEDLE % word
        _write(row, len(row) - SECRET - distance - len(ASKED), needle)
    return _counting(text, SECRET)


def _phone_book(windows: np.ndarray, entries: int) -> Batch:
    rng = generator(SEED, entries, 1)
    text = windows.copy()
    for row in text:
        names = _letters(rng, entries, NAME)
        numbers = rng.integers(10**NUMBER, size=entries)
        lines = [
            ENTRY % (name, b"%0*d" % (NUMBER, number))
            for name, number in zip(names, numbers, strict=True)
        ]
        asked = lines[rng.integers(entries)].removesuffix(b"\n")
        book = b"\n" + b"".join(lines) + asked
        _write(row, len(row) - len(book), book)
    return _counting(text, NUMBER)


def _letters(rng: np.random.Generator, count: int, length: int) -> list[bytes]:
    return [bytes(row) for row in rng.integers(97, 123, size=(count, length), dtype=np.uint8)]


def _write(row: np.ndarray, start: int, text: bytes) -> None:
    row[start : start + len(text)] = np.frombuffer(text, np.uint8)


def _counting(text: np.ndarray, last: int) -> Batch:
    """Returns the windows as examples in which the last tokens alone count."""
    tokens = text.astype(np.int32)
    targets = np.full_like(tokens[:, 1:], NOTHING)
    targets[:, -last:] = tokens[:, -last:]
    return Batch((tokens[:, :-1],), targets)
