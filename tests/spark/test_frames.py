"""Columns to a service and back: the scalar iterator form of arrow_udf."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from aqueduct.errors import ConfigError, SchemaMismatch
from spark_udfs.functions.exchange import exchange
from spark_udfs.functions.pandas import ColumnExchange, exchange_column
from tests.spark.services import make

PAIR = pa.schema([("price", pa.float64()), ("count", pa.int64())])


@pytest.fixture
def service():
    service = make()

    @service.handler("cost", input=PAIR, output=pa.schema([("any name", pa.float64())]))
    def cost(batch):
        return pa.record_batch({"any name": pc.multiply(batch["price"], batch["count"])})

    @service.handler("two", output=pa.schema([("a", pa.int64()), ("b", pa.int64())]))
    def two(batch):
        return pa.record_batch({"a": batch[0], "b": batch[0]})

    @service.handler("fewer", output=pa.schema([("a", pa.int64())]))
    def fewer(batch):
        return pa.record_batch({"a": batch[0].slice(1)})

    return service


def column(address, handler, returns, *names) -> ColumnExchange:
    return ColumnExchange(exchange(address, handler, check_rows=True), names, returns)


def test_arrays_go_and_come(address):
    given = [(pa.array([1.5, 2.0]), pa.array([2, 3])), (pa.array([4.0]), pa.array([5]))]
    function = column(address, "cost", pa.float64(), "price", "count")
    assert [array.to_pylist() for array in function(iter(given))] == [[3.0, 6.0], [20.0]]
    assert list(function(iter([]))) == []


def test_an_answer_of_another_type_or_of_two_columns_is_named(address):
    given = [(pa.array([1, 2]),)]
    with pytest.raises(SchemaMismatch, match=r"answered batch 0 with \(id int64\); .*double"):
        list(column(address, "double", pa.float64(), "id")(iter(given)))
    with pytest.raises(SchemaMismatch, match=r"\(a int64, b int64\); .* needs one column"):
        list(column(address, "two", pa.int64(), "id")(iter(given)))


def test_rows_that_went_astray_are_noticed(address):
    with pytest.raises(Exception, match="row") as caught:
        list(column(address, "fewer", pa.int64(), "id")(iter([(pa.array([1, 2]),)])))
    assert "fewer" in str(caught.value)


def test_a_wrong_number_of_columns_is_told(address):
    with pytest.raises(ConfigError, match="was given 1 columns; columns= has 2: price, count"):
        list(column(address, "cost", pa.float64(), "price", "count")(iter([(pa.array([1.0]),)])))


@pytest.mark.spark
def test_columns_in_a_query(spark, address, service):
    frame = spark.range(0, 5000, 1, 4).selectExpr("id", "id / 2 price", "id % 3 count")
    double = exchange_column(address, "double", "long", columns=["id"])
    cost = exchange_column(address, "cost", "double", columns=["price", "count"])
    found = frame.select("id", double("id").alias("twice"), cost("price", "count").alias("cost"))
    for row in found.collect():
        assert row.twice == 2 * row.id
        assert row.cost == row.id / 2 * (row.id % 3)
    assert found.where("cost > 0").count() == sum(1 for k in range(5000) if k % 3)


@pytest.mark.spark
def test_settings_that_would_mix_up_rows_are_for_others(spark, address):
    settings = {"ordered": "false", "onError": "skip", "mergeRows": "100"}
    for name, value in settings.items():
        spark.conf.set(f"spark.aqueduct.{name}", value)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 7)
    try:
        # Of this handler the first batches take longest: as made, answers come in another order.
        double = exchange_column(address, "double", "long", columns=["id"])
        frame = spark.range(0, 200, 1, 2)
        wrong = frame.select("id", double("id").alias("twice")).where("twice != 2 * id")
        assert wrong.count() == 0
        failing = exchange_column(address, "fail", "long", columns=["id"])
        with pytest.raises(Exception, match="42 is not to my taste"):
            frame.select(failing("id")).collect()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
        for name in settings:
            spark.conf.unset(f"spark.aqueduct.{name}")


@pytest.mark.spark
def test_filters_and_sql_may_use_it(spark, address):
    spark.udf.register("twice", exchange_column(address, "double", "long", columns=["id"]))
    assert spark.sql("select sum(twice(id)) from range(100)").collect()[0][0] == 9900


@pytest.mark.spark
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"columns": "id"}, "columns='id'; it must be a list of names"),
        ({"columns": ["a", "a"]}, "it must be a list of names, each once"),
        ({"on_error": "skip"}, "on_error='skip' has no place here"),
        ({"ordered": False}, "ordered has no place here"),
        ({"returns": "nonsense"}, "is not a schema"),
        ({"returns": "time(0)"}, r"returns is time\(0\), .* return time\(6\), and cast"),
        ({"in_flihgt": 1}, "did you mean in_flight"),
    ],
)
def test_bad_arguments_are_refused_at_once(spark, options, text):
    given = {"returns": "long", **options}
    with pytest.raises(ConfigError, match=text):
        exchange_column("aqueduct+tcp://127.0.0.1:1", "double", **given)
