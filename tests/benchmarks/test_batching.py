"""The benchmark of batching runs, but for Ray Serve, which is not here."""

from __future__ import annotations

import pytest

from benchmarks import batching, results
from benchmarks.peers import ray_batching
from tests.support.selection import mostly_long

pytestmark = pytest.mark.checkout


@pytest.mark.parametrize("how", mostly_long(batching.BATCHING, "aqueduct/batched"))
def test_a_measurement_comes_to_its_end(how: str) -> None:
    row = batching.measure(batching.Told(how, 8, 0.2))
    assert set(row) == set(batching.TABLE)
    assert all(value > 0 for value in row.values())


def test_the_report_compares_with_no_batching() -> None:
    rows = [
        {"case": "crowd", "contestant": name, "repeat": 0, "rows_s": value}
        for name, value in (("aqueduct/plain", 100.0), ("aqueduct/batched", 2500.0))
    ]
    text = batching.report(results.Run({"format": results.FORMAT, "rows": rows}))
    assert "25.0 (25.0-25.0)" in text
    assert [case.name for case in batching.select("lonely")] == ["lonely"]


def test_percentiles_are_those_of_calls() -> None:
    found = ray_batching.percentiles([0.001 * number for number in range(1, 201)], 2.0)
    assert found["rows_s"] == 800
    assert found["p50_us"] == pytest.approx(101_000)
    assert found["p99_us"] == pytest.approx(199_000)
