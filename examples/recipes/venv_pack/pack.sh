#!/bin/sh
# Packs an environment for Spark's executors:
#
#   examples/recipes/venv_pack/pack.sh executors.tar.gz dist/aqueduct_arrow-*.whl 'pandas<3' numpy
#
# What comes behind the archive's name is for pip: the wheel, or aqueduct-arrow, and all else that
# jobs import. PySpark is left out, since executors have the cluster's. Needs the package venv-pack.
# PYTHON is of the version that executors find at the same path; the archive has links to it.
set -eu
archive=$1
shift
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/environment"
"$work/environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
venv-pack --quiet --force --prefix "$work/environment" --output "$archive"
ls -l "$archive"
