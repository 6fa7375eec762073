"""A Spark job that calls services by requests of ReactiveSocket."""

from __future__ import annotations

import pytest

from aqueduct.errors import ConfigError
from spark_udfs import exchange, exchange_pandas, send_files
from tests.spark.callees import NUMBERS, Callee
from tests.support.reactive_peer import stranger

pytestmark = pytest.mark.spark


def test_a_job_calls_a_service_that_is_none_of_aqueduct(spark, small_batches):
    with stranger() as (service, server):
        call = exchange(str(server.address), "square", schema="id bigint", in_flight=4)
        frame = spark.range(0, 5000, 1, numPartitions=5).transform(call.apply)
        assert [row.id for row in frame.collect()] == [value**2 for value in range(5000)]
        assert len(service.asked) == call.numbers.batches_sent >= 50
        assert len({pairs["attempt"] for pairs in service.asked}) == 5
        assert "5,000 rows" in call.summary() or "5000 rows" in call.summary()

        kept = exchange(
            str(server.address), "square", schema=NUMBERS, columns=["id"], columns_mode="replace"
        )
        wide = spark.range(0, 100, 1, numPartitions=2).selectExpr("id", "id + 1 as next")
        rows = wide.transform(kept.apply).collect()
        assert [(row.id, row.next) for row in rows] == [(i**2, i + 1) for i in range(100)]

        pandas = exchange_pandas(str(server.address), "square", schema=NUMBERS)
        frames = spark.range(0, 100, 1, numPartitions=2).mapInPandas(pandas, "id bigint")
        assert [row.id for row in frames.collect()] == [value**2 for value in range(100)]


def test_a_job_calls_a_service_of_aqueduct(spark, running, small_batches):
    callee = Callee()
    with running(callee.service, "reactivesocket+tcp://127.0.0.1:0", dev_certificate=False) as at:
        call = exchange(at, "square", retries=3)
        frame = spark.range(0, 2000, 1, numPartitions=4).transform(call.apply)  # no schema is given
        assert [row.id for row in frame.collect()] == [value**2 for value in range(2000)]
        assert callee.service.counters()["rows_in"] == 2000
        assert {call.partition.index for call in callee.calls.values()} == set(range(4))


def test_a_failed_batch_is_told_as_of_any_service(spark, small_batches):
    with stranger() as (_, server):
        call = exchange(
            str(server.address),
            "square",
            schema=NUMBERS,
            columns=["id"],
            columns_mode="replace",
            on_error="null",
            error_column="why",
        )
        frame = spark.range(-100, 100, 1, numPartitions=2).transform(call.apply)
        rows = frame.collect()
        assert [row.id for row in rows] == [None] * 100 + [value**2 for value in range(100)]
        assert all("no root of -1 here" in row.why for row in rows[:100])
        assert {row.why for row in rows[100:]} == {None}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda at: exchange(at, "square", compression="lz4"), "compression='lz4' has no place"),
        (
            lambda at: exchange(at, "square", connection_headers={"a": "b"}),
            "connection_headers has no place",
        ),
        (lambda at: send_files(at, "square"), "a sink of files has no place"),
        (lambda at: exchange([at, "aqueduct://h"], "x", compression="zstd"), "has no place at"),
    ],
    ids=["compression", "connection headers", "sink", "one of two addresses"],
)
def test_what_it_does_not_carry_is_an_error_on_the_driver(make, text):
    with pytest.raises(ConfigError, match=text) as raised:
        make("reactivesocket+tcp://127.0.0.1:1")
    assert "aqueduct://" in str(raised.value)


def test_a_table_is_no_function_of_one_batch(spark):
    import spark_udfs

    spark_udfs.register(spark)
    with stranger() as (_, server), pytest.raises(Exception, match="an aqueduct:// or aqueduct"):
        spark.read.format("aqueduct").option("address", str(server.address)).load("rows")
