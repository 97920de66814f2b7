"""Versions of the packages that effattn and its experiments need, as pip requirements.

The script prints the installed versions, or with `--oldest` the oldest that pyproject.toml allows.
"""

import importlib.metadata
import pathlib
import re
import sys
import tomllib


def main():
    text = pathlib.Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    needs = project["dependencies"] + extras["analysis"] + extras["experiments"]
    needs = [need.partition(";")[0] for need in needs if not need.startswith("effattn[")]
    oldest = dict(re.split(">=|==", need) for need in needs)
    oldest["jaxlib"] = oldest["jax"]
    for name, version in oldest.items():
        if "--oldest" not in sys.argv:
            version = importlib.metadata.version(name)
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
