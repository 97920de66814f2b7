"""Links to the documentation of JAX, Flax and Optax, without a network.

Intersphinx reads names and addresses from an inventory of each project. The inventories here have
the names that effattn's documentation uses.
"""

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

# Address of each project, and the page of each name.
_PROJECTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "jax": (
        "https://docs.jax.dev/en/latest/",
        {
            name: f"_autosummary/{name}.html"
            for name in (
                "jax.Array",
                "jax.checkpoint",
                "jax.device_put",
                "jax.eval_shape",
                "jax.grad",
                "jax.jit",
                "jax.lax.dot",
                "jax.lax.scan",
                "jax.nn.dot_product_attention",
                "jax.random.key",
                "jax.set_mesh",
                "jax.shard_map",
                "jax.vmap",
            )
        },
    ),
    "flax": (
        "https://flax.readthedocs.io/en/stable/api_reference/flax.nnx/",
        {
            "flax.nnx.Module": "module.html",
            "flax.nnx.MultiHeadAttention": "nn/attention.html",
            "flax.nnx.Param": "variables.html",
            "flax.nnx.Rngs": "rnglib.html",
            "flax.nnx.Variable": "variables.html",
        },
    ),
    "optax": (
        "https://optax.readthedocs.io/en/latest/api/",
        {"optax.adamw": "optimizers.html", "optax.GradientTransformation": "transformations.html"},
    ),
}


def written(folder: Path) -> dict[str, tuple[str, str]]:
    """Writes the inventories, and returns the setting `intersphinx_mapping`."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, (address, pages) in _PROJECTS.items():
        path = folder / f"{project}.inv"
        path.write_bytes(_inventory(project, pages))
        mapping[project] = address, str(path)
    return mapping


def _inventory(project: str, pages: Mapping[str, str]) -> bytes:
    head = (
        f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    body = "".join(_lines(pages))
    return head.encode() + zlib.compress(body.encode())


def _lines(pages: Mapping[str, str]) -> Iterator[str]:
    for name, page in pages.items():
        role = "class" if name.rpartition(".")[2][:1].isupper() else "function"
        yield f"{name} py:{role} 1 {page}#$ -\n"
