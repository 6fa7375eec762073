#!/bin/sh
# Compiles the library with other Pythons, each from the Debian suite that has it. With each, it runs
# the tests that are not Spark's, and then the demo, which is a Spark job that checks its answers:
#
#   ci/pythons.sh                        trixie (Python 3.13) and sid (3.14)
#   ci/pythons.sh sid                    one suite
#   ci/pythons.sh sid tests/bpmux -x     one suite, with these arguments for pytest
#
# Each suite has a root file system in build/pythons, made once. It needs root on Debian.
set -eu
cd "$(dirname -- "$0")/.."
here=$PWD

if [ -z "${AQUEDUCT_PYTHONS:-}" ]; then
    if [ "$(id -u)" != 0 ] || ! [ -e /etc/debian_version ]; then
        echo "ci/pythons.sh: it makes file systems of Debian's packages; run it as root on Debian." >&2
        echo "ci/pythons.sh: 'ci/env pytest -m long tests' runs the long tests without it." >&2
        exit 1
    fi
    if ! command -v mmdebstrap >/dev/null; then
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        apt-get install -qq -y --no-install-recommends mmdebstrap >/dev/null
    fi
    # What is mounted here is gone when this ends: nobody removes files through it by mistake.
    export AQUEDUCT_PYTHONS=inside
    exec unshare --mount "$0" "$@"
fi

packages=ca-certificates,gcc,git,libc6-dev,openssl,postgresql,procps
packages=$packages,default-jre-headless,python3,python3-dev,python3-venv

make_root() { # suite, folder
    rm -rf "$2" "$2.new"
    # A mirror may renew sid's index less often than the index itself demands.
    mmdebstrap -q --mode=root --variant=minbase \
        --aptopt='Acquire::Check-Valid-Until "false"' "--include=$packages" \
        "$1" "$2.new" http://deb.debian.org/debian
    echo "$packages" >"$2.new/packages"
    mv "$2.new" "$2"
}

run() { # suite, arguments of pytest
    suite=$1 root=$here/build/pythons/$1
    shift
    mkdir -p build/pythons
    [ "$(cat "$root/packages" 2>/dev/null)" = "$packages" ] || make_root "$suite" "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    # The sources as they are here, with their times: what has changed is compiled again.
    mkdir -p "$root/aqueduct"
    [ ! -d "$root/aqueduct/.git" ] || git -C "$root/aqueduct" rm -r --force --quiet .
    git ls-files -z --cached --others --exclude-standard --deduplicate |
        tar --create --null --files-from=- --ignore-failed-read |
        tar --extract --directory="$root/aqueduct"
    env -i HOME=/root LANG=C.UTF-8 PATH=/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        chroot "$root" sh -euc '
            cd aqueduct
            python3 -m venv /venv
            export PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1
            export PIP_CONSTRAINT=/aqueduct/ci/constraints.txt
            # An installation compiles everything; after it, what has changed is enough.
            cat pyproject.toml ci/pythons.sh >/venv/wanted
            if ! cmp --quiet /venv/wanted /venv/installed; then
                pip install --quiet build check-jsonschema cython kubernetes-validate setuptools twine venv-pack
                pip install --quiet --no-build-isolation \
                    --editable ".[bench,demo,postgres,spark,telemetry,test]"
                mv /venv/wanted /venv/installed
            fi
            python setup.py --quiet build_ext --inplace
            # Some tests read what git has of the tree.
            [ -d .git ] || git init --quiet
            git add --all
            python --version
            python -m pytest "$@"
            JAVA_HOME=$(ci/system.sh java)
            export JAVA_HOME
            python -m spark_udfs.demo
            python -c "import sys; print(\"the tests and the Spark job pass with Python\", sys.version)"
        ' sh "$@"
}

suites="trixie sid"
if [ $# -gt 0 ]; then
    suites=$1
    shift
fi
[ $# -gt 0 ] || set -- -n 2 -m "not spark and not long" tests
for suite in $suites; do
    echo "=== $suite"
    run "$suite" "$@"
done
