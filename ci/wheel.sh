#!/bin/sh
# Builds the sdist, the wheel from the sdist, repairs it, checks what PyPI would show of both, and
# tries it in a fresh environment outside the source tree; there, what cibuildwheel would run can be
# collected. The results are in dist/.
set -eu
cd "$(dirname -- "$0")/.."
here=$PWD
PATH=$here/.venv/bin:$PATH
rm -rf dist build/raw
if [ "$(uname)" = Linux ]; then
    export AQUEDUCT_PGO=1
fi
PIP_CONSTRAINT=$here/ci/constraints.txt python -m build --outdir build/raw
mkdir -p dist
cp build/raw/*.tar.gz dist/
if [ "$(uname)" = Linux ]; then
    auditwheel repair --plat auto --wheel-dir dist build/raw/*.whl
else
    cp build/raw/*.whl dist/
fi

twine check --strict dist/*

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
cp ci/smoke.py "$fresh"
cd "$fresh"
"$here/.venv/bin/python" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check \
    -c "$here/ci/constraints.txt" "$here"/dist/*.whl
venv/bin/python -I smoke.py
venv/bin/aqueduct --help >/dev/null

# What it is tested with, on other machines and other Pythons, can be collected there.
venv/bin/python -m pip install --quiet --disable-pip-version-check \
    -c "$here/ci/constraints.txt" "$(echo "$here"/dist/*.whl)[test]"
venv/bin/python -I "$here/ci/collect.py" "$fresh/sources"
ls -l "$here/dist"
