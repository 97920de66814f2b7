#!/bin/sh
# find_pythons.sh [PYTHON]...
#
# Prints "3.13.0 /path/to/python", newest first, for each Python that effattn can use, among the
# arguments or, without arguments, among all on PATH and in pyenv. A usable Python runs (a pyenv shim
# may not), is a final release of CPython 3.11 or newer, and can create virtual environments.

candidates() {
    pyenv=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}
    (
        IFS=:
        for directory in $PATH; do
            printf '%s\n' "$directory"/python3 "$directory"/python3.[1-9][0-9]
        done
    )
    printf '%s\n' "$pyenv"/versions/*/bin/python
}

probe='
import ensurepip, os, sys, sysconfig, venv
if (
    sys.version_info >= (3, 11)
    and sys.version_info.releaselevel == "final"
    and sys.implementation.name == "cpython"
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
):
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    print("%d.%d.%d %s" % (sys.version_info[:3] + (base,)))
'

if [ $# -gt 0 ]; then printf '%s\n' "$@"; else candidates; fi |
    while IFS= read -r python; do
        "$python" -c "$probe" </dev/null 2>/dev/null
    done |
    sort -u | sort -t . -k 1,1nr -k 2,2nr -k 3,3nr
