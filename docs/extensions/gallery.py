"""Examples of the gallery: a fresh start for each script, and pages without downloads."""

from typing import Any

import jax
from docutils import nodes
from jax.extend.backend import clear_backends

from effattn import registry

_REGISTERED = dict(registry._MECHANISMS)
_OF_DOWNLOADS = {"sphx-glr-footer", "sphx-glr-download-link-note", "sphx-glr-signature"}


def setup(app: Any) -> dict[str, bool]:
    """Registers the change of pages."""
    app.connect("doctree-read", _without_downloads)
    return {"parallel_read_safe": True}


def start_afresh(gallery_conf: Any, script: Any, when: str) -> None:
    """Undoes what a script may change in this process, before and after the script.

    A script may set the number of devices, which JAX allows only before their first use, and may
    register mechanisms, which have no page.
    """
    clear_backends()
    jax.config.update("jax_num_cpu_devices", -1)
    registry._MECHANISMS.clear()
    registry._MECHANISMS.update(_REGISTERED)


def _without_downloads(app, doctree):
    for node in list(doctree.findall(nodes.Element)):
        if node.parent is not None and _OF_DOWNLOADS & set(node.get("classes", ())):
            node.parent.remove(node)
