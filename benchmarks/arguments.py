"""Shared command-line arguments of the benchmarks."""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """Returns the type of an argument that is a whole number of `least` or more."""

    def whole_number(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number, {least} or more, got {text!r}"
            )
        return int(text)

    return whole_number


def output_folder(text: str) -> Path:
    """Returns the path of a folder argument; shells do not expand the ~ of --output=~/run."""
    return Path(os.path.expanduser(text))


def reason_against(folder: Path) -> str | None:
    """Creates the folder; returns the reason if it cannot be written, else None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"cannot write the output folder {folder}: {error.strerror}"
    return None
