"""The measurements of one run as JSON lines, without gaps or duplicates after a resume."""

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a kill leaves the old text or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, in order; the torn last line of a killed run is left out."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Metrics:
    """Appends records to a file; a context manager.

    Args:
      path: of the file.
      step: where the run resumes: later records, of steps that will be taken again, are dropped.
    """

    def __init__(self, path: Path, step: int):
        kept = [json.dumps(record) + "\n" for record in read(path) if record["step"] <= step]
        write_atomically(path, "".join(kept))
        self._file = path.open("a")

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Adds one record, which holds "step"."""
        self._file.write(json.dumps(record) + "\n")

    def flush(self) -> None:
        """Returns when everything written so far is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
