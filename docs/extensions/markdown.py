"""Pieces of Markdown."""

from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells may hold any text of one line."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text):
    return text.replace("|", "\\|").replace("\n", " ")


def python(code: str) -> str:
    """A block of Python."""
    return f"```python\n{code.rstrip()}\n```"
