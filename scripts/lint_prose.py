"""Prose lint of the docstrings and comments of Python files.

    python scripts/lint_prose.py effattn tests/nn/test_mamba.py

The lint prints each problem with its file and line, and exits with status 1 if there is any:

- A sentence begins with a word of `RIDDLES`, so that it has no subject: "Those of the encoder."
- A docstring begins with a pronoun of `PRONOUNS`, whose noun stands nowhere: "It was evaluated."
- A function's docstring begins with an imperative, "Return the sum". The docstrings of this
  project are noun phrases ("Sum of the values.") or sentences in the third person ("Returns ...").
- A docstring line of `LONG` characters or more stands in `REPEATS` docstrings or more: explain the
  shared argument in one place, and point there.
"""

import argparse
import ast
import collections
import itertools
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

RIDDLES = {"Of", "Those", "What", "Whether", "Which"}
PRONOUNS = {"It", "Its", "Their", "They"}
LONG, REPEATS = 60, 19

IMPERATIVES = set(
    "Add Allocate Apply Attend Broadcast Build Call Check Compile Compute Convert Copy Count "
    "Cut Declare Draw End Fill Fold Gather Give Join Let Load Loop Make Map Measure Move Pad "
    "Pop Raise Read Record Remove Repeat Replace Reshape Return Run Set Show Signal Slice "
    "Specify Split Start Store Test Trace Train Transpose Try Update Use View Wait "
    "Write Yield".split()
)

SENTENCE = re.compile(r"(?:^|(?<=[.:;] ))([A-Z]\w*)")
COMMENT = re.compile(r"\s*#(?!!) ?(.*)")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

Problem = tuple[pathlib.Path, int, str]


def python_files(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Returns the Python files among the paths and in the folders among them."""
    found = (sorted(p.rglob("*.py")) if p.is_dir() else [p] for p in paths)
    return list(itertools.chain.from_iterable(found))


def docstrings(path: pathlib.Path) -> Iterator[tuple[int, str, bool]]:
    """Yields `(line, text, is_function)` for each docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text, not isinstance(node, ast.Module | ast.ClassDef)


def comments(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields `(line, text)` for each block of lines that hold a comment alone."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    matched = [(number, COMMENT.fullmatch(line)) for number, line in lines]
    for is_comment, block in itertools.groupby(matched, lambda line: line[1] is not None):
        if is_comment:
            first, *_ = found = list(block)
            yield first[0], "\n".join(match[1] for _, match in found if match)


def riddles(text: str) -> list[str]:
    """Returns the words of `RIDDLES` that begin a sentence, in order."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [word for part in paragraphs for word in SENTENCE.findall(part) if word in RIDDLES]


def problems_of(path: pathlib.Path) -> Iterator[Problem]:
    """Yields the problems of single sentences in a file."""
    for line, text in comments(path):
        for word in riddles(text):
            yield path, line, f"a sentence of this comment begins with {word!r}"
    for line, text, is_function in docstrings(path):
        for word in riddles(text):
            yield path, line, f"a sentence of this docstring begins with {word!r}"
        first, second, *_ = *text.split(), "", ""
        if first in PRONOUNS:
            yield path, line, f"this docstring begins with {first!r}, whose noun is missing"
        if is_function and first in IMPERATIVES and second != "of":
            yield path, line, f"this docstring begins with the imperative {first!r}"


def repeated(paths: Iterable[pathlib.Path]) -> Iterator[Problem]:
    """Yields the docstring lines that too many docstrings share, each where it stands first."""
    places = collections.defaultdict(list)
    for path in paths:
        for line, text, _ in docstrings(path):
            for shared in {part.strip() for part in text.splitlines()}:
                places[shared].append((path, line))
    for text, found in places.items():
        if len(text) >= LONG and len(found) >= REPEATS:
            yield *found[0], f"{len(found)} docstrings repeat the line {text!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the problems of the files on the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=pathlib.Path, help="Python files and folders")
    files = python_files(parser.parse_args(arguments).paths)
    problems = [*itertools.chain.from_iterable(map(problems_of, files)), *repeated(files)]
    for path, line, text in problems:
        print(f"{path}:{line}: {text}")
    print(f"{len(files)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
