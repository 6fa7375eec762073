#!/bin/sh
# Compiles the library and runs most of its tests with the lowest version of each dependency that
# pyproject.toml allows: of the build, of the library, and of every extra.
#
#   ci/lower_bounds.sh                      all tests that are not long
#   ci/lower_bounds.sh tests/arrow -x       these arguments for pytest instead
#
# The environment and a copy of the sources lie in build/lower_bounds. A bound that does not hold is
# to be raised; one that pip cannot install is no version at all, or not one for this Python.
set -eu
cd "$(dirname -- "$0")/.."
here=$PWD
place=$here/build/lower_bounds
mkdir -p "$place/tree"
.venv/bin/python ci/package_versions.py --lowest >"$place/wanted"
if ! cmp --quiet "$place/wanted" "$place/installed"; then
    rm -rf "$place/venv" "$place/installed"
    .venv/bin/python -m venv "$place/venv"
    pip="$place/venv/bin/python -m pip install --quiet --disable-pip-version-check"
    $pip -c ci/constraints.txt pip
    $pip -r "$place/wanted"
    cp "$place/wanted" "$place/installed"
fi
# The sources as they are here, with their times: what has changed is compiled again.
[ ! -d "$place/tree/.git" ] || git -C "$place/tree" rm -r --force --quiet .
git ls-files -z --cached --others --exclude-standard --deduplicate |
    tar --create --null --files-from=- --ignore-failed-read |
    tar --extract --directory="$place/tree"
cd "$place/tree"
PATH=$place/venv/bin:$PATH
JAVA_HOME=$("$here/ci/system.sh" java)
PYSPARK_PYTHON=$place/venv/bin/python
PYSPARK_DRIVER_PYTHON=$PYSPARK_PYTHON
export PATH JAVA_HOME PYSPARK_PYTHON PYSPARK_DRIVER_PYTHON
# Tests ask for the version of the library, which its metadata has.
python setup.py --quiet egg_info build_ext --inplace
[ -d .git ] || git init --quiet
git add --all
[ $# -gt 0 ] || set -- -n 2 -m "not long and not checkout" tests
python -m pip list --format=freeze --disable-pip-version-check | sort >"$place/versions"
python -m pytest "$@"
echo "the tests pass with the lowest versions; they stand in build/lower_bounds/versions"
