#!/bin/sh
# Builds, repairs and tests wheels from the sdist with cibuildwheel:
#
#   ci/wheels.sh                      those of every supported Python, each with the whole suite
#   ci/wheels.sh 'cp311-*'            that of one Python
#   ci/wheels.sh 'cp311-*' compiled   tried with less: where the suite has just passed on that Python,
#                                     a wheel can be wrong in what it lacks and in what was compiled
#
# Linux needs containers. Where the registry of the official images cannot be reached, a local
# image stands in, with the one Python of this Debian (ci/image.sh). AQUEDUCT_IMAGE=local or
# =official decides instead of the look.
set -eu
cd "$(dirname -- "$0")/.."
PATH=$PWD/.venv/bin:$PATH
rm -rf wheelhouse
python -m build --sdist --outdir wheelhouse
only=${1:-} tests=${2:-all}
set -- wheelhouse/*.tar.gz
[ -z "$only" ] || export CIBW_BUILD="$only"
case $tests in
all) ;;
compiled)
    # All are collected, so all that any of them imports is there; these run, and have every test
    # that imports a compiled module (tests/test_tooling.py sees to it).
    compiled="tests/speedups tests/protocol tests/arrow tests/rpc/test_fragments.py \
        tests/rpc/test_control_streams.py \
        tests/rpc/test_reactive_calls.py tests/service/test_reactive_demand.py \
        tests/carriers/test_contract.py \
        tests/carriers/test_tricks_quic.py tests/endpoint/test_stream.py tests/rpc/test_echo.py \
        tests/rpc/test_reactive_calls.py tests/service/test_reactive_demand.py \
        tests/client/test_waiter.py"
    marks="not spark and not long and not checkout"
    export CIBW_TEST_COMMAND="python -I ci/smoke.py \
        && python -m pytest -qq --collect-only -m '$marks' tests \
        && python -m pytest -n auto -m '$marks' $compiled"
    ;;
*)
    echo "ci/wheels.sh: tests are 'all' or 'compiled', not '$tests'" >&2
    exit 2
    ;;
esac

reachable() {
    python -c '
import urllib.error, urllib.request
try:
    urllib.request.urlopen("https://quay.io/v2/", timeout=10)
except urllib.error.HTTPError as answer:
    raise SystemExit(answer.code != 401)' 2>/dev/null
}

if [ "$(uname)" != Linux ]; then
    exec cibuildwheel --output-dir wheelhouse "$1"
fi
case ${AQUEDUCT_IMAGE:-} in
local | official) choice=$AQUEDUCT_IMAGE ;;
*) if reachable; then choice=official; else choice=local; fi ;;
esac
if [ "$choice" = local ]; then
    image=$(ci/image.sh)
    machine=$(uname -m)
    export "CIBW_MANYLINUX_$(echo "$machine" | tr '[:lower:]' '[:upper:]')_IMAGE=$image"
    # The image has this one Python.
    python3=$(podman --runtime runc run --rm --network=none "--ulimit=nofile=$(ulimit -Hn):$(ulimit -Hn)" \
        --ulimit=nproc=32768:32768 "$image" ls /opt/python | grep -v cp39 | cut -d- -f1)
    export CIBW_BUILD="$python3-manylinux_$machine"
    # The tests' packages as pinned here, not what was published this morning.
    export CIBW_TEST_ENVIRONMENT="AQUEDUCT_NO_SKIPS=1 PIP_CONSTRAINT=/project/ci/constraints.txt"
    limits="--ulimit=nofile=$(ulimit -Hn):$(ulimit -Hn) --ulimit=nproc=32768:32768"
    options="--runtime=runc --network=host $limits"
    export CIBW_CONTAINER_ENGINE="podman; disable_host_mount: true; create_args: $options"
    echo "ci/wheels.sh: no registry of images in use; $image with $CIBW_BUILD"
fi
cibuildwheel --platform linux --output-dir wheelhouse "$1"
ls -l wheelhouse
