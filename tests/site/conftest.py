"""The extensions of the site are imported as Sphinx imports them."""

import pathlib
import sys

import effattn

DOCS = pathlib.Path(effattn.__file__).parents[1] / "docs"
if (DOCS / "extensions").exists():
    sys.path.insert(0, str(DOCS))
