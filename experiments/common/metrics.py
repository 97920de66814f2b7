"""The files of a run folder; the measurements of one run, without gaps after a resume."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common.errors import UserError


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a kill leaves the old text or the new one."""
    partial = path.with_name(path.name + ".partial")
    # Bytes of a path that the locale could not decode are no characters.
    with partial.open("w", encoding="utf-8", errors="replace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_json(path: Path, keys: tuple[str, ...], remedy: str) -> dict[str, Any]:
    """The object that a file holds.

    Args:
      path: of the file.
      keys: that the object has if it is whole.
      remedy: what to do about a damaged file.

    Raises:
      UserError: it is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys() >= set(keys):
        raise UserError(f"{path} is damaged; {remedy}")
    return found


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, in order; the torn last line of a killed run is left out.

    Raises:
      UserError: another line is damaged.
    """
    if not path.exists():
        return []
    records = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or "step" not in record:
            raise UserError(
                f"{path} is damaged at line {number}; delete {path.parent} to train that run again"
            )
        records.append(record)
    return records


def check_reaches(path: Path, records: Sequence[dict[str, Any]], step: int) -> None:
    """Raises `UserError` if the records of a file end before a step that the run has taken."""
    last = records[-1]["step"] if records else 0
    if last < step:
        raise UserError(
            f"{path} ends at step {last}, and the run went on to {step}; delete {path.parent} to "
            "train that run again"
        )


class Metrics:
    """Appends records to a file; a context manager.

    Args:
      path: of the file.
      step: where the run resumes: later records, of steps that will be taken again, are dropped.

    Raises:
      UserError: the file does not reach that step, as it did when the checkpoint was written.
    """

    def __init__(self, path: Path, step: int):
        kept = [record for record in read(path) if record["step"] <= step]
        check_reaches(path, kept, step)
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", encoding="utf-8")

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
