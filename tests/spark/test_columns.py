"""Columns that travel, and answers joined to the rows: through real calls, without Spark."""

from __future__ import annotations

import gc

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from aqueduct.errors import BadCall, ConfigError, HandlerFailed
from spark_udfs import exchange
from tests.spark.services import make

ROWS = pa.schema([("id", pa.int64()), ("text", pa.string()), ("more", pa.binary())])
NOBODY = "aqueduct://127.0.0.1:9"


def rows(*counts, width=10):
    """Wide rows, numbered through."""
    batches, start = [], 0
    for count in counts:
        numbers = range(start, start + count)
        columns = [pa.array(numbers), pa.array(map(str, numbers)), pa.array([b"x" * width] * count)]
        columns[2] = columns[2].cast(pa.binary())
        batches.append(pa.RecordBatch.from_arrays(columns, schema=ROWS))
        start += count
    return batches


@pytest.fixture
def service():
    service = make()
    squares = pa.schema([("id", pa.int64()), ("square", pa.float64())])
    numbers = pa.schema([("id", pa.int64())])

    @service.handler("square", input=numbers, output=squares, concurrency=4)
    def square(batch):
        ids = batch["id"].to_pylist()
        return pa.record_batch([batch["id"], pa.array([float(i * i) for i in ids])], schema=squares)

    @service.handler("even", input=numbers, output=numbers)
    def even(batch):
        return batch.filter(pa.array([i % 2 == 0 for i in batch["id"].to_pylist()]))

    @service.handler("but the last", output=numbers)
    def but_the_last(batches, call):
        held = None
        for batch in batches:
            if held is not None:
                yield held
            held = batch.select(["id"])

    @service.handler("once more", output=numbers)
    def once_more(batches, call):
        for batch in batches:
            yield batch.select(["id"])
        yield batch.select(["id"])

    @service.handler("lagging", output=numbers)
    def lagging(batches, call):
        held = None
        for batch in batches:
            if held is not None:
                yield held
            held = batch.select(["id"])
        yield held

    @service.handler("upper", output=pa.schema([("TEXT", pa.string())]))
    def upper(batch):
        return pa.record_batch({"TEXT": [text.upper() for text in batch["text"].to_pylist()]})

    @service.handler("lengths", output=pa.schema([("length", pa.int32())]))
    def lengths(batch):
        assert batch.schema.names == ["more", "text"]
        return pa.record_batch({"length": pc.utf8_length(batch["text"])})

    return service


@pytest.fixture
def address(service, running):
    with running(service, "aqueduct+tcp://127.0.0.1:0", dev_certificate=False) as address:
        yield address


def test_replace_puts_answers_in_their_places_and_others_behind(address, service):
    call = exchange(address, "square", columns=["id"], columns_mode="replace")
    answers = pa.Table.from_batches(call(iter(rows(3, 0, 5, 1))))
    assert answers.schema.names == ["id", "text", "more", "square"]
    assert answers["square"].to_pylist() == [float(i * i) for i in range(9)]
    assert answers["text"].to_pylist() == [str(i) for i in range(9)]


def test_append_puts_answers_behind(address):
    call = exchange(address, "upper", columns=["text"])
    batches = [batch.rename_columns(["id", "text", "more"]) for batch in rows(2, 3)]
    with pytest.raises(ConfigError, match=r"'TEXT' \(in the rows: 'text'\) has the name of"):
        list(call(iter(batches)))
    call = exchange(address, "lengths", columns=["more", "text"])
    answers = pa.Table.from_batches(call(iter(rows(2, 9))))
    assert answers.schema.names == ["id", "text", "more", "length"]
    assert answers.select(["id", "text", "more"]).equals(pa.Table.from_batches(rows(2, 9)))
    assert answers["length"].to_pylist() == [1] * 10 + [2]


def test_the_order_of_columns_is_that_of_the_option(address):
    call = exchange(address, "echo", columns=["text", "id"], columns_mode="replace")
    (answer,) = call(iter(rows(2)))
    assert answer.equals(rows(2)[0])


def test_what_does_not_travel_is_not_copied_and_does_not_travel(address, service):
    batch = rows(1000, width=1000)[0]
    call = exchange(address, "square", columns=["id"], columns_mode="replace")
    (answer,) = call(iter([batch]))
    assert service.counters()["bytes_in"] < 20_000
    theirs, mine = (b["more"].buffers()[2].address for b in (answer, batch))
    assert theirs == mine


