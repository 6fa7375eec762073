"""Spark writes into a sink whose service, or whose own worker, is killed at every step.

A reader that is not the sink counts the rows: after a job that succeeded each is there once, after
one that failed none is.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sinks.killing import ATTEMPT_STEPS, COMMIT_STEPS, IDS, Deathbed
from tests.sinks.readers import parquet_rows
from tests.sinks.sparkjobs import Spark

pytestmark = [pytest.mark.spark, pytest.mark.checkout]

FIRST = itertools.count(1000, 1000)


class Stage:
    """A service that dies on demand, and a Spark that writes into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bed = Deathbed(folder, "parquet", str(folder / "out"))
        try:
            self.spark = Spark(self.bed.address, folder / "spark.log")
        except BaseException:
            self.bed.end()
            raise

    def rows(self, first: int) -> Counter[int]:
        """Of one job: those of its thousand."""
        found = parquet_rows(self.folder / "out")
        return Counter({i: n for i, n in found.items() if i // 1000 == first // 1000})

    def close(self) -> None:
        try:
            self.spark.close()
        finally:
            self.bed.end()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    made = Stage(tmp_path_factory.mktemp("killed"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_plan_is_left(stage: Stage) -> Iterator[None]:
    stage.bed.plans.clear()
    yield
    stage.bed.plans.clear()


def once(first: int) -> Counter[int]:
    return Counter(range(first, first + 15))


@pytest.mark.parametrize("step", [*ATTEMPT_STEPS, *COMMIT_STEPS])
def test_the_service_dies_and_each_row_is_there_once(stage: Stage, step: str) -> None:
    first, before = next(FIRST), len(stage.bed.plans.killed())
    stage.bed.plans.set(step)
    assert stage.spark.run(first=first) is None
    assert stage.bed.plans.killed()[before:] == [step]
    assert stage.rows(first) == once(first)


@pytest.mark.parametrize("step", ATTEMPT_STEPS)
def test_the_worker_dies_and_each_row_is_there_once(stage: Stage, step: str) -> None:
    first, before = next(FIRST), len(stage.bed.plans.killed())
    stage.bed.plans.set(step, "client")
    assert stage.spark.run(first=first) is None
    assert stage.bed.plans.killed()[before:] == [step]
    assert stage.rows(first) == once(first)


@pytest.mark.parametrize("step", ["open ends", "write 1", "prepare ends", "abort begins"])
def test_the_service_dies_and_the_job_fails_and_no_row_is_there(stage: Stage, step: str) -> None:
    first, before = next(FIRST), len(stage.bed.plans.killed())
    stage.bed.plans.set(step)
    error = stage.spark.run(first=first, fail=True)
    assert error is not None and "no more" in error
    assert stage.bed.plans.killed()[before:] == [step]
    assert stage.rows(first) == Counter()


@pytest.mark.parametrize("step", COMMIT_STEPS)
def test_the_process_that_commits_dies_and_the_job_is_done_again(stage: Stage, step: str) -> None:
    """Nobody can tell then what became of it; a run with a name may be written again."""
    first, before = next(FIRST), len(stage.bed.plans.killed())
    stage.bed.plans.set(step, "client")
    assert stage.spark.run(first=first, run=f"job {first}") is not None
    assert stage.bed.plans.killed()[before:] == [step]
    assert stage.rows(first) in (once(first), Counter())
    assert stage.spark.run(first=first, run=f"job {first}") is None
    assert stage.rows(first) == once(first)


def test_an_overwriting_job_whose_commit_is_cut_replaces_all_or_nothing(stage: Stage) -> None:
    first, second = next(FIRST), next(FIRST)
    assert stage.spark.run(first=first) is None
    stage.bed.plans.set("commit middle")
    assert stage.spark.run(first=second, mode="overwrite") is None
    assert parquet_rows(stage.folder / "out") == once(second)


@pytest.mark.parametrize(
    ("step", "victim"),
    [
        ("write 0", "service"),
        ("receipt leaves", "client"),
        ("commit middle", "service"),
        ("commit ends", "service"),
        ("commit begins", "client"),
        ("answer leaves", "client"),
    ],
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
    failed = stage.spark.run(**arguments)
    assert stage.bed.plans.killed()[before:] == [step]
    assert (failed is not None) is (victim == "client" and step != "receipt leaves")
    if failed is not None:
        assert stage.spark.run(**arguments) is None
    assert stage.rows(first) == once(first)
