"""Names with options, as on the command line, and as names of folders."""

import ast
import hashlib
from typing import Any

# Parameters and costs of all other mechanisms are compared with those of this one.
REFERENCE = "softmax"

# Folder names have at most 255 bytes; learning rate and seed follow the mechanism's name.
LONGEST_NAME = 160


def options_of(text: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the options of NAME,OPTION=VALUE,...; values are Python literals.

    Raises:
      ValueError: an option has no name or is given twice, or its value is no literal.
    """
    name, *given = _parts(text)
    options: dict[str, Any] = {}
    for option in given:
        key, _, value = option.partition("=")
        if not key:
            raise ValueError(f"{text!r} has an option without a name; write NAME,OPTION=VALUE")
        if key in options:
            raise ValueError(f"{text!r} gives {key} twice; give it once")
        # All errors that the documentation of `literal_eval` names.
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise ValueError(
                f"option {key} must be a Python literal, such as 8, True, 'word' or (4, 0), got "
                f"{value!r}"
            ) from None
    return name, options


def folder_name(text: str) -> str:
    """Returns a folder name for the text; a long name is cut and ends in a hash."""
    name = text.replace("/", "--").replace("*", "x")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _parts(text: str) -> list[str]:
    """Returns the parts between commas; commas in brackets or quotes are part of a value."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
