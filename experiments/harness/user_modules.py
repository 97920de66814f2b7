"""Python modules of the user, given by `--import`, that register further mechanisms."""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from experiments.harness.errors import UserError

# The type of the option. A field cannot be named `import`, which is a keyword of Python.
Modules = Annotated[tuple[str, ...], tyro.conf.arg(name="import")]


def load(names: Sequence[str]) -> None:
    """Imports modules from the current directory or `sys.path`.

    A module adds its mechanisms to the others by `effattn.registry.register(...)`. Runs are known
    by the name of the mechanism, and finished runs are not trained again: a mechanism whose code
    has changed needs another name, or the command another `--output`.

    Raises:
      UserError: a name is not that of a module, no such module exists, or importing the module
        fails.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UserError(
                f"--import must be the name of a Python module, such as my_package.my_module, got "
                f"{name!r}"
            )
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing and f"{name}.".startswith(f"{missing}."):
                raise UserError(
                    f"--import: there is no module {name!r} in the current directory or on "
                    "PYTHONPATH"
                ) from None
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"--import: the module {name!r} cannot be imported "
                f"({type(error).__name__}: {reason})"
            ) from error
