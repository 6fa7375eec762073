"""Spark writes into a sink whose service, or whose own worker, is killed at every step.

A reader that is not the sink counts the rows: after a job that succeeded each is there once, after
one that failed none is. Every step is here with Parquet; with PostgreSQL those at which its
transactions stand differently (``tests/sinks/test_killed.py`` has all of them, with a stand-in for
Spark).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sinks.killing import ATTEMPT_STEPS, COMMIT_STEPS, IDS, Deathbed
from tests.sinks.readers import parquet_rows
from tests.sinks.servers import running
from tests.sinks.sparkjobs import Spark

pytestmark = [pytest.mark.spark, pytest.mark.checkout]

Rows = Callable[[], Counter[int]]
FIRST = itertools.count(1000, 1000)


def steps(
    parquet: Sequence[str],
    postgres: Sequence[str],
    *,
    brief: Sequence[str] | None = None,
    brief_postgres: Sequence[str],
) -> pytest.MarkDecorator:
    """A test with each sink, killed at each of its steps; those that are not brief are long.

    Without Spark both sinks are killed at every step in every run (tests/sinks/test_killed.py).
    """
    usual = {("parquet", step) for step in (parquet if brief is None else brief)}
    usual |= {("postgres", step) for step in brief_postgres}
    cases = [("parquet", step) for step in parquet] + [("postgres", step) for step in postgres]
    assert usual <= set(cases)
    marked = [
        pytest.param(*case, marks=() if case in usual else pytest.mark.long) for case in cases
    ]
    return pytest.mark.parametrize(("stage", "step"), marked, indirect=["stage"])


class Stage:
    """A service that dies on demand, and a Spark that writes into it."""

    def __init__(self, bed: Deathbed, spark: Spark, folder: Path, read: Rows) -> None:
        self.bed = bed
        self.spark = spark
        self.folder = folder
        self.read = read

    def run(self, **arguments: Any) -> str | None:
        """One job; what it failed with, or None."""
        return self.spark.run(address=self.bed.address, **arguments)

    def rows(self, first: int) -> Counter[int]:
        """Of one job: those of its thousand."""
        return Counter({i: n for i, n in self.read().items() if i // 1000 == first // 1000})


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Stage]]:
    """By the kind of the sink, each made once, when it is first asked for; all have one Spark."""
    with ExitStack() as stack:
        spark = Spark(tmp_path_factory.mktemp("jobs") / "spark.log")
        stack.callback(spark.close)

        @cache
        def stage(kind: str) -> Stage:
            folder = tmp_path_factory.mktemp(kind)
            read: Rows
            if kind == "parquet":
                place, read = str(folder / "out"), lambda: parquet_rows(folder / "out")
            else:
                server = stack.enter_context(running())
                server.sql("CREATE TABLE target (id bigint)")
                place, read = f"{server.uri} target", lambda: server.ids("target")
            bed = Deathbed(folder, kind, place)
            stack.callback(bed.end)
            return Stage(bed, spark, folder, read)

        yield stage


@pytest.fixture
def stage(request: pytest.FixtureRequest, stages: Callable[[str], Stage]) -> Stage:
    return stages(request.param)


@pytest.fixture(autouse=True)
def no_plan_is_left(stage: Stage) -> Iterator[None]:
    stage.bed.plans.clear()
    yield
    stage.bed.plans.clear()


def once(first: int) -> Counter[int]:
    return Counter(range(first, first + 15))


@steps(
    parquet=[*ATTEMPT_STEPS, *COMMIT_STEPS],
    postgres=[
        "open ends",
        "write 0",
        "write 1",
        "prepare begins",
        "prepare ends",
        "commit begins",
        "commit middle",
        "commit ends",
    ],
    brief=["open ends", "write 1", "receipt leaves", "commit middle", "commit ends"],
    brief_postgres=["commit middle"],
)
def test_the_service_dies_and_each_row_is_there_once(stage: Stage, step: str) -> None:
    first, before = next(FIRST), len(stage.bed.plans.killed())
    stage.bed.plans.set(step)
    assert stage.run(first=first) is None
    assert stage.bed.plans.killed()[before:] == [step]
    assert stage.rows(first) == once(first)


@steps(
    parquet=ATTEMPT_STEPS,
    postgres=["open ends", "write 1", "prepare begins", "receipt leaves"],
    brief=["prepare ends"],
    brief_postgres=["prepare begins"],
)
def test_the_worker_dies_and_each_row_is_there_once(stage: Stage, step: str) -> None:
    first, before = next(FIRST), len(stage.bed.plans.killed())
    stage.bed.plans.set(step, "client")
    assert stage.run(first=first) is None
    assert stage.bed.plans.killed()[before:] == [step]
    assert stage.rows(first) == once(first)


@steps(
    parquet=["open ends", "write 1", "prepare ends", "abort begins"],
    postgres=["prepare ends", "abort begins"],
    brief=["write 1"],
    brief_postgres=["prepare ends"],
)
def test_the_service_dies_and_the_job_fails_and_no_row_is_there(stage: Stage, step: str) -> None:
    first, before = next(FIRST), len(stage.bed.plans.killed())
    stage.bed.plans.set(step)
    error = stage.run(first=first, fail=True)
    assert error is not None and "no more" in error
    assert stage.bed.plans.killed()[before:] == [step]
    assert stage.rows(first) == Counter()


@steps(
    parquet=COMMIT_STEPS,
    postgres=["commit middle", "answer leaves"],
    brief=["answer leaves"],
    brief_postgres=["commit middle"],
)
def test_the_process_that_commits_dies_and_the_job_is_done_again(stage: Stage, step: str) -> None:
    """Nobody can tell then what became of it; a run with a name may be written again."""
    first, before = next(FIRST), len(stage.bed.plans.killed())
    stage.bed.plans.set(step, "client")
    assert stage.run(first=first, write_key=f"job {first}") is not None
    assert stage.bed.plans.killed()[before:] == [step]
    assert stage.rows(first) in (once(first), Counter())
    assert stage.run(first=first, write_key=f"job {first}") is None
    assert stage.rows(first) == once(first)


@pytest.mark.parametrize("stage", ["parquet", "postgres"], indirect=True)
def test_an_overwriting_job_whose_commit_is_cut_replaces_all_or_nothing(stage: Stage) -> None:
    first, second = next(FIRST), next(FIRST)
    assert stage.run(first=first) is None
    stage.bed.plans.set("commit middle")
    assert stage.run(first=second, mode="overwrite") is None
    assert stage.read() == once(second)


@pytest.mark.parametrize(
    ("stage", "step", "victim"),
    [
        pytest.param("parquet", "write 0", "service", marks=pytest.mark.long),
        pytest.param("parquet", "receipt leaves", "client", marks=pytest.mark.long),
        pytest.param("parquet", "commit middle", "service", marks=pytest.mark.long),
        pytest.param("parquet", "commit ends", "service", marks=pytest.mark.long),
        pytest.param("parquet", "commit begins", "client", marks=pytest.mark.long),
        ("parquet", "answer leaves", "client"),
        pytest.param("postgres", "receipt leaves", "client", marks=pytest.mark.long),
        ("postgres", "commit middle", "service"),
        pytest.param("postgres", "answer leaves", "client", marks=pytest.mark.long),
    ],
    indirect=["stage"],
)
def test_a_stream_writes_each_batch_once(stage: Stage, step: str, victim: str) -> None:
    """A query that fails is started again from its checkpoint, and replays its batch."""
    first, before = next(FIRST), len(stage.bed.plans.killed())
    files = stage.folder / f"files {first}"
    files.mkdir()
    for start in (first, first + 5, first + 10):
        table = pa.table({"id": list(range(start, start + 5))}, schema=IDS)
        pq.write_table(table, files / f"{start}.parquet")
    arguments = {"files": str(files), "checkpoint": str(stage.folder / f"checkpoint {first}")}
    stage.bed.plans.set(step, victim)
    failed = stage.run(**arguments)
    assert stage.bed.plans.killed()[before:] == [step]
    assert (failed is not None) is (victim == "client" and step != "receipt leaves")
    if failed is not None:
        assert stage.run(**arguments) is None
    assert stage.rows(first) == once(first)
