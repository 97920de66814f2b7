#!/usr/bin/env bash
# check_release.sh PYTHON
#
# Builds the wheel and the source distribution in dist/ with the environment's PYTHON, checks their
# contents and metadata, and installs both in clean environments: the wheel on the newest Python of
# each minor version on this machine, with the newest packages and, on the oldest Python, with the
# oldest packages that pyproject.toml allows.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
export PIP_DISABLE_PIP_VERSION_CHECK=1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say() {
    echo "effattn: $*"
}

rm -rf dist
"$python" -m build --outdir dist >"$scratch/build.log" 2>&1 || { cat "$scratch/build.log"; exit 1; }
"$python" -m twine check --strict dist/*
"$python" -m check_wheel_contents dist/*.whl

# installed NAME PYTHON DISTRIBUTION [CONSTRAINTS]
installed() {
    "$2" -m venv "$scratch/venv"
    "$scratch/venv/bin/python" -m pip install -qq ${4:+-c "$4"} "$3"
    "$scratch/venv/bin/python" .ci/check_wheel.py dist/*.whl
    rm -rf "$scratch/venv"
    say "$1: installs, imports and runs"
}

minors=
oldest=
while read -r version path; do
    minor=${version%.*}
    case " $minors " in *" $minor "*) continue ;; esac
    minors="$minors $minor"
    installed "wheel on Python $version" "$path" dist/*.whl
    oldest=$path oldest_version=$version
done < <(scripts/find_pythons.sh)

"$oldest" .ci/versions.py --oldest >"$scratch/oldest.txt"
installed "wheel on Python $oldest_version with the oldest packages" "$oldest" dist/*.whl \
    "$scratch/oldest.txt"
installed "source distribution on Python $oldest_version" "$oldest" dist/*.tar.gz
