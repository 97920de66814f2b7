"""Checks a wheel of effattn, given as the argument, in an environment that installed only it."""

import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys
import zipfile

# Packages that `import effattn` must not load; effattn depends only on the first three.
LAZY = (
    "flax",
    "chex",
    "llvmlite",
    "matplotlib",
    "jax.experimental.pallas",
    "triton",
    "jax_triton",
    "torch",
)


def check(condition, problem):
    if not condition:
        sys.exit(f"check_wheel: {problem}")


def main():
    root = pathlib.Path(__file__).resolve().parents[1]
    wheel = sys.argv[1]

    source = {
        path.relative_to(root).as_posix()
        for path in (root / "effattn").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = set(zipfile.ZipFile(wheel).namelist())
    extra = {name for name in packed - source if ".dist-info/" not in name}
    check("effattn/py.typed" in packed, "py.typed is not in the wheel")
    check(not source - packed, f"not in the wheel: {sorted(source - packed)}")
    check(not extra, f"in the wheel but not of effattn: {sorted(extra)}")
    check(any(name.endswith("LICENSE") for name in packed), "the license is not in the wheel")

    metadata = importlib.metadata.metadata("effattn")
    check(metadata["License-Expression"] == "Apache-2.0", "the metadata names another license")
    check(importlib.util.find_spec("torch") is None, "installing effattn installed PyTorch")

    # In a new interpreter, isolated from this directory.
    loaded = (
        f"import sys, effattn; print([m for m in {LAZY!r} if m in sys.modules]); "
        "print(effattn.__file__); import effattn.nn, effattn.decode; "
        "import jax.numpy as jnp; x = jnp.ones((1, 5, 2, 4)); "
        "assert effattn.dot_product_attention(x, x, x, is_causal=True).shape == x.shape"
    )
    result = subprocess.run([sys.executable, "-I", "-c", loaded], text=True, capture_output=True)
    check(result.returncode == 0, f"effattn does not import:\n{result.stderr}")
    eager, location = result.stdout.splitlines()
    check(eager == "[]", f"importing effattn also imports {eager}")
    check(sys.prefix in location, f"imported {location}, not the wheel")
    print(f"effattn {metadata['Version']}: {len(source)} files, imports on its own")


if __name__ == "__main__":
    main()
