"""Spark Connect: a client without a Java process of its own, and a server."""

from __future__ import annotations

import time

import pytest

from tests.spark.engines import Failed, started
from tests.spark.tables import Log, make
from tests.spark.test_engines_cluster import PROMISE, WHOLE, whole
from tests.spark.witness import Witness

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with started("connect", tmp_path_factory.mktemp("engine")) as engine:
        yield engine


@pytest.fixture
def witness(tmp_path):
    witness = Witness(f"aqueduct+unix://{tmp_path / 'service'}")
    yield witness
    try:
        witness.settled()
    finally:
        witness.close()


def test_an_exchange_over_connect(engine, witness):
    result = engine.run("through", address=witness.addresses[0], partitions=6)
    assert whole(result) == WHOLE
    counters = witness.settled()
    assert counters["calls"] == 6
    assert 1 <= counters["connections"] <= 2


def test_settings_and_schemas_over_connect(engine, witness):
    settings = {"spark.aqueduct.address": witness.addresses[0], "spark.aqueduct.inFlight": "3"}
    result = engine.run("joined", settings=settings, rows=100)
    assert result == {"columns": ["id", "more"], "rows": 100, "in_flight": 3}
    with pytest.raises(Failed, match="no address: give exchange"):
        engine.run("joined", settings={}, rows=1)


def test_the_summary_says_where_the_numbers_are(engine, witness):
    result = engine.run("through", address=witness.addresses[0])
    assert result["tasks"] == 0
    assert "no numbers: Spark Connect has no accumulators" in result["summary"]
    assert "spark.sql.pyspark.worker.logging.enabled" in result["summary"]


def test_an_address_that_refuses_is_named(engine):
    with pytest.raises(Failed, match="ConnectFailed") as caught:
        engine.run("through", address="aqueduct+tcp://127.0.0.1:9", partitions=2)
    assert "127.0.0.1:9" in str(caught.value)


def test_tables_are_read_over_connect(engine, running, tmp_path):
    log = Log(tmp_path)
    log.newest = 10
    checkpoint = str(tmp_path / "checkpoint")
    with running(make(log), "aqueduct+tcp://127.0.0.1:0") as address:
        result = engine.run("read_tables", address=address, checkpoint=checkpoint)
    assert result == {"count": 10, "some": [4, 5, 6, 7, 8], "rows": list(range(10))}
    assert log.commits == [{"row": 4}, {"row": 8}]


def test_limit_cancels(engine, witness):
    headers = {"hold": "all", "answers": "1"}
    rows = engine.run("limited", address=witness.addresses[0], headers=headers, rows=3)
    ended = time.monotonic()
    assert rows == [0, 1, 2]
    (cancelled,) = witness.wait("cancelled")
    assert cancelled["at"] - ended < PROMISE


def test_an_interrupted_job_cancels(engine, witness):
    options = {"headers": {"hold": "all", "answers": "1"}}
    job = engine.start("through", address=witness.addresses[0], handler="hold", options=options)
    witness.wait("holding", count=2)
    assert engine.run("interrupt") >= 1
    with pytest.raises(Failed, match=r"INTERRUPTED|OPERATION_CANCELED|cancel"):
        job.result(60)
    witness.wait("cancelled", count=2)
