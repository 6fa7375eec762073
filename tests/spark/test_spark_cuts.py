"""Jobs whose connections are cut each second: with ``resume`` no task fails, else one does."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import PySparkException

import aqueduct
from aqueduct.config import Config, Timing
from spark_udfs import exchange, register
from tests.sinks.shelf import Book, Shelf
from tests.spark.spans import until
from tests.support.proxy import cutting_each

pytestmark = pytest.mark.spark

EACH = 1.0
NUMBERS = pa.schema([("id", pa.int64())])
ROWS, PARTITIONS = 6_000, 2
PAUSE = 0.1  # seconds for a batch of 100 rows: 3 s for a partition, and so at least two cuts
CONFIG = Config(timing=Timing(close_linger=0.2, drain_timeout=1))
RESUME = "?resume=60s"


class SlowShelf(Shelf):
    """Takes its time for each batch."""

    def open(self, attempt: Any, call: Any) -> SlowBook:
        super().open(attempt, call)
        return SlowBook(self, attempt)


class SlowBook(Book):
    def write(self, batch: pa.RecordBatch) -> None:
        time.sleep(PAUSE)
        super().write(batch)


@pytest.fixture
def shelf() -> Shelf:
    return SlowShelf()


@pytest.fixture
def seen() -> Counter[int]:
    """How often the handler has had each row."""
    return Counter()


@pytest.fixture
def service(shelf: Shelf, seen: Counter[int]) -> aqueduct.Service:
    service = aqueduct.Service("cut", config=CONFIG)
    service.sink("shelf", shelf, schema=NUMBERS)

    @service.handler("sums", input=NUMBERS, output=NUMBERS)
    def sums(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Each answer depends on all batches before it: nobody else can go on for it."""
        total = 0
        for batch in batches:
            seen.update(batch["id"].to_pylist())
            time.sleep(PAUSE)
            total += pc.sum(batch["id"]).as_py()
            yield pa.record_batch({"id": [total]}, schema=NUMBERS)

    return service


@pytest.fixture(params=[RESUME, ""], ids=["resume", "plain"])
def resume(request: Any) -> str:
    option: str = request.param
    return option


@pytest.fixture
def address(service: aqueduct.Service, running: Any, resume: str) -> Iterator[str]:
    """Of a proxy that cuts every connection each second."""
    with (
        running(service, f"aqueduct+tcp://127.0.0.1:0{resume}", dev_certificate=False) as behind,
        cutting_each(behind, EACH) as proxy,
    ):
        yield proxy.address


def test_a_generator_through_cuts(
    spark: Any,
    address: str,
    resume: str,
    small_batches: None,
    service: aqueduct.Service,
    seen: Counter[int],
) -> None:
    score = exchange(address, "sums", retries=5, backoff="50ms")
    frame = spark.range(0, ROWS, 1, PARTITIONS).mapInArrow(score, "id long")
    if not resume:
        # A generator may not be called again once it has batches, so one task fails.
        with pytest.raises(PySparkException, match="ConnectionLost"):
            frame.collect()
        return
    # A task is tried once here (local[2]): the job would have failed with any of them.
    found = [row.id for row in frame.collect()]
    half = ROWS // PARTITIONS
    wanted = [
        sum(range(first, end))
        for first in range(0, ROWS, half)
        for end in range(first + 100, first + half + 1, 100)
    ]
    assert found == wanted
    assert set(seen.values()) == {1}
    numbers = score.numbers
    assert (numbers.tasks, numbers.retries, numbers.reconnects) == (PARTITIONS, 0, 0)
    assert numbers.resumes >= 2
    assert f", {numbers.resumes} resumes, " in score.summary()
    assert service.counters()["resumes"] >= numbers.resumes


def test_a_write_through_cuts(
    spark: Any,
    address: str,
    resume: str,
    small_batches: None,
    service: aqueduct.Service,
    shelf: Shelf,
) -> None:
    register(spark)
    frame = spark.range(0, ROWS, 1, PARTITIONS)
    writer = frame.write.format("aqueduct").options(address=address, handler="shelf")
    if not resume:
        with pytest.raises(PySparkException, match="ConnectionLost"):
            writer.mode("append").save()
        assert shelf.rows == []
        return
    writer.mode("append").save()
    assert shelf.rows == list(range(ROWS))
    assert len(shelf.asked_for("open")) == PARTITIONS  # each has had one attempt
    assert len(shelf.asked_for("commit")) == 1
    until(lambda: service.counters()["resumes"] >= 2)
