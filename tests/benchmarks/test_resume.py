"""The benchmark of connections that can be resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import processes, results, resume
from tests.support.selection import mostly_long

pytestmark = pytest.mark.checkout

KINDS = {case.name.removeprefix("tcp-"): case for case in resume.PLAN if case.scheme == "tcp"}


@pytest.mark.parametrize("name", mostly_long(KINDS, "call", "links", "echo-64k"))
def test_every_case_is_measured(name: str) -> None:
    case = KINDS[name]
    if case.kind in ("sink", "echo"):
        case = replace(case, nbytes=4 * case.size)
    elif case.kind == "links":
        case = replace(case, size=5)
    repeats = 2 if name == "links" else 1
    rows = resume.measure(case, repeats)
    metrics = set(resume.TABLE)
    wanted = [(side.name, repeat) for repeat in range(repeats) for side in case.contestants]
    assert [(row["contestant"], row["repeat"]) for row in rows] == wanted
    for row in rows:
        (metric,) = metrics & row.keys()
        assert row[metric] > 0
        assert row["case"] == case.name


def test_cases_over_tls_are_those_over_tcp() -> None:
    tls = [case for case in resume.PLAN if case.scheme == "tls"]
    assert [replace(case, name="", scheme="") for case in tls] == [
        replace(case, name="", scheme="") for case in KINDS.values()
    ]


def test_its_table_has_every_metric_in_words() -> None:
    assert set(resume.TABLE) <= results.UNITS.keys()
    rows = [
        {"case": "tcp-call", "contestant": side, "repeat": 0, "p50_us": value}
        for side, value in (("plain", 10.0), ("link", 11.0), ("again", 10.5))
    ]
    rows.append({"case": "tcp-links", "contestant": "link", "repeat": 0, "up_s": 12.5})
    rows.append({"case": "tcp-redial", "contestant": "link", "repeat": 0, "error": "lost"})
    text = resume.report(results.Run({"format": results.FORMAT, "rows": rows}))
    assert "1.10 (1.10-1.10)" in text and "1.05 (1.05-1.05)" in text
    assert "12.5 (12.5-12.5)" in text
    assert "link (1 failed)" in text


def test_a_case_that_fails_is_a_row_of_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise processes.Failed("no end")

    monkeypatch.setattr(processes, "run_pair", failing)
    rows = list(resume.run([KINDS["call"]], 1, quick=True))
    assert [(row["contestant"], row["error"]) for row in rows] == [
        (side, "no end") for side in resume.SIDES
    ]
