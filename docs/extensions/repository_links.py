"""Links between files of the repository, on the site.

Pages link to files of the repository by relative paths, which GitHub follows. Here a path becomes
that of a page of the site: another page of `docs/`, the copy of a file that the site shows too, an
example, or the source of a module. A link to any other file becomes its text.
"""

import os.path
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sphinx.util import logging

_LOG = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
COPIES = "copied"
# Files that the site shows, by the page that shows each.
SHOWN: Mapping[str, str] = {
    "README.md": "index",
    "CONTRIBUTING.md": f"{COPIES}/contributing",
    "CHANGELOG.md": f"{COPIES}/changelog",
    **{
        f"experiments/results/{path.parent.name}/summary.md": f"{COPIES}/{path.parent.name}"
        for path in sorted(ROOT.glob("experiments/results/*/summary.md"))
    },
}
_ORIGINALS = {page: path for path, page in SHOWN.items() if page.startswith(COPIES)}

# A fenced block of code; links elsewhere may go on in the next line.
_BLOCK = re.compile(r"(^ *(```|~~~).*?^ *\2`*~*$)", re.M | re.S)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def setup(app: Any) -> dict[str, bool]:
    """Copies the files, and changes the links of each page as Sphinx reads it."""
    app.connect("builder-inited", _copy, priority=100)
    app.connect("source-read", _convert, priority=900)
    return {"parallel_read_safe": True}


def _copy(app):
    folder = Path(app.srcdir, COPIES)
    folder.mkdir(exist_ok=True)
    for page, original in _ORIGINALS.items():
        text = (ROOT / original).read_text(encoding="utf-8")
        if original.endswith("summary.md"):  # the report links to these, and no list of pages
            text = f"---\norphan: true\n---\n\n{text}"
        path = folder.parent / f"{page}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _convert(app, docname, source):
    if Path(app.env.doc2path(docname)).suffix == ".md":
        source[0], missing = converted(source[0], docname)
        for path in missing:
            _LOG.warning("%s does not exist, but this page links to it", path, location=docname)


def converted(text: str, page: str) -> tuple[str, list[str]]:
    """The text of a page with links for the site, and the linked files that do not exist."""
    missing = []
    path = _ORIGINALS.get(page, f"docs/{page}.md")

    def change(match):
        is_image, label, target = match.groups()
        if re.match(r"[a-z]+:|#|<", target):
            return match[0]
        target, hash_mark, anchor = target.partition("#")
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if is_image:
            relative = os.path.relpath(ROOT / found, ROOT / "docs" / posixpath.dirname(page))
            return f"![{label}]({relative})"
        if not (ROOT / found).exists():
            missing.append(found)
        place = place_of(found)
        if place is None:
            return label
        place = _relative(place, page)
        if place.endswith(".html"):  # a page that Sphinx does not know when it reads this one
            return f'<a href="{place}">{label}</a>'
        return f"[{label}]({place}{hash_mark}{anchor})"

    parts = _BLOCK.split(text)
    # Text, block, its fence, text, block, ...
    parts[::3] = [_LINK.sub(change, part) for part in parts[::3]]
    del parts[2::3]
    return "".join(parts), missing


def place_of(path: str) -> str | None:
    """The page of the site for a file of the repository, with its suffix; None if there is none."""
    if path in SHOWN:
        return f"{SHOWN[path]}.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples/"):
        name = path.removeprefix("examples/").removesuffix(".py").replace("README.rst", "index")
        return f"gallery/{name}.rst"
    if path.startswith("effattn/") and path.endswith(".py"):
        return f"_modules/{path.removesuffix('.py').removesuffix('/__init__')}.html"
    return None


def _relative(place, page):
    return os.path.relpath(place, posixpath.dirname(page) or ".")
