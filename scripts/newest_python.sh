#!/bin/sh
# Prints the newest supported Python of this machine. Being on the path is not enough: the shims of pyenv are there
# for versions that are not active, and only fail when they are run.
set -eu

newest_minor=14
oldest_minor=11

runs() {
    "$1" -c "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, $2))" >/dev/null 2>&1
}

minor=$newest_minor
while [ "$minor" -ge "$oldest_minor" ]; do
    set -- "python3.$minor"
    if command -v pyenv >/dev/null 2>&1; then
        set -- "$@" "$(pyenv root)"/versions/3."$minor".*/bin/python3."$minor"
    fi
    for candidate in "$@"; do
        if runs "$candidate" "$minor"; then
            echo "$candidate"
            exit 0
        fi
    done
    minor=$((minor - 1))
done
echo "No Python from 3.$oldest_minor to 3.$newest_minor runs on this machine." >&2
exit 1
