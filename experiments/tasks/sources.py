"""Data in packages, which are found without being imported, and at paths."""

import importlib.util
from pathlib import Path

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
        raise UserError(f"this task needs as its path a folder with {holds}, got {path!r}")
    return folder
