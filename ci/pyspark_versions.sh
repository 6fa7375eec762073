#!/bin/sh
# Runs one job of each kind with each version of PySpark, and prints what became of them:
#
#   ci/pyspark_versions.sh            4.0, 4.1, 4.2 and 4.3: the newest of each
#   ci/pyspark_versions.sh 4.1        one of them
#   ci/pyspark_versions.sh 4.1 read   one of them, and one job
#
# Each version has an environment in build/pyspark, made once: 1 GB and a few minutes each. They have
# the Python and the compiled modules of .venv.
set -eu
cd "$(dirname -- "$0")/.."
here=$PWD
JAVA_HOME=$("$here/ci/system.sh" java)
export JAVA_HOME
export PATH="$JAVA_HOME/bin:$PATH" SPARK_LOCAL_IP=127.0.0.1 PIP_DISABLE_PIP_VERSION_CHECK=1
versions="4.0 4.1 4.2 4.3"
if [ $# -gt 0 ]; then
    versions=$1
    shift
fi

make_venv() { # version, folder
    [ -x "$2/bin/python" ] || .venv/bin/python -m venv "$2"
    extras=connect
    [ "$1" = 4.0 ] || extras=connect,pipelines
    grep -v '^pyspark==' ci/constraints.txt >build/pyspark/constraints.txt
    "$2/bin/python" -m pip install --quiet -c build/pyspark/constraints.txt \
        "pyspark[$extras]~=$1.0" 'pandas>=2.2,<3' numpy pyarrow aioquic cryptography pyopenssl
    "$2/bin/python" - "$here" <<'END'
import sysconfig, pathlib, sys
pathlib.Path(sysconfig.get_path("purelib"), "aqueduct.pth").write_text(sys.argv[1] + "\n")
END
    cp build/pyspark/recipe "$2/made"
}

failed=""
mkdir -p build/pyspark
for version in $versions; do
    folder=build/pyspark/$version
    { sed -n '/^make_venv/,/^}/p' ci/pyspark_versions.sh; cat ci/constraints.txt; } >build/pyspark/recipe
    cmp --quiet build/pyspark/recipe "$folder/made" || make_venv "$version" "$folder"
    PYSPARK_PYTHON=$here/$folder/bin/python
    export PYSPARK_PYTHON
    "$PYSPARK_PYTHON" ci/pyspark_jobs.py "$version" "$@" || failed="$failed $version"
done
[ -z "$failed" ] || { echo "ci/pyspark_versions.sh: jobs failed with PySpark$failed" >&2; exit 1; }
