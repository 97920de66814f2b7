"""Files of a run folder: atomic writes, checked reads, and the metrics of a run."""

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from experiments.harness.errors import UserError
from experiments.harness.schedules import Schedule

# Keys that an object must have; a mapping also has the condition that each value must meet.
Keys = Collection[str] | Mapping[str, Callable[[Any], bool]]

NO_ROWS: Mapping[str, Keys] = MappingProxyType({})


def write_atomically(path: Path, text: str) -> None:
    """Writes a file; a killed process leaves either the old text or the new text.

    Raises:
      UserError: the file cannot be written, for example to a full disk; the old text is kept.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        # A path may contain bytes that are no characters in the locale's encoding.
        with partial.open("w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise _unwritten(path, error) from error


def _unwritten(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {path}: {error.strerror}; once it can be written, the same command goes on"
    )


def read_json(
    path: Path, keys: Keys, remedy: str, rows: Mapping[str, Keys] = NO_ROWS
) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Args:
      path: path of the file.
      keys: keys that the object must have.
      remedy: advice on a damaged file.
      rows: keys of lists of objects, with the keys that each of these objects must have.

    Raises:
      UserError: the file is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not (_has(found, keys) and _has(found, rows.keys())) or not all(
        isinstance(found[key], list) and all(_has(row, needed) for row in found[key])
        for key, needed in rows.items()
    ):
        raise UserError(f"{path} is damaged; {remedy}")
    return found


def _has(value: Any, keys: Keys) -> bool:
    """Returns whether this is an object with all these keys."""
    if not isinstance(value, dict) or not value.keys() >= set(keys):
        return False
    conditions = keys.items() if isinstance(keys, Mapping) else ()
    return all(is_right(value[key]) for key, is_right in conditions)


def read(path: Path, schedule: Schedule, step: int) -> list[dict[str, Any]]:
    """Returns the records of a run until `step` in order, without those that a killed run added.

    Raises:
      UserError: a record is missing, or has another form than a run writes.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    advice = f"delete {path.parent} to train that run again"
    records: list[dict[str, Any]] = []
    for at, is_evaluation in schedule.records(step):
        if len(records) == len(lines):
            last = records[-1]["step"] if records else 0
            raise UserError(f"{path} ends at step {last}, and the run went on to {step}; {advice}")
        try:
            record = _checked(lines[len(records)], at, is_evaluation)
        except ValueError as error:
            number = len(records) + 1
            raise UserError(f"{path} is damaged at line {number} ({error}); {advice}") from None
        records.append(record)
    return records


def _checked(line: bytes, step: int, is_evaluation: bool) -> dict[str, Any]:
    """Returns the record in a line; `ValueError` with the reason if another was expected."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ValueError("no JSON object")
    for key in ("step", "tokens", "seconds"):
        if key not in record:
            raise ValueError(f"no {key}")
    for key, value in record.items():
        is_right = is_number if key in ("step", "tokens", "seconds") else is_measure
        if not is_right(value):
            raise ValueError(f"{key} is {value!r}, which is not a number")
    if record["step"] != step:
        raise ValueError(f"step {record['step']} in place of step {step}")
    if ("train_loss" not in record) != is_evaluation:
        raise ValueError(f"no {'evaluation' if is_evaluation else 'train_loss'} at step {step}")
    return record


def is_measure(value: Any) -> bool:
    """Returns whether this is a number, None for one that overflows, or a tree of these."""
    if isinstance(value, dict):
        return all(map(is_measure, value.values()))
    if isinstance(value, list):
        return bool(value) and all(map(is_measure, value))
    return value is None or is_number(value)


def is_number(value: Any) -> bool:
    """Returns whether this is a number of JSON."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def evaluations(path: Path, schedule: Schedule, step: int) -> list[dict[str, Any]]:
    """Returns the records of the evaluations of a run until `step`, with the errors of `read`."""
    return [record for record in read(path, schedule, step) if "train_loss" not in record]


class Metrics:
    """Context manager that appends records to a file.

    Args:
      path: path of the file.
      schedule: schedule of the run.
      step: step at which the run resumes; all that follows is removed, as these steps are repeated.

    Raises:
      UserError: an error of `read`, or the file cannot be written.
    """

    def __init__(self, path: Path, schedule: Schedule, step: int):
        kept = read(path, schedule, step)
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *exception: object) -> None:
        # After a failed write, `close` fails too; all that is needed was written by `flush`.
        with contextlib.suppress(OSError):
            self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record, which has the key "step"; `UserError` as in `flush`."""
        with self._writing():
            self._file.write(json.dumps(record) + "\n")

    def flush(self) -> None:
        """Writes all records to the disk; `UserError` if the disk is full, for example."""
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _unwritten(self._path, error) from error
