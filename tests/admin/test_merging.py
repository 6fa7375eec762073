"""Reports of workers, added up."""

from __future__ import annotations

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from aqueduct.admin.merging import WorkerReports
from aqueduct.admin.report import COUNTS, Report
from tests.admin.reports import handler, report


def made(workers: WorkerReports) -> Report:
    return workers.make("serving", ["aqueduct+tcp://127.0.0.1:1"], 10)


def test_sums_of_two_workers() -> None:
    workers = WorkerReports(2, "words:service")
    assert made(workers)["service"]["name"] == "words:service"
    first = report(
        connections=3,
        lag=0.5,
        double=handler(calls=5, rows_in=50, open=2, errors={"busy": 1}, seconds=1.5),
    )
    second = report(
        connections=4,
        double=handler(calls=7, rows_in=70, open=1, waiting=1, errors={"busy": 2, "refused": 1}),
        other=handler(calls=1),
    )
    for number, each in enumerate((first, second)):
        workers.began(number, 100 + number)
        workers.came(number, each)
    kept = copy.deepcopy((first, second))
    found = made(workers)
    assert (first, second) == kept, "reports that came are not changed"
    assert made(workers)["handlers"] == found["handlers"], "nothing is added twice"
    double = found["handlers"]["double"]
    assert (double["calls"], double["rows_in"], double["open"], double["waiting"]) == (
        12,
        120,
        3,
        1,
    )
    assert double["errors"] == {"busy": 3, "refused": 1}
    assert found["handlers"]["other"]["calls"] == 1
    assert found["service"]["name"] == "words"
    assert found["service"]["ready"]
    assert found["service"]["loop_lag"] == 0.5
    connections = found["connections"]
    assert (connections["total"], connections["open"], connections["limit"]) == (7, 2, 200)
    assert [each["worker"] for each in connections["listed"]] == [1, 0], "the newest first"
    assert len(workers.make("serving", [], 1)["connections"]["listed"]) == 1
    assert (found["calls"]["open"], found["calls"]["refused"]) == (6, 8)
    assert found["memory"] == {
        "received": {"bytes": 20, "limit": 2000},
        "kept": {"bytes": 2, "limit": None},
        "sending": {"bytes": 40, "limit": 4000},
    }
    assert [each["pid"] for each in found["workers"]] == [100, 101]


def test_readiness_says_what_all_say() -> None:
    workers = WorkerReports(2, "words")
    assert made(workers)["service"]["reasons"] == [
        "worker 0: it has not begun to listen",
        "worker 1: it has not begun to listen",
    ]
    assert made(workers)["service"]["live"], "who has not begun is not stuck"
    workers.came(0, report())
    late = report(lag=70.0)
    late["service"] |= {"ready": False, "reasons": ["its event loop has not turned for 70 s"]}
    workers.came(1, late)
    found = made(workers)["service"]
    assert found["reasons"] == ["worker 1: its event loop has not turned for 70 s"]
    assert not found["ready"]
    assert found["live"], "another worker is"
    workers.came(0, late)
    assert not made(workers)["service"]["live"]
    workers.came(0, report())
    workers.came(1, report())
    assert made(workers)["service"]["ready"]
    assert workers.make("draining", [], 10)["service"]["reasons"] == ["the service is draining"]


def test_a_worker_that_tells_nothing_is_not_ready(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr("aqueduct.admin.merging.time.monotonic", lambda: now)
    workers = WorkerReports(1, "words")
    workers.came(0, report())
    now = 104.0
    assert made(workers)["service"]["ready"]
    now = 107.0
    assert made(workers)["service"]["reasons"] == ["worker 0: it has told nothing for 7 s"]
    assert made(workers)["service"]["live"]
    now = 100.0 + 60
    assert not made(workers)["service"]["live"]
    assert workers.make("serving", [], 10, live_lag=61.0)["service"]["live"]


def test_a_dead_worker_leaves_its_counts_and_nothing_else() -> None:
    workers = WorkerReports(1, "words")
    workers.began(0, 100)
    workers.came(
        0, report(connections=3, double=handler(calls=5, open=2, waiting=1, buckets=[1] * 18))
    )
    workers.ended(0, well=False)
    workers.ended(0, well=False)  # before it told anything
    found = made(workers)
    double = found["handlers"]["double"]
    assert (double["calls"], double["open"], double["waiting"]) == (5, 0, 0)
    assert (found["connections"]["total"], found["connections"]["open"]) == (3, 0)
    assert found["connections"]["listed"] == []
    assert found["calls"]["refused"] == 4
    assert found["workers"][0]["deaths"] == 2
    assert found["workers"][0]["pid"] is None
    workers.began(0, 101)
    workers.came(0, report(connections=1, double=handler(calls=1, open=1, buckets=[2] * 18)))
    workers.ended(0, well=True)
    found = made(workers)
    assert found["handlers"]["double"]["calls"] == 6
    assert found["handlers"]["double"]["buckets"] == [3] * 18
    assert found["connections"]["resumes"] == 8
    assert found["workers"][0]["deaths"] == 2, "it was told to end"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("counts"), st.integers(0, 2), st.integers(0, 5)),
        st.tuples(st.just("ends"), st.integers(0, 2), st.just(0)),
    ),
    max_size=30,
)


@given(STEPS)
@settings(deadline=None)
def test_counters_never_fall_and_miss_nothing_that_was_told(steps) -> None:
    workers = WorkerReports(3, "words")
    counted = [0, 0, 0]
    told, last = 0, 0
    for what, number, more in steps:
        if what == "counts":
            counted[number] += more
            told += more
            value = counted[number]
            each = handler(**dict.fromkeys(COUNTS, value), errors={"busy": value})
            workers.came(number, report(connections=value, double=each))
        else:
            workers.ended(number, well=False)
            counted[number] = 0
        found = made(workers)
        now = found["connections"]["total"]
        assert now == told >= last
        last = now
        if "double" in found["handlers"]:
            double: dict = found["handlers"]["double"]  # type: ignore[assignment]
            assert {double[name] for name in COUNTS} == {told}
            assert double["errors"] == {"busy": told}
