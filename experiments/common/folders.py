"""The run folder: one configuration each, so that the same command resumes and no other can."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from experiments.common.errors import UserError
from experiments.common.metrics import write_atomically

RECORD = "config.json"


def fingerprint(settings: dict[str, Any]) -> str:
    """A short hash of settings that JSON can hold."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def check_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Checks that a run with these settings may go into this folder; changes nothing.

    Raises:
      UserError: it holds something else, or a run with other settings, or cannot be written.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "cannot be written" if existing.is_dir() else "is no folder"
        raise UserError(f"the output folder {folder} cannot be used: {existing} {reason}")
    # A kill may have left a file half written, which is as good as none.
    if not folder.is_dir() or all(path.suffix == ".partial" for path in folder.iterdir()):
        return
    try:
        there = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        raise UserError(
            f"the output folder {folder} is not empty and holds no run (no readable {RECORD}); "
            "choose another --output"
        ) from None
    here = json.loads(json.dumps(settings))
    differing = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    if differing:
        details = ", ".join(f"{k} was {there.get(k)}, now {here.get(k)}" for k in differing)
        raise UserError(
            f"the output folder {folder} holds a run with another configuration ({details}); "
            "choose another --output, or delete that folder to start over"
        )


def make_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Makes the folder, after `check_folder`, and records the settings in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / RECORD, json.dumps(settings, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write the output folder {folder}: {error.strerror}") from None
