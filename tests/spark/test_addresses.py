"""Spark reaches a service by each kind of address: real workers, real sockets."""

from __future__ import annotations

import pyarrow as pa
import pytest

from aqueduct.carriers.certificates import ClientTls, ServerTls, dev_certificate
from aqueduct.errors import ConfigError
from spark_udfs import exchange, exchange_column, exchange_pandas, register
from tests.sinks.shelf import Shelf
from tests.spark.services import NUMBERS, make

pytestmark = pytest.mark.spark

ADDRESSES = {
    "quic": "aqueduct://127.0.0.1:0",
    "tls": "aqueduct+tls://127.0.0.1:0",
    "tcp": "aqueduct+tcp://127.0.0.1:0",
    "draft": "aqueduct+tcp://127.0.0.1:0?dialect=control-streams",
    "unix": "aqueduct+unix://{folder}/service.sock",
}


@pytest.fixture(params=ADDRESSES)
def scheme(request):
    return request.param


@pytest.fixture
def listen(scheme, tmp_path):
    return ADDRESSES[scheme].format(folder=tmp_path)


def test_partitions_go_there_and_back(spark, running, scheme, listen):
    service = make()
    with running(service, listen) as address:
        frame = spark.range(0, 5_000, 1, numPartitions=4)
        for _ in range(2):
            call = exchange(address, "double", schema="id long")
            rows = frame.mapInArrow(call, "id long").collect()
            assert [row.id for row in rows] == list(range(0, 10_000, 2))
        pandas = exchange_pandas(address, "double", input_schema="id long")
        assert frame.mapInPandas(pandas, "id long").count() == 5_000
        counters = service.counters()
        assert counters["calls"] == 12
        assert counters["rows_in"] == 15_000
        assert 1 <= counters["connections"] <= 2  # one for each worker process, however often


def test_tables_sinks_and_functions_of_sql_are_reached(spark, running, scheme, listen):
    register(spark)
    service, shelf = make(), Shelf()
    service.sink("shelf", shelf, schema=NUMBERS)

    @service.table("numbers", schema=NUMBERS, splits=[0, 1, 2])
    def table(split):
        rows = range(100 * split, 100 * split + 100)
        yield pa.record_batch({"id": pa.array(rows, pa.int64())}, schema=NUMBERS)

    with running(service, listen) as address:
        frame = spark.read.format("aqueduct").options(address=address, handler="numbers").load()
        spark.udf.register("twice", exchange_column(address, "double", "long", columns=["id"]))
        doubled = frame.selectExpr("twice(id) AS id")
        writer = doubled.write.format("aqueduct").options(address=address, handler="shelf")
        writer.mode("append").save()
    assert shelf.rows == list(range(0, 600, 2))


def test_an_error_names_the_address(spark, running, scheme, listen):
    from pyspark.errors import PythonException

    with running(make(), listen) as address:
        frame = spark.range(0, 100, 1, numPartitions=1)
        with pytest.raises(PythonException) as caught:
            frame.mapInArrow(exchange(address, "fail"), "id long").collect()
    text = str(caught.value)
    assert f"handler 'fail' at {address.partition('?')[0]}" in text
    assert "42 is not to my taste" in text


@pytest.mark.parametrize("name", ["lz4", "zstd"])
def test_batches_may_be_compressed(spark, running, name):
    service = make()
    with running(service, "aqueduct+tcp://127.0.0.1:0") as address:
        frame = spark.range(0, 40_000, 1, numPartitions=2)
        calls = {
            "plain": exchange(address, "echo"),
            "by the call": exchange(address, "echo", compression=name),
            "by the address": exchange(f"{address}?compression={name}", "echo"),
        }
        came = {}
        for how, call in calls.items():
            before = service.counters()["bytes_out"]
            assert frame.mapInArrow(call, "id long").count() == 40_000
            came[how] = service.counters()["bytes_out"] - before
    assert came["plain"] > 40_000 * 8
    assert came["by the call"] < 0.8 * came["plain"]
    assert came["by the address"] < 0.8 * came["plain"]
    with pytest.raises(ConfigError, match="one of lz4, zstd, none"):
        exchange(address, "echo", compression="gzip")


def test_workers_show_a_certificate(spark, running):
    """PEM text travels with the job: no file need be where the executors are."""
    mine, theirs = dev_certificate(), dev_certificate()
    seen = []
    service = make(authorize=lambda call: seen.append(call.peer_identity))
    tls = ServerTls(mine.certificate, mine.key, client_ca=theirs.certificate)
    call_tls = ClientTls(ca=mine.certificate, certificate=theirs.certificate, key=theirs.key)
    with running(service, "aqueduct+tls://localhost:0", dev_certificate=False, tls=tls) as address:
        frame = spark.range(0, 1_000, 1, numPartitions=2)
        call = exchange(address, "echo", tls=call_tls)
        assert frame.mapInArrow(call, "id long").count() == 1_000
    assert [identity.fingerprint for identity in seen] == [theirs.fingerprint] * 2
