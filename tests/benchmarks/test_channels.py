"""The benchmark of messages runs: each dialect, over each transport."""

from __future__ import annotations

import pytest

from benchmarks import channels, results
from tests.support.selection import mostly_long

pytestmark = pytest.mark.checkout

MEASURED = [(case, each) for case in channels.PLAN for each in case.contestants]


@pytest.mark.parametrize(
    ("case", "contestant"),
    mostly_long(MEASURED, *MEASURED[::5]),
    ids=[f"{case.name}-{each.name}" for case, each in MEASURED],
)
def test_a_measurement_comes_to_its_end(
    case: channels.Case, contestant: channels.Contestant
) -> None:
    row = channels.measure(channels.Told(case.scheme, 200, case.size, contestant.draft))
    assert row
    assert set(row) <= set(channels.TABLE)
    assert all(value > 0 for value in row.values())


def test_the_report_compares_with_the_first_dialect() -> None:
    rows = [
        {"case": "c", "contestant": name, "repeat": 0, "mib_s": value}
        for name, value in (("channels/first", 200.0), ("channels/draft", 100.0))
    ]
    text = channels.report(results.Run({"format": results.FORMAT, "rows": rows}))
    assert "0.50 (0.50-0.50)" in text
    assert [case.name for case in channels.select("quic")] == [
        "quic-message-64k",
        "quic-message-100",
    ]
