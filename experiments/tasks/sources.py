"""Data in packages, which are found without being imported, and at paths."""

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.harness.errors import UserError


def packaged(task: str, package: str, install: str, file: str) -> Path:
    """Returns a file or folder of a package.

    Raises:
      UserError: the package is not installed, or lacks the file.
    """
    spec = importlib.util.find_spec(package)
    found = Path((spec and spec.submodule_search_locations or [""])[0]) / file
    if spec is None or not found.exists():
        raise UserError(f"task {task} needs {file} of the package {package}: {install}")
    return found


def folder_at(path: str, holds: str) -> Path:
    """Returns the folder at a path.

    Raises:
      UserError: there is none.
    """
    folder = Path(path).expanduser()
    if not path or not folder.is_dir():
        raise UserError(f"this task needs the path of a folder with {holds}, got {path!r}")
    return folder


def digest(arrays: Sequence[np.ndarray]) -> dict[str, str]:
    """Returns the setting "data_sha256" of what was read from files."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return {"data_sha256": found.hexdigest()}
