"""Groups to a service: through applyInArrow, and by key in one call."""

from __future__ import annotations

import json
import threading
from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from aqueduct.errors import BatchTooLarge, ConfigError, DeadlineExceeded, HandlerFailed
from spark_udfs import exchange_by_key, exchange_grouped
from tests.spark.services import make

ROWS = pa.schema([("k", pa.string()), ("v", pa.int64())])
SUMS = pa.schema([("k", pa.string()), ("rows", pa.int64()), ("total", pa.int64())])
SUMS_DDL = "k string, rows long, total long"


@pytest.fixture
def seen():
    return []


@pytest.fixture
def service(seen):
    service = make()

    @service.handler("sum", input=ROWS, output=SUMS, concurrency=4)
    def sum_of(batch, call):
        seen.append((batch.num_rows, call.headers.get("group-key")))
        keys = pc.unique(batch["k"]).to_pylist()
        assert len(keys) == 1, keys
        if keys == ["bad"]:
            raise ValueError("this group is not to my taste")
        row = {"k": keys, "rows": [batch.num_rows], "total": [pc.sum(batch["v"]).as_py()]}
        return pa.record_batch(row, schema=SUMS)

    @service.handler("sum all", input=ROWS, output=SUMS)
    def sum_all(batches, call):
        table = pa.Table.from_batches(list(batches), ROWS)
        seen.append((table.num_rows, call.headers.get("group-key")))
        row = {
            "k": [table["k"][0].as_py()],
            "rows": [table.num_rows],
            "total": [pc.sum(table["v"]).as_py()],
        }
        yield pa.record_batch(row, schema=SUMS)

    return service


def rows(*groups: tuple[str | None, int]) -> pa.Table:
    keys = [key for key, count in groups for _ in range(count)]
    return pa.table({"k": keys, "v": list(range(len(keys)))}, schema=ROWS)


def cut(table: pa.Table, size: int) -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = table.combine_chunks().to_batches(max_chunksize=size)
    return batches


def expected(table: pa.Table) -> list[tuple]:
    found: dict = {}
    for key, value in zip(table["k"].to_pylist(), table["v"].to_pylist(), strict=True):
        count, total = found.get(key, (0, 0))
        found[key] = count + 1, total + value
    return sorted((key, *pair) for key, pair in found.items())


def summed(answers) -> list[tuple]:
    return sorted(tuple(row.values()) for batch in answers for row in batch.to_pylist())


# ------------------------------------------------------------------ by key


GROUPS = rows(("a", 3), ("b", 1), ("c", 10), ("d", 1), ("e", 1), ("f", 7))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 23])
def test_each_group_is_one_batch_wherever_spark_cuts(size, address, seen, service):
    function = exchange_by_key(address, "sum", ["k"])
    answers = list(function(iter(cut(GROUPS, size))))
    assert summed(answers) == expected(GROUPS)
    assert Counter(count for count, _ in seen) == Counter([3, 1, 10, 1, 1, 7])
    assert service.counters()["calls"] == 1


def test_keys_of_several_columns_and_values_that_equal_nothing(address, service):
    nan = float("nan")
    schema = pa.schema([("x", pa.float64()), ("y", pa.string()), ("v", pa.int64())])
    x = [None, None, nan, nan, 1.0, 1.0, 1.0, 2.0]
    y = ["a", "a", "a", "a", "a", None, None, "b"]
    table = pa.table({"x": x, "y": y, "v": list(range(8))}, schema=schema)
    sizes = []
    for size in (1, 3, 8):
        function = exchange_by_key(address, "echo", ["x", "y"])
        answers = list(function(iter(cut(table, size))))
        sizes.append([answer.num_rows for answer in answers])
        values = [value for answer in answers for value in answer["v"].to_pylist()]
        assert values == list(range(8))
    assert sizes == [[2, 2, 1, 2, 1]] * 3


def test_nothing_and_empty_batches_make_no_group(address, seen):
    function = exchange_by_key(address, "sum", ["k"])
    assert list(function(iter([]))) == []
    empty = pa.RecordBatch.from_pylist([], schema=ROWS)
    answers = list(function(iter([empty, *cut(rows(("a", 2)), 1), empty])))
    assert summed(answers) == [("a", 2, 1)]
    assert [count for count, _ in seen] == [2]


def test_a_group_that_is_too_large_names_its_key(address):
    function = exchange_by_key(address, "sum", ["k"], group_bytes=1000)
    with pytest.raises(BatchTooLarge, match=r"the group \{'k': 'c'\} has more than 1000 bytes"):
        list(function(iter(cut(rows(("a", 3), ("c", 1000)), 50))))


def test_a_group_that_fails_says_why(address):
    function = exchange_by_key(address, "sum", ["k"])
    with pytest.raises(HandlerFailed, match="this group is not to my taste"):
        list(function(iter(cut(rows(("a", 3), ("bad", 2)), 10))))


@pytest.mark.parametrize(
    ("keys", "options", "text"),
    [
        ("k", {}, "keys='k'; it must be a list"),
        ([], {}, "keys=\\[\\]; it must be a list of at least one"),
        (["k"], {"merge_rows": 10}, "merge_rows has no place here"),
        (["k"], {"group_bytes": "lots"}, "group_bytes='lots'; it must be a size above zero"),
        (["k"], {"in_flihgt": 1}, "did you mean in_flight"),
    ],
)
def test_bad_arguments_are_refused_at_once(keys, options, text):
    with pytest.raises(ConfigError, match=text):
        exchange_by_key("aqueduct+tcp://127.0.0.1:1", "sum", keys, **options)


