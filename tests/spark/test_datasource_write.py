"""``df.write`` and ``df.writeStream`` into a sink: what reaches it, and what the driver commits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from spark_udfs import register
from tests.sinks.shelf import Shelf

pytestmark = pytest.mark.spark

ROWS = pa.schema([("id", pa.int64())])


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def address(shelf: Shelf, running: Any, tmp_path: Path) -> Any:
    service = aqueduct.Service("test")
    service.sink("shelf", shelf, schema=ROWS)
    with running(service, f"aqueduct+unix://{tmp_path}/s", dev_certificate=False) as found:
        yield found


@pytest.fixture
def write(spark: Any, address: str) -> Any:
    """``write(frame, mode, **options)``."""
    register(spark)

    def save(frame: Any, mode: str = "append", **options: str) -> None:
        writer = frame.write.format("aqueduct").option("address", address)
        writer.options(**{"handler": "shelf", **options}).mode(mode).save()

    return save


def test_rows_are_written_once_and_committed_together(spark: Any, shelf: Shelf, write: Any) -> None:
    write(spark.range(0, 100, 1, 4))
    assert shelf.rows == list(range(100))
    commits = shelf.asked_for("commit")
    assert len(commits) == 1
    assert sorted(partition for partition, _ in commits[0][2]) == [0, 1, 2, 3]
    assert len({task for _, task in commits[0][2]}) == 4
    assert shelf.asked[-1] == commits[0] and shelf.staged == {}


def test_each_job_is_a_run_of_its_own(spark: Any, shelf: Shelf, write: Any) -> None:
    write(spark.range(3))
    write(spark.range(3))
    assert shelf.rows == [0, 0, 1, 1, 2, 2]


def test_a_run_with_a_name_is_written_once(spark: Any, shelf: Shelf, write: Any) -> None:
    write(spark.range(3), write_key="2026-11-22")
    write(spark.range(3), write_key="2026-11-22")
    write(spark.range(3, 5), write_key="2026-11-23")
    assert shelf.rows == [0, 1, 2, 3, 4]
    assert shelf.staged == {}


def test_overwrite_reaches_the_sink(spark: Any, shelf: Shelf, write: Any) -> None:
    write(spark.range(3))
    write(spark.range(7, 9), "overwrite")
    assert shelf.rows == [7, 8]
    write(spark.range(0), "overwrite")
    assert shelf.rows == []


def test_empty_partitions_make_no_attempt(spark: Any, shelf: Shelf, write: Any) -> None:
    write(spark.range(0, 8, 1, 8).where("id = 5"))
    assert shelf.rows == [5]
    assert len(shelf.asked_for("open")) == 1


def test_a_failed_job_leaves_nothing(spark: Any, shelf: Shelf, write: Any) -> None:
    frame = spark.range(0, 8, 1, 4).selectExpr("if(id = 5, raise_error('no 5'), id) as id")
    with pytest.raises(Exception, match="no 5"):
        write(frame.selectExpr("cast(id as long) as id"))
    assert shelf.asked_for("commit") == [] and shelf.rows == []
    assert shelf.asked_for("abort run")
    assert shelf.staged == {}


def test_a_commit_that_fails_fails_the_job_and_aborts_it(
    spark: Any, shelf: Shelf, write: Any
) -> None:
    shelf.fail["commit"] = OSError("the disk is full")
    with pytest.raises(Exception, match="OSError: the disk is full"):
        write(spark.range(0, 8, 1, 2))
    assert shelf.rows == [] and shelf.staged == {}
    assert [name for name, *_ in shelf.asked[-2:]] == ["commit", "abort run"]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ("cast(id as string) as id", "column 'id' has another type: wanted int64, got string"),
        ("id as number", "column 'id' is missing: wanted int64"),
        ("id, id as more", "column 'more' is not wanted: int64"),
    ],
)
def test_a_schema_that_does_not_fit_is_told_before_any_task_runs(
    spark: Any, shelf: Shelf, write: Any, columns: str, text: str
) -> None:
    with pytest.raises(Exception, match=text) as caught:
        write(spark.range(3).selectExpr(*columns.split(", ")))
    assert "the rows to be written into the sink 'shelf'" in str(caught.value)
    assert shelf.asked == []


def test_rows_are_cast_if_that_is_asked_for(spark: Any, shelf: Shelf, write: Any) -> None:
    frame = spark.range(0, 8, 1, 2).selectExpr("cast(id as string) as ID")
    write(frame, cast="true")
    assert shelf.rows == list(range(8))
    with pytest.raises(Exception, match="the value 'x' in row 0 of batch 0 cannot be cast"):
        write(spark.range(1).selectExpr("'x' as id"), cast="true")
    with pytest.raises(Exception, match=r"column 'id' .*there is no cast"):
        write(spark.range(1).selectExpr("array(id) as id"), cast="true")
    assert shelf.rows == list(range(8)) and shelf.staged == {}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"handler": "shelv"}, r"has no sink 'shelv'; did you mean 'shelf'\?"),
        ({"adress": "x"}, r"unknown option adress; did you mean address\?"),
        ({"commitDeadline": "soon"}, "commit_deadline is 'soon'; it must be seconds above zero"),
        ({"write_key": "x" * 257}, "a write key is 'x+.*; it must have 1 to 256 bytes"),
    ],
)
def test_options_that_cannot_be(
    shelf: Shelf, spark: Any, write: Any, options: dict[str, str], text: str
) -> None:
    with pytest.raises(Exception, match=text):
        write(spark.range(3), **options)
    assert shelf.asked == []


def test_a_service_that_is_not_there_is_named(spark: Any, write: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"aqueduct\+unix://.*/nobody"):
        write(spark.range(3), address=f"aqueduct+unix://{tmp_path}/nobody", backoff="1ms")


def test_an_error_of_the_sink_says_where_it_was(spark: Any, shelf: Shelf, write: Any) -> None:
    shelf.fail["write"] = OSError("the disk is full")
    with pytest.raises(Exception, match="OSError: the disk is full") as caught:
        write(spark.range(0, 4, 1, 1))
    assert "'shelf' at aqueduct+unix://" in str(caught.value)
    assert "partition 0 (stage " in str(caught.value)


# Streams


@pytest.fixture
def stream(spark: Any, address: str, tmp_path: Path) -> Any:
    """``stream(**options)`` writes three files, a batch each, and says how the query ended."""
    register(spark)
    for number in range(3):
        frame = spark.range(number * 10, number * 10 + 4, 1, 1)
        frame.write.mode("append").parquet(str(tmp_path / "files"))

    def run(checkpoint: str = "checkpoint", **options: str) -> Any:
        frames = spark.readStream.schema("id long").option("maxFilesPerTrigger", 1)
        writer = (
            frames.parquet(str(tmp_path / "files"))
            .writeStream.format("aqueduct")
            .options(address=address, handler="shelf", **options)
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
        )
        query = writer.start()
        query.awaitTermination(60)
        assert not query.isActive
        return query

    return run


WRITTEN = [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]


def test_each_batch_of_a_stream_is_a_run(shelf: Shelf, stream: Any) -> None:
    query = stream()
    assert shelf.rows == WRITTEN
    assert [key for _, key, _ in shelf.asked_for("commit")] == [f"{query.id}/{n}" for n in range(3)]


def test_a_batch_that_is_replayed_is_written_once(
    shelf: Shelf, stream: Any, tmp_path: Path
) -> None:
    """The driver died after the commit, before it noted that the batch was done."""
    first = stream()
    commits = tmp_path / "checkpoint" / "commits"
    (commits / "2").unlink()
    (commits / ".2.crc").unlink(missing_ok=True)
    again = stream()
    assert again.id == first.id and again.runId != first.runId
    assert shelf.rows == WRITTEN
    keys = [key for _, key, _ in shelf.asked_for("commit")]
    assert keys == [f"{first.id}/{number}" for number in (0, 1, 2, 2)]


def test_a_batch_whose_commit_failed_is_written_by_the_next_query(
    shelf: Shelf, stream: Any
) -> None:
    shelf.fail["commit"] = OSError("not now")
    with pytest.raises(Exception, match="OSError: not now"):
        stream()
    assert shelf.rows == [] and shelf.staged == {}
    del shelf.fail["commit"]
    stream()
    assert shelf.rows == WRITTEN


def test_a_stream_may_have_a_name_beside_its_checkpoint(shelf: Shelf, stream: Any) -> None:
    stream("one", write_key="orders")
    stream("another", write_key="orders")
    assert shelf.rows == WRITTEN
    assert shelf.asked_for("commit")[0][1] == "orders/0"
