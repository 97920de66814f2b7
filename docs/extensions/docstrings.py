"""Docstrings as reStructuredText: indented formulas become literal blocks."""

import re
from typing import Any

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
_ITEM = re.compile(r"\s+\*{0,2}[\w, ]+: ")
_CODE = re.compile(r"(`[^`]*`)")


def setup(app: Any) -> dict[str, bool]:
    """Registers the conversion, before that of Google's sections by Napoleon."""
    app.connect("autodoc-process-docstring", _convert, priority=400)
    return {"parallel_read_safe": True}


def _convert(app, what, name, obj, options, lines):
    lines[:] = with_literal_blocks(lines)


def with_literal_blocks(lines: list[str]) -> list[str]:
    """Lines of a docstring whose indented paragraphs, outside of its sections, are literal blocks.

    Elsewhere characters that mean something in reStructuredText stand for themselves.
    """
    found: list[str] = []
    in_section = in_block = False
    for number, line in enumerate(lines):
        is_indented = line.startswith("  ")
        if line and not is_indented:
            in_section, in_block = bool(_SECTION.match(line)), False
        starts = is_indented and not in_section and not in_block
        if starts and number and not lines[number - 1].strip():
            in_block = True
            found += ["::", ""]
        found.append(line if in_block else _escaped(line, in_section))
    return found


def _escaped(line, in_section):
    item = _ITEM.match(line) if in_section else None
    name = item[0] if item else ""  # Napoleon escapes names
    parts = _CODE.split(line[len(name) :])
    parts[::2] = [re.sub(r"([|*])", r"\\\1", part) for part in parts[::2]]
    # A letter and a full stop number the items of lists.
    text = re.sub(r"^(\s*[A-Za-z])\. ", r"\1\\. ", "".join(parts))
    return name + text
