"""Files of a run folder: atomic writes, checked reads, and the metrics of a run."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.harness.errors import UserError


def write_atomically(path: Path, text: str) -> None:
    """Writes a file; a killed process leaves either the old text or the new text."""
    partial = path.with_name(path.name + ".partial")
    # A path may contain bytes that are no characters in the locale's encoding.
    with partial.open("w", encoding="utf-8", errors="replace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_json(path: Path, keys: tuple[str, ...], remedy: str) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Args:
      path: path of the file.
      keys: keys that the object must have.
      remedy: advice on a damaged file.

    Raises:
      UserError: the file is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys() >= set(keys):
        raise UserError(f"{path} is damaged; {remedy}")
    return found


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file in order, without a partial last line of a killed run.

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
    """Raises `UserError` if the last record of a file is before `step`."""
    last = records[-1]["step"] if records else 0
    if last < step:
        raise UserError(
            f"{path} ends at step {last}, and the run went on to {step}; delete {path.parent} to "
            "train that run again"
        )


def evaluations(path: Path, step: int) -> list[dict[str, Any]]:
    """Returns the records of the evaluations of a run until `step`; `UserError` if some lack."""
    found = [record for record in read(path) if "train_loss" not in record]
    check_reaches(path, found, step)
    return found


class Metrics:
    """Context manager that appends records to a file.

    Args:
      path: path of the file.
      step: step at which the run resumes; later records are removed, as these steps are repeated.

    Raises:
      UserError: the file ends before that step.
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
        """Appends one record, which has the key "step"."""
        self._file.write(json.dumps(record) + "\n")

    def flush(self) -> None:
        """Writes all records to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
