"""Configuration of Sphinx for `make docs`."""

import sys
from pathlib import Path

import effattn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from extensions import inventories  # noqa: E402

project = "effattn"
author = "The effattn authors"
copyright = author
release = version = effattn.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    # Before KaTeX, whose clean-up would hide the message about a failing script.
    "sphinx_gallery.gen_gallery",
    "sphinxcontrib.katex",
    "extensions.docstrings",
    "extensions.api_pages",
    "extensions.generated_tables",
    "extensions.mechanism_pages",
    "extensions.repository_links",
    "extensions.gallery",
]
intersphinx_mapping = inventories.written(HERE / "_build" / "inventories")
root_doc = "index"
exclude_patterns = ["_build"]
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
default_role = "code"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "exclude-members": "tree_flatten,tree_unflatten"}
autosummary_generate = False
napoleon_use_ivar = True

maximum_signature_line_length = 80
highlight_language = "none"

# Every script is executed; a failing one fails the build. Other processes run them, because Sphinx
# forks this one to read pages, which a process that has run JAX does not survive.
sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": "",
    "within_subsection_order": "FileNameSortKey",
    "reset_modules": ("matplotlib", "extensions.gallery.start_afresh"),
    "reset_modules_order": "both",
    "doc_module": ("effattn",),
    "capture_repr": (),
    "notebook_extensions": set(),
    "download_all_examples": False,
    "show_signature": False,
    "parallel": 2,
    "min_reported_time": float("inf"),
    "write_computation_times": False,
}

# The style sheet and the fonts of KaTeX are in _static; its extension has the scripts.
katex_css_path = "katex/katex.min.css"
html_static_path = ["_static"]
html_css_files = ["site.css", "gallery.css"]

html_theme = "sphinx_book_theme"
html_title = "effattn"
# The sidebar has the current section only: the whole one would take half of the time of the build.
html_theme_options = {"collapse_navbar": True}
html_context = {"default_mode": "auto"}  # light or dark as the reader's system
