"""Run folders: each has one configuration, so that only the same command resumes a run."""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.harness.errors import UserError
from experiments.harness.metrics import read_json, write_atomically

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

RECORD = "config.json"


def fingerprint(settings: dict[str, Any]) -> str:
    """Returns a short hash of settings, which must be valid JSON."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def path_of(output: Path | None, name: str) -> Path:
    """Returns the run folder: `output`, or the folder of this name in `runs`."""
    # Shells do not expand the ~ of --output=~/run.
    return Path(os.path.expanduser(output or Path("runs") / name))


def check_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Checks that a run with these settings may use this folder; changes nothing.

    Raises:
      UserError: the folder has other files or a run with other settings, or cannot be written.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "cannot be written" if existing.is_dir() else "is not a folder"
        raise UserError(f"the output folder {folder} cannot be used: {existing} {reason}")
    # A killed process may have left a partial file, which does not count.
    if not folder.is_dir() or all(path.suffix == ".partial" for path in folder.iterdir()):
        return
    no_run = f"the output folder {folder} is not empty and holds no run"
    if not (folder / RECORD).is_file():
        raise UserError(f"{no_run} (no {RECORD}); choose another --output")
    there = read_json(folder / RECORD, (), f"{no_run} that can go on: choose another --output")
    here = json.loads(json.dumps(settings))
    differing = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    # Other experiments have other options, which would be a long list.
    if "experiment" in differing:
        differing = ["experiment"]
    if differing:
        details = ", ".join(f"{k} was {there.get(k)}, now {here.get(k)}" for k in differing)
        raise UserError(
            f"the output folder {folder} holds a run with another configuration ({details}); "
            "choose another --output, or delete that folder to start over"
        )


@contextlib.contextmanager
def claimed(folder: Path, settings: dict[str, Any]) -> Iterator[None]:
    """Creates the folder, locks it against other processes, and writes the settings into it.

    The lock is on the folder itself, so that a killed process leaves no lock. Systems that cannot
    lock folders run without a lock.

    Raises:
      UserError: another process has the lock, or an error of `check_folder`.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if fcntl is not None:
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                _lock(descriptor, folder)
        except OSError as error:
            raise UserError(f"cannot write the output folder {folder}: {error.strerror}") from None
        # Another process may have used the folder since the last check.
        check_folder(folder, settings)
        write_atomically(folder / RECORD, json.dumps(settings, indent=2) + "\n")
        yield


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"another process uses the output folder {folder}; wait for it, or choose "
            "another --output"
        ) from None
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EISDIR, errno.ENOLCK, errno.ENOTSUP):
            raise
