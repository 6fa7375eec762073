#!/bin/sh
# Builds the compiled modules with edge coverage and address sanitizer, in build/fuzz alone, then
# fuzzes (see tests/fuzz/__main__.py):
#
#   ci/fuzz.sh run 60                 every target, 60 s in all, after a self-test
#   ci/fuzz.sh run 600 wire           one target
#   ci/fuzz.sh replay wire FILE       one input
#   ci/fuzz.sh merge                  the corpus in tests/fuzz/corpus, renewed
#
# The sanitizer's runtime and libFuzzer come with atheris and are preloaded, so the modules are
# linked without one of their own. The interpreter and the packages are those of .venv.
set -eu
cd "$(dirname -- "$0")/.."
if [ "$(uname)" != Linux ]; then
    echo "ci/fuzz.sh: the sanitizer's runtime is preloaded, which works on Linux alone" >&2
    exit 1
fi
clang=$(ci/system.sh clang)
python=$PWD/.venv/bin/python
build=$PWD/build/fuzz
tree=$build/tree
mkdir -p "$build"

# What was built another way, or with another compiler, is not built on.
stamp=$(cat ci/fuzz.sh ci/constraints.txt pyproject.toml | sha256sum | cut -c 1-16)-$("$clang" -dumpversion)
if [ "$(cat "$build/stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "$build/site" "$tree" "$build/stamp"
    "$python" -m pip install --quiet --disable-pip-version-check --target "$build/site" \
        -c ci/constraints.txt --group fuzz
    echo "$stamp" >"$build/stamp"
fi

# Everything but what is compiled is copied again, with its times, so only changes are compiled.
mkdir -p "$tree"
find "$tree" -path "$tree/build" -prune -o -type f ! -name '*.so' -exec rm {} +
tar -c --exclude='*.so' --exclude=__pycache__ aqueduct setup.py ci/long_description.py |
    tar -x -C "$tree"
flags="-g -fno-omit-frame-pointer -fsanitize=address,fuzzer-no-link"
(
    cd "$tree"
    CC="$clang $flags" LDSHARED="$clang -shared" \
        "$python" setup.py --quiet build_ext --inplace
)
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
# shellcheck disable=SC2086
"$clang" $flags -O1 -fPIC -c "-I$include" tests/fuzz/canary.c -o "$build/canary.o"
"$clang" -shared "$build/canary.o" -o "$tree/fuzz_canary.so"

if [ "$1" = run ]; then
    "$python" -m tests.fuzz self-test
fi
exec "$python" -m tests.fuzz "$@"
