#!/bin/sh
# setup_venv.sh VENV EXTRAS
#
# Installs effattn[EXTRAS], editable, in the virtual environment VENV, unless that was done since
# the last change of pyproject.toml. A new environment gets $PYTHON or, without it, the newest
# Python of this machine for which JAX has wheels. The script replaces only environments that it
# created, and restores the old environment if the installation fails.
set -eu
cd "$(dirname "$0")/.."
venv=$1
extras=$2
python=$venv/bin/python
made_here=$venv/.made-by-effattn
stamp=$venv/.installed-$extras
log=$venv/pip.log
jax=$(sed -n 's/^ *"\(jax>=[^"]*\)",$/\1/p' pyproject.toml)
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() {
    echo "effattn: $*" >&2
}

fail() {
    say "$*"
    exit 1
}

# Shows the output of pip only if pip fails.
install() {
    "$python" -m pip install -q "$@" >"$log" 2>&1 || { cat "$log" >&2; return 1; }
}

pythons() {
    scripts/find_pythons.sh ${PYTHON:+"$PYTHON"}
}

# Succeeds if the environment's Python runs and is the requested one, if any.
usable() {
    [ -x "$python" ] || return 1
    found=$(scripts/find_pythons.sh "$python")
    [ -n "$found" ] && { [ -z "${PYTHON:-}" ] || [ "$found" = "$(pythons)" ]; }
}

# Restores the old environment if the script fails.
before=
finish() {
    if [ $? != 0 ] && [ -n "$before" ]; then
        rm -rf "$venv"
        mv "$before/venv" "$venv"
    fi
    rm -rf "$before"
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

create() {
    [ ! -e "$venv" ] || [ -e "$made_here" ] ||
        fail "$venv exists and was not created by effattn; choose another place by VENV="
    choice=$(pythons)
    [ -n "$choice" ] || fail "no usable Python${PYTHON:+ at PYTHON=$PYTHON}: effattn needs Python" \
        "3.11 or newer with the venv module (Debian: python3-venv); choose one by PYTHON="
    if [ -e "$venv" ]; then
        before=$(mktemp -d "$venv.XXXXXX")
        mv "$venv" "$before/venv"
    fi
    made=
    while read -r version path; do
        say "making $venv with Python $version ($path)"
        rm -rf "$venv"
        mkdir -p "$venv" && touch "$made_here" && "$path" -m venv "$venv" || continue
        made=yes
        install --only-binary :all: "$jax" && return
        say "Python $version could not install $jax"
    done <<EOF
$choice
EOF
    rm -rf "$venv"
    [ -n "$made" ] ||
        fail "cannot create $venv, see above; choose a writable place by VENV="
    fail "no Python here could install $jax. Installation needs a network, and a Python for which" \
        "JAX has wheels; choose another Python by PYTHON=python3.X"
}

usable || create
[ "$stamp" -nt pyproject.toml ] && exit

say "installing effattn[$extras] in $venv (minutes, the first time)"
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null
install --editable ".[$extras]" || fail "pip failed, see above"
touch "$stamp"
