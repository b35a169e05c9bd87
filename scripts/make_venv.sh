#!/bin/sh
# Makes a virtual environment: make_venv.sh PYTHON FOLDER.
set -eu

python=$1
folder=$2

if ! version=$("$python" --version 2>&1); then
    echo "'$python' does not run: $version" >&2
    echo "Name a Python of at least 3.11, for example: make PYTHON=/usr/bin/python3.12 test" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "numpyro_ext needs Python 3.11 or newer, and '$python' is $version." >&2
    echo "Name another one, for example: make PYTHON=python3.12 test" >&2
    exit 1
fi
echo "Creating $folder with $version"
# --clear: what an interrupted attempt left behind must not survive.
"$python" -m venv --clear "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
