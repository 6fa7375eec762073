"""The service is killed at every step of a write: each row is there once, or none is.

Here a stand-in plays Spark's driver, so that all steps and many orders can be had in seconds;
``tests/spark/test_datasource_killed.py`` has Spark itself.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aqueduct.errors import ConnectionLost
from aqueduct.service.sinks import PreparedAttempt, WriteKey
from tests.sinks.driver import Driver, JobFailed
from tests.sinks.killing import ABORT_STEPS, ATTEMPT_STEPS, COMMIT_STEPS, STEPS, Deathbed
from tests.sinks.readers import parquet_rows

pytestmark = pytest.mark.checkout

Rows = Callable[[], Counter[int]]
KEYS = itertools.count(1)


@pytest.fixture(scope="module", params=["parquet", "postgres"])
def bed_and_rows(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Deathbed, Rows]]:
    folder = tmp_path_factory.mktemp("sink")
    if request.param == "parquet":
        place, rows = str(folder / "out"), lambda: parquet_rows(folder / "out")
    else:
        server = request.getfixturevalue("postgres")
        server.sql("CREATE TABLE target (id bigint)")
        place, rows = f"{server.uri} target", lambda: server.ids("target")
    bed = Deathbed(folder, request.param, place)
    try:
        yield bed, rows
    finally:
        bed.end()


@pytest.fixture
def driver(bed_and_rows: tuple[Deathbed, Rows]) -> Iterator[Driver]:
    driver = Driver(bed_and_rows[0])
    yield driver
    driver.bed.plans.clear()
    driver.close()


@pytest.fixture
def rows(bed_and_rows: tuple[Deathbed, Rows]) -> Rows:
    return bed_and_rows[1]


class Job:
    """A run of three partitions with ids that no other one has."""

    def __init__(self, driver: Driver, *, overwrite: bool = False) -> None:
        self.number = next(KEYS)
        self.write_key = WriteKey(f"run {self.number}", overwrite=overwrite)
        self.driver = driver
        first = self.number * 1000
        self.parts = [list(range(first + 10 * i, first + 10 * i + 5)) for i in range(3)]
        self.ids = Counter(value for part in self.parts for value in part)

    def write(self, partition: int, execution: str = "e") -> PreparedAttempt:
        return self.driver.write(self.write_key, execution, partition, self.parts[partition])

    def seen(self, rows: Counter[int]) -> Counter[int]:
        """Which of its ids a reader sees, and how often."""
        return Counter({i: n for i, n in rows.items() if i // 1000 == self.number})


@pytest.mark.parametrize("step", [*ATTEMPT_STEPS, *COMMIT_STEPS])
def test_each_row_is_there_once(driver: Driver, rows: Rows, step: str) -> None:
    plans, job = driver.bed.plans, Job(driver)
    before = len(plans.killed())
    prepared = [job.write(0)]
    plans.set(step)
    prepared += [job.write(1), job.write(2)]
    assert job.seen(rows()) == {}
    if step == "commit done" and driver.bed.kind == "postgres":
        plans.set("commit ends")  # done is done with the transaction, within ``commit``
    driver.commit(job.write_key, prepared)
    assert job.seen(rows()) == job.ids
    assert len(plans.killed()) == before + 1
    driver.commit(job.write_key, prepared)  # an answer that was lost after all
    assert job.seen(rows()) == job.ids


@pytest.mark.parametrize("step", [*ATTEMPT_STEPS, *ABORT_STEPS, "answer leaves"])
def test_no_row_is_there_after_an_abort(driver: Driver, rows: Rows, step: str) -> None:
    plans, job = driver.bed.plans, Job(driver)
    before = len(plans.killed())
    prepared = [job.write(0)]
    plans.set(step)
    prepared.append(job.write(1))
    driver.abort(job.write_key, prepared)
    assert len(plans.killed()) == before + 1
    assert job.seen(rows()) == {}
    with pytest.raises(JobFailed, match="not there as"):
        driver.commit(job.write_key, prepared)  # one that was on its way for long
    assert job.seen(rows()) == {}


def test_two_attempts_at_one_partition_are_prepared_and_one_counts(
    driver: Driver, rows: Rows
) -> None:
    job = Job(driver)
    fast, slow = job.write(0), job.write(0)
    prepared = [slow, job.write(1)]
    driver.commit(job.write_key, prepared)
    driver.abort(job.write_key, [fast])
    assert job.seen(rows()) == Counter(job.parts[0] + job.parts[1])


@pytest.mark.parametrize("step", COMMIT_STEPS)
def test_work_that_is_done_again_counts_once(driver: Driver, rows: Rows, step: str) -> None:
    """The driver died with the service: a batch of a stream is replayed with other attempts."""
    plans, job = driver.bed.plans, Job(driver)
    if step == "commit done" and driver.bed.kind == "postgres":
        step = "commit ends"
    prepared = [job.write(number, "first") for number in range(3)]
    plans.set(step)
    with pytest.raises(ConnectionLost):
        driver.sink().commit(job.write_key, prepared)
    again = [job.write(number, "second") for number in range(3)]
    driver.commit(job.write_key, again)
    assert job.seen(rows()) == job.ids


def test_an_overwriting_run_replaces_what_was_there(driver: Driver, rows: Rows) -> None:
    old, new = Job(driver), Job(driver, overwrite=True)
    driver.commit(old.write_key, [old.write(number) for number in range(3)])
    prepared = [new.write(number) for number in range(3)]
    driver.bed.plans.set("commit middle")
    driver.commit(new.write_key, prepared)
    assert rows() == new.ids
    later = Job(driver)
    driver.commit(later.write_key, [later.write(0)])
    driver.commit(new.write_key, prepared)  # a repetition overwrites nothing
    driver.commit(old.write_key, [])
    assert rows() == new.ids + Counter(later.parts[0])


PLAYS = st.lists(
    st.tuples(
        st.sampled_from(["write", "twice", "kill"]), st.integers(0, 2), st.sampled_from(STEPS)
    ),
    max_size=8,
)


ENDS = st.sampled_from(["commit", "abort", "replay", "commit, abort"])


def leaves_all_or_nothing(
    driver: Driver, rows: Rows, play: list[tuple[str, int, str]], end: str, named: bool
) -> None:
    plans, job = driver.bed.plans, Job(driver)
    receipts: dict[int, PreparedAttempt] = {}
    for what, partition, step in play:
        if what == "kill":
            plans.set(step)
        elif what == "twice" or partition not in receipts:
            receipts[partition] = job.write(partition, "first")
    wanted: Counter[int] = Counter()
    assert job.seen(rows()) == wanted
    prepared = list(receipts.values())
    if end == "abort":
        driver.abort(job.write_key, prepared if named else [], "first")
    else:
        driver.commit(job.write_key, prepared)
        wanted = Counter(value for part in receipts for value in job.parts[part])
        assert job.seen(rows()) == wanted
    if end == "replay":
        again = [job.write(partition, "second") for partition in range(3)]
        driver.commit(job.write_key, again)
    if end == "commit, abort":  # a driver that did not believe that it was committed
        driver.abort(job.write_key, prepared)
    plans.clear()
    assert job.seen(rows()) == wanted


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(PLAYS, ENDS, st.booleans())
def test_any_order_of_deaths_leaves_all_or_nothing(
    driver: Driver, rows: Rows, play: list[tuple[str, int, str]], end: str, named: bool
) -> None:
    leaves_all_or_nothing(driver, rows, play, end, named)


@pytest.mark.long
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(PLAYS, ENDS, st.booleans())
def test_many_orders_of_deaths_leave_all_or_nothing(
    driver: Driver, rows: Rows, play: list[tuple[str, int, str]], end: str, named: bool
) -> None:
    leaves_all_or_nothing(driver, rows, play, end, named)
