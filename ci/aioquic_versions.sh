#!/bin/sh
# Runs the tests near QUIC with each version of aioquic that pyproject.toml allows:
#
#   ci/aioquic_versions.sh                          all of them
#   ci/aioquic_versions.sh 1.7.0                    one version
#   ci/aioquic_versions.sh 1.7.0 tests/carriers -x  one version, with these arguments for pytest
#
# PyPI says which versions there are, so that a new one is tested before somebody installs it. Each
# lies in build/aioquic, before the environment's own.
set -eu
cd "$(dirname -- "$0")/.."

versions=$(.venv/bin/python ci/package_versions.py aioquic)
if [ $# -gt 0 ]; then
    versions=$1
    shift
fi
[ $# -gt 0 ] || set -- -n 2 -m "not spark and not long" \
    tests/carriers/test_aioquic_names.py tests/carriers/test_bidi.py \
    tests/carriers/test_contract.py tests/carriers/test_early_data.py tests/carriers/test_flow.py \
    tests/carriers/test_path_mtu.py tests/carriers/test_quic.py \
    tests/carriers/test_quic_connect.py tests/carriers/test_quic_listener.py \
    tests/carriers/test_send_buffer.py tests/carriers/test_tickets.py \
    tests/carriers/test_tricks_quic.py tests/client/test_client.py tests/service/test_addresses.py \
    tests/endpoint/test_early_data.py tests/endpoint/test_silent_peers.py

failed=""
for version in $versions; do
    place=build/aioquic/$version
    if ! [ -d "$place/aioquic" ]; then
        rm -rf "$place"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check \
            --no-deps --target "$place" "aioquic==$version"
    fi
    echo "=== aioquic $version"
    PYTHONPATH=$PWD/$place ci/env python -c '
import sys, importlib.metadata as metadata
assert metadata.version("aioquic") == sys.argv[1]' "$version"
    PYTHONPATH=$PWD/$place ci/env pytest "$@" || failed="$failed $version"
done
[ -z "$failed" ] || { echo "ci/aioquic_versions.sh: tests failed with aioquic$failed" >&2; exit 1; }
