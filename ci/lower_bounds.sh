#!/bin/sh
# Compiles the library and tests it with the lowest version of each dependency that pyproject.toml
# allows: of the build, of the library, and of every extra. It runs the tests that are neither long nor
# Spark's, and a Spark job of each kind. Many tests of Spark need a newer PySpark.
#
#   ci/lower_bounds.sh                      those tests, and the jobs
#   ci/lower_bounds.sh tests/arrow -x       these arguments for pytest instead, and no jobs
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
python -m pip list --format=freeze --disable-pip-version-check | sort >"$place/versions"
if [ $# -gt 0 ]; then
    python -m pytest "$@"
else
    python -m pytest -n 4 -m "not long and not checkout and not spark" tests
    spark=$(sed -nE 's/^pyspark==([0-9]+\.[0-9]+).*/\1/p' "$place/versions")
    PYTHONPATH=$place/tree SPARK_LOCAL_IP=127.0.0.1 python ci/pyspark_jobs.py "$spark"
fi
echo "everything passes with the lowest versions; build/lower_bounds/versions lists them"
