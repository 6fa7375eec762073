"""The benchmark of ReactiveSocket."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import processes, reactivesocket, results
from tests.support.selection import mostly_long

pytestmark = pytest.mark.checkout

MEASURED = [(case, each) for case in reactivesocket.PLAN for each in case.contestants]


@pytest.mark.parametrize(
    ("case", "contestant"), mostly_long(MEASURED, *MEASURED[::5]), ids=lambda each: each.name
)
def test_every_contestant_is_measured(
    case: reactivesocket.Case, contestant: reactivesocket.Contestant
) -> None:
    count = 100 if case.mode != "stopped" else case.count
    streams = min(contestant.streams, 20)
    told = reactivesocket.Told(
        case.mode, contestant.kind, count, case.size, streams, 0.0, contestant.batches
    )
    row = reactivesocket.measure(told)
    assert set(row) <= set(reactivesocket.TABLE)
    assert len(row) > 1
    assert all(value >= 0 for value in row.values())


def test_its_table_has_every_metric_in_words() -> None:
    assert set(reactivesocket.TABLE) <= results.UNITS.keys()
    first, second = reactivesocket.PLAN[0].contestants[:2]
    rows = [
        {"case": "c", "contestant": each.name, "repeat": 0, "requests_s": value}
        for each, value in ((first, 300.0), (second, 100.0))
    ]
    rows.append({"case": "c", "contestant": second.name, "repeat": 1, "error": "lost"})
    text = reactivesocket.report(results.Run({"format": results.FORMAT, "rows": rows}))
    assert "3.00 (3.00-3.00)" in text
    assert f"{second.name} (1 failed)" in text


def test_a_contestant_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise processes.Failed("no end")

    monkeypatch.setattr(processes, "run_pair", failing)
    (case,) = reactivesocket.select("rsocket")[:1]
    (row,) = reactivesocket.run([case], 1, quick=True)
    assert (row["contestant"], row["error"]) == ("rsocket/tcp", "no end")


def test_the_rival_takes_part_where_it_can() -> None:
    chosen = reactivesocket.select("rsocket")
    assert [case.name for case in chosen] == ["reactive-request", "reactive-items-64k"]
    only = replace(chosen[0], contestants=(reactivesocket.RSOCKET,))
    assert chosen[0] == only
