"""``benchmarks/trace_batch.py`` counts what a batch passes, in both processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parent.parent
ROWS = ("first batch", "each further", "twelve batches")


def run(*options: str) -> str:
    command = [sys.executable, "-m", "benchmarks.trace_batch", "--repeat", "3", *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_trace_has_plausible_numbers_for_both_processes() -> None:
    found = json.loads(run("--json"))
    assert list(found) == ["client", "service"]
    for rows in found.values():
        assert tuple(rows) == ROWS
        first, further, twelve = (rows[name] for name in ROWS)
        for numbers in (first, twelve):
            assert 5 <= numbers["modules"] <= numbers["all_modules"] < 150
            assert numbers["modules"] - 1 <= numbers["moves"] < numbers["calls"] < 10_000
            assert 0 <= numbers["thread_changes"] < numbers["calls"]
        assert further["calls"] == pytest.approx((twelve["calls"] - first["calls"]) / 11, abs=0.1)
        assert further["calls"] < first["calls"]
    # The service may save more by batches that come together than they take.
    assert found["client"]["first batch"]["calls"] < found["client"]["twelve batches"]["calls"]
    assert found["client"]["first batch"]["thread_changes"] > 0


def test_the_table_has_a_line_for_each_process_and_part() -> None:
    lines = [line.split(" | ") for line in run("--rows", "10").splitlines()]
    assert [cells[:2] for cells in lines[2:]] == [
        [f"| {side}", row] for side in ("client", "service") for row in ROWS
    ]
    assert {len(cells) for cells in lines[2:]} == {7}
