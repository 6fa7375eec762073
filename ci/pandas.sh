#!/bin/sh
# The tests of data frames of other libraries, with pandas 3: the extra [spark] has an older one, so
# it lies in build/pandas3, before the environment's own. Arguments are for pytest.
set -eu
cd "$(dirname -- "$0")/.."
wanted="pandas>=3,<4"
place=build/pandas3
if [ "$(cat "$place/wanted" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$place"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --no-deps --target "$place" "$wanted"
    echo "$wanted" >"$place/wanted"
fi
PYTHONPATH=$PWD/$place
export PYTHONPATH
ci/env python -c 'import pandas; print("pandas", pandas.__version__); assert pandas.__version__ > "3"'
ci/env pytest "$@" tests/client/test_other_libraries.py