def test_rows_are_not_kept_after_their_answer(address):
    def source():
        for batch in rows(*[10] * 40, width=1 << 16):
            yield batch
            del batch

    gc.collect()
    before = pa.total_allocated_bytes()
    call = exchange(address, "square", columns=["id"], columns_mode="replace", in_flight=2)
    for answer in call(source()):
        del answer
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_rows_that_wait_count_against_the_bytes_in_flight(address):
    read = []

    def source():
        for number, batch in enumerate(rows(*[1] * 40, width=1 << 20)):
            read.append(number)
            yield batch

    options: dict = {"columns": ["id"], "columns_mode": "replace", "in_flight_bytes": "2m"}
    ways: list[dict] = [{}, {"retries": 1}]
    for way in ways:
        read.clear()
        for number, _ in enumerate(exchange(address, "square", **options, **way)(source())):
            # Two wait, one is looked at, and one was read when the room was asked for.
            assert len(read) <= number + 1 + 2 + 2
        assert len(read) == 40


@pytest.mark.parametrize("columns", [["id"], None], ids=["joined", "plain"])
def test_rows_of_a_failed_batch_stay_with_nulls(address, columns):
    mode = None if columns is None else "replace"
    batches = rows(20, 20, 20, 20) if columns else [b.select(["id"]) for b in rows(20, 20, 20, 20)]
    options = {"columns": columns, "columns_mode": mode, "on_error": "null", "error_column": "why"}
    found = pa.Table.from_batches(exchange(address, "fail", **options)(iter(batches)))
    wanted = [*range(40), *[None] * 20, *range(60, 80)]
    assert found["id"].to_pylist() == wanted
    assert [why is not None for why in found["why"].to_pylist()] == [i is None for i in wanted]
    assert found["why"][40].as_py() == (
        f"HandlerFailed: handler 'fail' at {address}, batch 2: raised ValueError: 42 is not to my "
        "taste"
    )
    if columns:
        assert found["text"].to_pylist() == [str(i) for i in range(80)]


def test_rows_of_a_failed_batch_are_left_out_and_counted(address):
    call = exchange(address, "fail", columns="id", columns_mode="replace", on_error="skip")
    found = pa.Table.from_batches(call(iter(rows(20, 20, 20, 20))))
    assert found["text"].to_pylist() == [str(i) for i in (*range(40), *range(60, 80))]
    assert call.numbers.failed_batches == 1
    with pytest.raises(HandlerFailed, match="batch 2"):
        list(exchange(address, "fail", columns="id", columns_mode="replace")(iter(rows(*[20] * 4))))


def test_where_every_batch_fails_the_schema_is_known_all_the_same(address):
    call = exchange(address, "fail", on_error="null", error_column="why")
    (found,) = call(iter([pa.record_batch({"id": [42, 43]})]))
    assert found.schema.names == ["id", "why"]
    assert found["id"].to_pylist() == [None, None]


def test_another_number_of_rows_names_the_batch_and_both(address):
    call = exchange(address, "even", columns=["id"], columns_mode="replace")
    with pytest.raises(BadCall) as caught:
        list(call(iter(rows(1, 5))))
    assert str(caught.value).startswith(
        "handler 'even' answered batch 1 of 5 rows with 2 rows; columns=[...] joins one row of "
        "the answer for each row of the batch, in their order ["
    )
    assert address in str(caught.value)


def test_a_generator_may_answer_out_of_step(address, service):
    with pytest.raises(ConfigError) as caught:
        call = exchange(address, "lagging", columns=["id"], columns_mode="replace")
        list(call(iter(rows(2, 2))))
    assert str(caught.value).startswith(
        "columns=[...] needs one answer for each batch, and handler 'lagging' is no function of "
        "one batch: a generator may answer when it likes. Write it as a function of one batch, or "
        "call it without ["
    )
    assert service.counters()["rows_in"] == 0


def test_the_answers_of_a_generator_are_counted_in_turn(address):
    def call(handler, *counts):
        return list(exchange(address, handler, check_rows=True)(iter(rows(*counts))))

    assert [batch.num_rows for batch in call("lagging", 2, 3, 4)] == [2, 3, 4]
    with pytest.raises(BadCall, match=r"gave no answer to 1 of its batches, .* batch 2 of 4 rows"):
        call("but the last", 2, 3, 4)
    with pytest.raises(BadCall, match=r"gave 4 answers to 3 batches; check_rows=True needs one"):
        call("once more", 2, 3, 4)


