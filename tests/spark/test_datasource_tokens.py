"""``spark.read.format("aqueduct")``: the tokens, headers and settings that go with its calls."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

import aqueduct
import spark_udfs
from aqueduct.errors import Refused

pytestmark = pytest.mark.spark

TCP = "aqueduct+tcp://127.0.0.1:0"
WORDS = pa.record_batch({"id": pa.array([0, 1, 2], pa.int64())})


def test_a_token_file_is_read_before_each_call(running, spark, tmp_path):
    shown = []

    def authorize(call):
        shown.append((call.handler.split(".")[2], call.token))

    service = aqueduct.Service("test", authorize=authorize)
    service.table("words", schema=WORDS.schema)(lambda: (yield WORDS))
    path = tmp_path / "token"
    with running(service, TCP) as address:
        spark.conf.set("spark.aqueduct.token", "of the settings")
        try:
            spark_udfs.register(spark)
            source = spark.read.format("aqueduct").option("address", address)
            source = source.option("tokenFile", str(path))
            path.write_text("one\n")
            frame = source.load("words")
            path.write_text("  two  ")
            assert frame.count() == 3
            path.write_text("\n")
            with pytest.raises(PySparkException, match=f"{path} is empty"):
                source.load("words")
            path.unlink()
            with pytest.raises(PySparkException, match=rf"No such file or directory: '{path}'"):
                source.load("words")
            with pytest.raises(PySparkException, match="token and token_file are both given"):
                source.option("token", "text").load("words")
        finally:
            spark.conf.unset("spark.aqueduct.token")
            spark_udfs.register(spark)
    assert shown[0] == ("plan", "one") and shown[-1] == ("read", "two")
    assert {token for _, token in shown} == {"one", "two"}


def test_tokens_headers_and_settings(running, spark):
    seen = set()

    def authorize(call):
        seen.add((call.handler, call.headers["region"]))
        if call.token != "open":
            raise Refused(f"the token {call.token!r} opens nothing")

    service = aqueduct.Service("test", authorize=authorize)
    service.table("words", schema=WORDS.schema)(lambda: (yield WORDS))
    with running(service, TCP) as address:
        spark.conf.set("spark.aqueduct.address", address)
        spark.conf.set("spark.aqueduct.token", "open")
        spark.conf.set("spark.aqueduct.header.region", "north")
        try:
            spark_udfs.register(spark)
            source = spark.read.format("aqueduct")
            assert source.load("words").count() == 3
            source = source.option("header.region", "south")
            assert source.load("words").count() == 3
            with pytest.raises(PySparkException, match="the token 'shut' opens nothing"):
                source.option("token", "shut").load("words")
        finally:
            spark.conf.unset("spark.aqueduct.address")
            spark.conf.unset("spark.aqueduct.token")
            spark.conf.unset("spark.aqueduct.header.region")
            spark_udfs.register(spark)
    assert seen == {
        (f"aqueduct.table.{what}.words", region)
        for what in ("plan", "read")
        for region in ("north", "south")
    }