def test_keys_that_are_not_there_or_cannot_be_compared_are_named(address):
    with pytest.raises(ConfigError, match="keys has 'q'; the rows have the columns k, v"):
        list(exchange_by_key(address, "sum", ["q"])(iter(cut(GROUPS, 5))))
    lists = pa.record_batch({"k": [[1], [2]], "v": [1, 2]})
    with pytest.raises(ConfigError, match="keys has 'k', of type list"):
        list(exchange_by_key(address, "echo", ["k"])(iter([lists])))


@pytest.mark.spark
def test_spark_brings_groups_together_and_gets_their_answers(spark, address, service, seen):
    frame = spark.range(0, 4000, 1, 4).selectExpr("string(id % 700) k", "id v")
    function = exchange_by_key(address, "sum", ["k"])
    found = function.apply(frame).collect()
    assert len(found) == len(seen) == 700
    assert {(row.k, row.rows) for row in found} == {
        (str(k), 6 if k < 500 else 5) for k in range(700)
    }
    assert sum(row.total for row in found) == sum(range(4000))
    assert service.counters()["calls"] <= 5 + 1  # one a partition, and what the service is


# ------------------------------------------------------------------ applyInArrow


def test_a_small_group_is_one_message(address, seen, service):
    function = exchange_grouped(address, "sum")
    answer = function(rows(("a", 5)))
    assert answer.schema == SUMS
    assert summed(answer.to_batches()) == [("a", 5, 10)]
    assert seen == [(5, None)]
    assert service.counters()["batches_in"] == 1


def test_a_large_group_is_a_call_of_many_batches(address, seen):
    table = pa.concat_tables([rows(("a", 100_000))] * 3)
    answer = exchange_grouped(address, "sum all")(table)
    assert summed(answer.to_batches()) == [("a", 300_000, 3 * sum(range(100_000)))]
    assert seen == [(300_000, None)]


@pytest.mark.parametrize("form", ["key_table", "key_batches"])
def test_the_key_goes_with_the_call(form, address, seen):
    function = exchange_grouped(address, "sum", form=form, headers={"mine": "too"})
    key = (pa.scalar("a"), pa.scalar(7), pa.scalar(None, pa.string()))
    table = rows(("a", 4))
    given = table if form == "key_table" else iter(cut(table, 4))
    answers = function(key, given)
    answers = answers.to_batches() if form == "key_table" else list(answers)
    assert summed(answers) == [("a", 4, 6)]
    assert seen[0][0] == 4
    assert json.loads(seen[0][1]) == ["a", 7, None]


def test_a_group_that_fails_names_the_service(address):
    with pytest.raises(HandlerFailed, match="this group is not to my taste") as caught:
        exchange_grouped(address, "sum")(rows(("bad", 2)))
    assert address.partition("?")[0].partition("://")[2] in str(caught.value)


def test_a_small_group_is_a_record_in_the_log(address, caplog):
    with caplog.at_level("INFO", "spark_udfs"):
        exchange_grouped(address, "sum")(rows(("a", 5)))
    (record,) = [record for record in caplog.records if record.name == "spark_udfs"]
    assert "'sum', without a task: well; 1 batches and 5 rows sent" in record.getMessage()


def test_a_small_group_has_the_deadline_of_a_batch(service, running):
    waiting = threading.Event()

    @service.handler("late", input=ROWS, output=SUMS)
    def late(batch, call):
        call.on_cancel(waiting.set)
        waiting.wait(60)

    with running(service) as address:
        function = exchange_grouped(address, "late", batch_deadline=0.2)
        with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.2 s \(batch_deadline\)"):
            function(rows(("a", 1)))
        assert waiting.wait(20)


def test_a_form_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="form='frame'; it must be one of 'table', 'key_table'"):
        exchange_grouped("aqueduct+tcp://127.0.0.1:1", "sum", form="frame")  # type: ignore[arg-type]


@pytest.mark.spark
def test_a_setting_that_merges_batches_leaves_groups_apart(spark, address, seen):
    spark.conf.set("spark.aqueduct.mergeRows", "1000")
    try:
        trend = exchange_by_key(address, "sum", ["k"])
    finally:
        spark.conf.unset("spark.aqueduct.mergeRows")
    table = rows(("a", 3), ("b", 2))
    answers = pa.Table.from_batches(list(trend(iter(cut(table, 2)))))
    assert answers["rows"].to_pylist() == [3, 2]


@pytest.mark.spark
@pytest.mark.parametrize("form", ["table", "key_table", "batches", "key_batches"])
def test_spark_hands_over_groups_in_every_form(form, spark, address, service, seen):
    frame = spark.range(0, 300, 1, 3).selectExpr("string(id % 7) k", "id v")
    function = exchange_grouped(address, "sum", form=form)
    found = frame.groupBy("k").applyInArrow(function, SUMS_DDL).collect()
    assert sorted(row.k for row in found) == list("0123456")
    assert sum(row.total for row in found) == sum(range(300))
    assert sum(row.rows for row in found) == sum(count for count, _ in seen) == 300
    keys = {key and json.loads(key)[0] for _, key in seen}
    assert keys == (set("0123456") if form.startswith("key") else {None})
    assert service.counters()["connections"] <= 2
