"""Table functions: ``SELECT * FROM score(TABLE(t))``."""

from __future__ import annotations

import pickle
import threading

import pyarrow as pa
import pytest

from aqueduct.errors import ConfigError, HandlerFailed, WrongType
from spark_udfs import exchange, exchange_column, exchange_table
from spark_udfs.functions.tables import TableCall, TableExchange
from tests.spark.services import NUMBERS, make

TCP = "aqueduct+tcp://127.0.0.1:1"
LENGTHS = pa.schema([("length", pa.int64())])


@pytest.fixture
def service():
    service = make()

    @service.handler("length", input=pa.schema([("word", pa.string())]), output=LENGTHS)
    def length(batch):
        return pa.record_batch({"length": pa.array(map(len, batch["word"].to_pylist()))})

    return service


def numbers(*given: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(given, pa.int64())}, schema=NUMBERS)


def table_call(address: str, handler: str, **options) -> TableCall:
    return TableCall(exchange(address, handler, **options))


def rows(batches) -> list[int]:
    return [value for batch in batches for value in batch["id"].to_pylist()]


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "aqueduct-table"]


# The call of one partition by itself


@pytest.mark.parametrize("options", [{}, {"in_flight": 1}, {"retries": 2}])
def test_batches_go_one_by_one_and_answers_come_in_order(address, options):
    call = table_call(address, "double", **options)
    found = [row for number in range(40) for row in rows(call.batch(numbers(number)))]
    found += rows(call.end())
    call.close()
    assert found == [2 * number for number in range(40)]
    assert threads() == []


def test_several_batches_are_in_flight(address, service):
    together = threading.Barrier(2)

    @service.handler("pairs", input=NUMBERS, output=NUMBERS, concurrency=2)
    def pairs(batch):
        together.wait(60)  # with one batch at a time nobody would come
        return batch

    call = table_call(address, "pairs")
    found = [row for number in range(4) for row in rows(call.batch(numbers(number)))]
    assert found + rows(call.end()) == [0, 1, 2, 3]
    call.close()


def test_many_answers_to_a_batch_are_not_gathered(address):
    """An answer nobody took holds the call: its thread has one, the rest is in the service."""
    call = table_call(address, "hundredfold")
    found = rows(call.batch(numbers(1)))
    found += rows(call.batch(numbers(2)))
    assert len(found) < 100
    found += rows(call.end())
    assert found == [1] * 100 + [2] * 100


def test_a_handler_that_answers_at_the_end(address):
    call = table_call(address, "total")
    assert rows(call.batch(numbers(1, 2))) == []
    assert rows(call.batch(numbers(3))) == []
    assert rows(call.end()) == [6]


def test_without_a_batch_there_is_nothing(address):
    assert list(table_call(address, "double").end()) == []
    assert rows(table_call(address, "total", input_schema=NUMBERS).end()) == [0]


def test_an_error_comes_where_answers_are_waited_for(address):
    call = table_call(address, "fail")
    with pytest.raises(HandlerFailed, match="42 is not to my taste"):
        for number in (1, 42, 2, 3):
            list(call.batch(numbers(number)))
        list(call.end())
    call.close()
    assert threads() == []


def test_a_call_that_is_left_is_cancelled(running, service):
    cancelled, begun = threading.Event(), threading.Event()

    @service.handler("endless", input=NUMBERS, output=NUMBERS)
    def endless(batches, call):
        call.on_cancel(cancelled.set)
        begun.set()
        while not call.cancelled:
            yield numbers(1)

    with running(service) as address:
        call = table_call(address, "endless")
        answers = call.batch(numbers(1))
        list(answers)
        assert begun.wait(20)
        call.close()
        assert cancelled.wait(20)
        call.close()
    assert threads() == []


def test_what_is_no_table_is_told(address):
    with pytest.raises(WrongType, match=r"takes one table, and got a Int64Array: SELECT \* FROM"):
        list(table_call(address, "double").batch(pa.array([1])))


def test_it_travels_with_its_library(address):
    made = pickle.loads(pickle.dumps(TableExchange(exchange(address, "double"))))()
    assert rows(made.batch(numbers(4))) + rows(made.end()) == [8]
    made.close()


# In Spark


@pytest.fixture
def words(spark):
    frame = spark.range(0, 200, 1, 2).selectExpr("repeat('x', id) word")
    frame.createOrReplaceTempView("words")
    yield frame
    spark.catalog.dropTempView("words")


@pytest.mark.spark
@pytest.mark.usefixtures("small_batches")
def test_a_table_goes_through_a_service_in_sql(spark, address, words):
    length = exchange_table(address, "length")
    spark.udtf.register("length_of", length)
    found = spark.sql("SELECT count(*), sum(length) FROM length_of(TABLE(words))").collect()
    assert found == [(200, sum(range(200)))]
    joined = exchange_table(address, "length", rows="word string", columns=["word"])
    assert joined.returnType.simpleString() == "struct<word:string,length:bigint>"
    table = joined(words.asTable())
    assert table.where("length(word) = length").count() == 200
    assert "3 tasks" not in length.summary() and "rows" in length.summary()


@pytest.mark.spark
def test_each_key_of_a_partitioned_table_is_a_call(spark, address, service):
    keyed = pa.schema([("id", pa.int64()), ("key", pa.int64())])

    @service.handler("totals", input=keyed, output=keyed)
    def totals(batches, call):
        table = pa.Table.from_batches(batches, schema=keyed)
        (key,) = table["key"].unique().to_pylist()  # the rows of one key alone
        yield pa.record_batch({"id": [sum(table["id"].to_pylist())], "key": [key]}, schema=keyed)

    spark.udtf.register("totals_of", exchange_table(address, "totals"))
    spark.range(0, 12, 1, 2).selectExpr("id", "id % 3 key").createOrReplaceTempView("keyed")
    try:
        found = spark.sql("SELECT * FROM totals_of(TABLE(keyed) PARTITION BY key)").collect()
    finally:
        spark.catalog.dropTempView("keyed")
    assert sorted(tuple(row) for row in found) == [(18, 0), (22, 1), (26, 2)]


@pytest.mark.spark
def test_a_column_is_known_from_the_service(spark, address, words):
    length = exchange_column(address, "length")
    spark.udf.register("length_of_word", length)
    query = "SELECT sum(length_of_word(word)) FROM words WHERE length_of_word(word) > 1"
    assert spark.sql(query).collect()[0][0] == sum(range(200)) - 1
    # Without declared columns it is called with columns=("value",), as before.
    assert words.select(exchange_column(address, "length", columns=["word"])("word")).count() == 200
    with pytest.raises(ConfigError, match=r"answers with the columns id, word; .* exchange_table"):
        exchange_column(address, "words")
    with pytest.raises(ConfigError, match=r"'echo' at .* depends on what it is sent: say what"):
        exchange_column(address, "echo")


@pytest.mark.spark
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"returns": 5}, "returns is a int; it must be a pyarrow.Schema, a StructType or DDL"),
        ({"returns": "nonsense"}, "is not a schema"),
        ({"rows": "nonsense"}, "is not a schema"),
        ({"columns": ["a"]}, 'say what it has, rows="id long, text string"'),
        ({"returns": "a long", "in_flihgt": 1}, "did you mean in_flight"),
    ],
)
def test_bad_arguments_are_refused_at_once(spark, given, text):
    with pytest.raises(ConfigError, match=text):
        exchange_table(TCP, "h", **given)