@pytest.mark.parametrize("ordered", [True, False])
def test_answers_that_overtake_are_joined_to_their_rows(address, ordered):
    call = exchange(address, "square", columns="id", columns_mode="replace", ordered=ordered)
    answers = pa.Table.from_batches(call(iter(rows(*[3] * 40)))).sort_by("id")
    assert answers["text"].to_pylist() == [str(i) for i in range(120)]
    assert answers["square"].to_pylist() == [float(i * i) for i in range(120)]


def test_rows_are_counted_where_asked_for(address):
    numbers = [batch.select(["id"]) for batch in rows(4, 5)]
    assert sum(b.num_rows for b in exchange(address, "even")(iter(numbers))) == 5
    call = exchange(address, "even", check_rows=True)
    with pytest.raises(BadCall, match="answered batch 0 of 4 rows with 2 rows; check_rows=True"):
        list(call(iter(numbers)))
    call = exchange(address, "double", check_rows=True)
    assert [b.num_rows for b in call(iter(numbers))] == [4, 5]


def test_an_empty_partition_yields_nothing():
    call = exchange(NOBODY, "x", columns=["id"], input_schema=pa.schema([("id", pa.int64())]))
    assert list(call(iter([]))) == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            ["txt"],
            (
                "columns names 'txt', which the rows do not have; did you mean 'text'? they have "
                "'id', 'text', 'more', 'box', 'twin', 'twin'"
            ),
        ),
        (
            ["ID"],
            (
                "columns names 'ID', which the rows do not have; did you mean 'id'? they have "
                "'id', 'text', 'more', 'box', 'twin', 'twin'"
            ),
        ),
        (
            ["quite"],
            (
                "columns names 'quite', which the rows do not have; they have "
                "'id', 'text', 'more', 'box', 'twin', 'twin'"
            ),
        ),
        (
            ["box.lid"],
            (
                "columns names 'box.lid', a field inside the column 'box'; whole columns travel: "
                "name 'box', or make a column of it first: .withColumn('lid', col('box.lid'))"
            ),
        ),
        (
            ["twin"],
            (
                "columns names 'twin', and the rows have 2 columns of that name; rename all but "
                "one of them"
            ),
        ),
    ],
    ids=["near", "case", "unknown", "nested", "twice"],
)
def test_columns_that_the_rows_do_not_have(columns, message):
    batch = pa.RecordBatch.from_arrays(
        [*rows(1)[0].columns, pa.array([{"lid": 1}]), pa.array([1]), pa.array([2])],
        names=["id", "text", "more", "box", "twin", "twin"],
    )
    with pytest.raises(ConfigError) as caught:
        list(exchange(NOBODY, "x", columns=columns)(iter([batch])))
    assert str(caught.value).startswith(message + " [")


def test_columns_named_twice_fail_on_the_driver():
    with pytest.raises(ConfigError, match="columns names 'id' twice"):
        exchange(NOBODY, "x", columns=["id", "text", "id"])


@pytest.mark.parametrize(
    ("handler", "columns", "options", "message"),
    [
        (
            "square",
            ["id"],
            {},
            (
                "the answer's column 'id' has the name of a column of the rows; "
                "columns_mode='replace' puts the answer in its place; or drop or rename the row's "
                "column. The rows have 'id', 'text', 'more'"
            ),
        ),
        (
            "upper",
            ["text"],
            {},
            (
                "the answer's column 'TEXT' (in the rows: 'text') has the name of a column of the "
                "rows; rename the row's column, or the answer's. The rows have 'id', 'text', 'more'"
            ),
        ),
        (
            "upper",
            ["text"],
            {"columns_mode": "replace"},
            (
                "the answer's column 'TEXT' (in the rows: 'text') has the name of a column of the "
                "rows; rename the row's column, or the answer's. The rows have 'id', 'text', 'more'"
            ),
        ),
    ],
)
def test_names_that_collide_fail_before_data_flows(
    address, service, handler, columns, options, message
):
    with pytest.raises(ConfigError) as caught:
        list(exchange(address, handler, columns=columns, **options)(iter(rows(3))))
    assert str(caught.value).startswith(message)
    assert service.counters()["rows_in"] == 0


def test_the_mode_needs_columns():
    with pytest.raises(ConfigError, match=r"columns_mode='append' needs columns=\[\.\.\.\]"):
        exchange(NOBODY, "x", columns_mode="append")
