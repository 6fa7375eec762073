"""The example of data frames and queries prints what is in its data."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.examples.conftest import PATIENCE, ROOT

pytestmark = pytest.mark.checkout

PRINTS = """\
late by DuckDB: 90000
the answers have ['carrier', 'late']
late by Polars: {'A': 2, 'B': 0}
"""


def test_the_example_runs() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "polars_and_duckdb.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, PRINTS), run.stderr
