"""What the command lines of the benchmarks share."""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number, large enough."""

    def whole_number(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"needs a whole number of {least} or more, got {text!r}"
            )
        return int(text)

    return whole_number


def output_folder(text: str) -> Path:
    """The type of an argument that is a folder; shells leave the ~ of --output=~/run to it."""
    return Path(os.path.expanduser(text))


def reason_against(folder: Path) -> str | None:
    """Makes the folder; why nothing can be written there, if so."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"cannot write the output folder {folder}: {error.strerror}"
    return None
