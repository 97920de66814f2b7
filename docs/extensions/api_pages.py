"""The reference: a list of names for each public module, and a page for each name."""

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from sphinx.util import logging

_LOG = logging.getLogger(__name__)
MODULES = (
    "effattn",
    "effattn.nn",
    "effattn.naive",
    "effattn.patterns",
    "effattn.decode",
    "effattn.parallel",
    "effattn.analysis",
    "effattn.testing",
    "effattn.registry",
    "effattn.options",
)


def setup(app: Any) -> dict[str, bool]:
    """Writes the pages before Sphinx reads its sources."""
    app.connect("builder-inited", _write, priority=100)
    return {"parallel_read_safe": True}


def _write(app):
    folder = Path(app.srcdir, "api")
    folder.mkdir(exist_ok=True)
    pages = {"index": overview()}
    for module in MODULES:
        pages[module] = index_of(module)
        for name in public_names(module):
            page = f"{module}.{name}"
            pages[page] = page_of(module, name)
            if not has_text(module, name):
                _LOG.warning("%s has no docstring", page, location=f"api/{page}")
    for path in folder.glob("*.rst"):
        if path.stem not in pages:  # the page of a removed name
            path.unlink()
    for page, text in pages.items():
        path = folder / f"{page}.rst"
        if not path.exists() or path.read_text() != text:  # Sphinx rereads only changed pages
            path.write_text(text)


def public_names(module: str) -> list[str]:
    """Names of functions, classes and constants of a module that users may import."""
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    ]
    left_out = ModuleType, TypeVar
    return [name for name in names if not isinstance(getattr(loaded, name), left_out)]


def overview() -> str:
    """Page of all modules."""
    modules = "\n".join(f"   {module}" for module in MODULES)
    return f"""API
===

.. toctree::
   :titlesonly:

{modules}
"""


def has_text(module: str, name: str) -> bool:
    """Returns whether a function or class has a docstring; other values cannot have one."""
    value = getattr(importlib.import_module(module), name)
    return not callable(value) or bool(inspect.getdoc(value))


def index_of(module: str) -> str:
    """Page of a module: its docstring, and a table with a link for each name."""
    names = public_names(module)
    table = "\n".join(f"   {name}" for name in names)
    pages = "\n".join(f"   {name} <{module}.{name}>" for name in names)
    return f"""{_title(module)}

.. automodule:: {module}
   :no-members:

.. currentmodule:: {module}

.. autosummary::
   :nosignatures:

{table}

.. toctree::
   :hidden:

{pages}
"""


def page_of(module: str, name: str) -> str:
    """Page of a name."""
    value = getattr(importlib.import_module(module), name)
    kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
    return f"""{_title(name)}

.. currentmodule:: {module}

.. auto{kind}:: {name}
"""


def _title(text):
    return f"``{text}``\n{'=' * (len(text) + 4)}"
