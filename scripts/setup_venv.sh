#!/bin/sh
# setup_venv.sh VENV EXTRAS
#
# Leaves effattn[EXTRAS] installed, editable, in the virtual environment VENV; does nothing when
# that was done since pyproject.toml last changed. A new environment gets $PYTHON, or else the
# newest Python of this machine for which JAX has wheels. Only an environment made here is ever made
# anew, and it stays as it was where that fails.
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

# What pip has to say is shown if it fails.
install() {
    "$python" -m pip install -q "$@" >"$log" 2>&1 || { cat "$log" >&2; return 1; }
}

pythons() {
    scripts/find_pythons.sh ${PYTHON:+"$PYTHON"}
}

# The environment's Python runs, and is the one asked for if one was.
usable() {
    [ -x "$python" ] || return 1
    found=$(scripts/find_pythons.sh "$python")
    [ -n "$found" ] && { [ -z "${PYTHON:-}" ] || [ "$found" = "$(pythons)" ]; }
}

# What was there comes back unless all was installed.
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
        fail "$venv is there and effattn did not make it; VENV= names another place"
    choice=$(pythons)
    [ -n "$choice" ] || fail "no usable Python${PYTHON:+ at PYTHON=$PYTHON}: effattn needs one" \
        "from 3.11 up that runs and has the venv module (Debian: python3-venv); PYTHON= names it"
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
        fail "cannot make $venv, as above; VENV= names a place that can be written"
    fail "no Python here could install $jax. Without a network nothing can be installed; a Python" \
        "too new for JAX's wheels needs an older one beside it: PYTHON=python3.X names it"
}

usable || create
[ "$stamp" -nt pyproject.toml ] && exit

say "installing effattn[$extras] in $venv (minutes, the first time)"
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null
install --editable ".[$extras]" || fail "pip failed, as above"
touch "$stamp"
