"""`scripts/setup_venv.sh`: environments that it creates and keeps, and its messages."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Imitation of a Python: it answers the probe, creates environments, and has a silent pip. A file
# `.no-venv` beside it makes environments fail; `.no-pip` names packages that pip cannot find.
PYTHON = """#!/bin/sh
base={path}
for last; do :; done
case "$*" in
    -c*) echo "{version} $base" ;;
    "-m venv "*)
        [ ! -e "$base.no-venv" ] && mkdir -p "$last/bin" && cp "$0" "$last/bin/python" &&
            touch "$last/pyvenv.cfg" ;;
    "-m pip install "*)
        [ ! -e "$base.no-pip" ] || ! echo "$*" | grep -q "$(cat "$base.no-pip")" ;;
    "-m benchmarks.run"*) touch ran ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """Copy of the scripts and their inputs, older than all files that the scripts create."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
        os.utime(folder / name, (0, 0))
    return folder


@pytest.fixture
def python(tmp_path):
    """Function that returns the path of an imitated Python of a version."""

    def make(version):
        path = tmp_path / f"python{version}"
        path.write_text(PYTHON.format(path=path, version=version))
        path.chmod(0o755)
        return path

    return make


def run(checkout, *command, python):
    # under `make test PYTHON=...` an inner make would prefer the variables of the outer make
    above = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    environment = {name: value for name, value in os.environ.items() if name not in above}
    environment["PYTHON"] = str(python)
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


def setup(checkout, python, venv=".venv"):
    return run(checkout, "scripts/setup_venv.sh", venv, "test", python=python)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def version_of(venv):
    return subprocess.check_output([venv / "bin/python", "-c", "probe"], text=True).split()[0]


def test_an_environment_is_made_once(checkout, python):
    first = setup(checkout, python("3.12.0"))
    assert first.returncode == 0 and "making .venv with Python 3.12.0" in first.stderr
    second = setup(checkout, python("3.12.0"))
    assert second.returncode == 0 and not second.stderr


def test_another_python_makes_an_environment_of_effattn_anew(checkout, python):
    setup(checkout, python("3.12.0"))
    there = names(checkout)
    assert setup(checkout, python("3.13.0")).returncode == 0
    assert version_of(checkout / ".venv") == "3.13.0" and names(checkout) == there


@pytest.mark.parametrize("missing", ["jax", "editable"])
def test_an_environment_is_kept_where_another_cannot_be_installed(checkout, python, missing):
    setup(checkout, python("3.12.0"))
    there = names(checkout)
    other = python("3.13.0")
    other.with_name(f"{other.name}.no-pip").write_text(missing)
    assert setup(checkout, other).returncode == 1
    assert version_of(checkout / ".venv") == "3.12.0" and names(checkout) == there
    assert not setup(checkout, python("3.12.0")).stderr


@pytest.mark.parametrize("used", [False, True])
def test_an_environment_of_others_is_left_as_it_is(checkout, tmp_path, python, used):
    venv = tmp_path / "others"
    subprocess.run([python("3.12.0"), "-m", "venv", venv], check=True)
    if used:  # effattn may be installed in it
        assert setup(checkout, python("3.12.0"), str(venv)).returncode == 0
    there = names(venv)
    refused = setup(checkout, python("3.13.0"), str(venv))
    assert refused.returncode == 1 and names(venv) == there
    assert refused.stderr == (
        f"effattn: {venv} exists and was not created by effattn; choose another place by VENV=\n"
    )


def test_where_no_environment_can_be_made_nothing_else_is_blamed(checkout, python):
    (checkout / "file").touch()
    no_folder = setup(checkout, python("3.12.0"), "file/venv")
    broken = python("3.13.0")
    broken.with_name(f"{broken.name}.no-venv").touch()
    for failed in (no_folder, setup(checkout, broken)):
        assert failed.returncode == 1
        assert "choose a writable place by VENV=" in failed.stderr.splitlines()[-1]


def test_the_path_of_an_environment_may_hold_spaces(checkout, tmp_path, python):
    made = run(checkout, "make", "bench", f"VENV={tmp_path}/a b", python=python("3.12.0"))
    assert made.returncode == 0, made.stderr
    assert (checkout / "ran").exists() and version_of(tmp_path / "a b") == "3.12.0"
