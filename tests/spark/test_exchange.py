"""``exchange`` as a plain function: lists of batches, a real service, no Spark."""

from __future__ import annotations

import pickle
import threading

import pyarrow as pa
import pytest

from aqueduct.config import Config, Timing
from aqueduct.errors import (
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    HandlerFailed,
    Refused,
    SchemaMismatch,
    UnknownHandler,
)
from spark_udfs import exchange
from spark_udfs.calls.pool import process_pool
from tests.spark.services import NUMBERS, WORDS, make

NOBODY = "aqueduct://127.0.0.1:9"
WORDS_BATCH = pa.record_batch({"id": [1], "word": ["a"]}, schema=WORDS)
QUICK = Config(timing=Timing(connect_timeout=2.0, idle_timeout=2.0, ping_interval=0.5))


def numbers(*counts, start=0):
    """Batches of as many rows as ``counts`` says, numbered through."""
    batches = []
    for count in counts:
        batches.append(pa.record_batch({"id": range(start, start + count)}, schema=NUMBERS))
        start += count
    return batches


def ids(batches):
    return [value for batch in batches for value in batch["id"].to_pylist()]


def test_answers_come_in_the_order_of_the_input(address):
    batches = numbers(*range(40), start=1)
    answers = list(exchange(address, "double", in_flight=8)(iter(batches)))
    assert ids(answers) == [2 * n for n in ids(batches)]
    assert [batch.num_rows for batch in answers] == list(range(40))


def test_a_batch_and_a_table_are_exchanged_like_a_list_of_batches(address):
    (batch,) = numbers(3)
    call = exchange(address, "double")
    table = pa.Table.from_batches([batch])
    for given in (batch, table, [batch], (batch,)):
        assert ids(call(given)) == [0, 2, 4]
    with pytest.raises(ConfigError, match="RecordBatch is wanted, got Table"):
        list(call([table]))


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ([1], "got int in a list"),
        (5, "exchange: what is exchanged is 5; it must be record batches"),
        ("abc", "is 'abc'; it must be record batches"),
        ({"id": [1]}, "it must be record batches"),
        (None, "is None; it must be record batches"),
    ],
)
def test_what_is_no_batch_is_refused_where_it_is_given(given, advice):
    with pytest.raises(ConfigError, match=advice):
        exchange(NOBODY, "double")(given)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (1, "got int; mapInArrow gives batches"),
        ((pa.array([1]),), "got tuple; functions of columns go with exchange_column"),
    ],
)
def test_an_iterator_of_something_else_is_told_what_takes_that(given, advice):
    answers = exchange(NOBODY, "double")(iter([given]))
    with pytest.raises(ConfigError, match=advice):
        next(answers)


def test_an_iterator_of_data_frames_is_told_to_take_exchange_pandas():
    frame = numbers(1)[0].to_pandas()
    with pytest.raises(ConfigError, match=r"got DataFrame; mapInPandas .* exchange_pandas"):
        next(exchange(NOBODY, "double")(iter([frame])))


def test_an_empty_partition_yields_nothing_and_calls_nobody():
    assert list(exchange(NOBODY, "double")(iter([]))) == []


def test_an_empty_partition_with_a_schema_calls_the_handler(address, service):
    call = exchange(address, "total", schema=NUMBERS, input_schema=NUMBERS)
    assert ids(call(iter([]))) == [0]
    assert service.counters()["calls"] == 1


def test_batches_without_rows_and_without_columns_travel(address):
    answers = list(exchange(address, "echo")(iter(numbers(0, 3, 0))))
    assert [batch.num_rows for batch in answers] == [0, 3, 0]
    bare = pa.RecordBatch.from_struct_array(pa.array([{}] * 5, pa.struct([])))
    assert bare.num_rows == 5
    answers = list(exchange(address, "echo")(iter([bare])))
    assert [(batch.num_rows, batch.num_columns) for batch in answers] == [(5, 0)]


def test_a_handler_that_answers_a_hundred_times_its_input(address):
    batches = numbers(*[20_000] * 10)
    answers = exchange(address, "hundredfold")(iter(batches))
    assert sum(batch.num_rows for batch in answers) == 100 * 200_000


def test_a_handler_that_answers_nothing_until_the_end(address):
    batches = numbers(*[50_000] * 200)  # 80 MB: above every window and budget
    answers = pa.Table.from_batches(exchange(address, "sort")(iter(batches)))
    assert answers["id"].combine_chunks().equals(pa.array(range(10_000_000 - 1, -1, -1)))


def test_the_input_is_read_only_as_far_as_there_is_room(address):
    read = []

    def source():
        for number, batch in enumerate(numbers(*[1] * 100)):
            read.append(number)
            yield batch

    answers = exchange(address, "double", in_flight=3)(source())
    for number in range(20):
        next(answers)
        assert len(read) <= number + 1 + 3 + 1
    answers.close()


def test_the_bytes_in_flight_hold_the_input_back_too(address):
    read = []

    def source():
        for number, batch in enumerate(numbers(*[1000] * 30)):
            read.append(number)
            yield batch

    answers = exchange(address, "double", in_flight=8, in_flight_bytes=1)(source())
    for number, _ in enumerate(answers):
        assert len(read) <= number + 3
    assert len(read) == 30


def test_dictionaries_travel_and_may_change(address):
    kind = pa.schema([("colour", pa.dictionary(pa.int8(), pa.string()))])
    colours = [["red", "blue", "red"], ["blue", None], ["green", "red"]]
    batches = [pa.record_batch([pa.array(c, kind.field(0).type)], schema=kind) for c in colours]
    answers = list(exchange(address, "echo", schema=kind)(iter(batches)))
    assert [answer["colour"].to_pylist() for answer in answers] == colours
    assert {answer.schema for answer in answers} == {kind}


def test_one_connection_serves_all_calls_of_a_process(address, service):
    call = exchange(address, "double")
    for _ in range(5):
        list(call(iter(numbers(5, 5))))
    assert process_pool().snapshot() == {"leases": 0, "connections": 1, "connected": 1}
    counters = service.counters()
    assert (counters["connections"], counters["calls"]) == (1, 5)


def test_calls_of_several_threads_share_the_connection(address, service):
    call = exchange(address, "double")
    results = {}

    def work(number):
        results[number] = ids(call(iter(numbers(*[10] * 10, start=1000 * number))))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(6):
        assert results[number] == [2 * n for n in range(1000 * number, 1000 * number + 100)]
    assert service.counters()["connections"] == 1


def test_connection_headers_and_tls_make_connections_differ(address, service):
    list(exchange(address, "double")(iter(numbers(1))))
    list(exchange(address, "double", connection_headers={"who-a1b2c3": "me"})(iter(numbers(1))))
    list(exchange(address, "double", token="secret")(iter(numbers(1))))
    assert service.counters()["connections"] == 2


def test_closing_early_cancels_the_call_and_returns_the_lease(address, service):
    answers = exchange(address, "hundredfold")(iter(numbers(*[1000] * 50)))
    next(answers)
    assert process_pool().snapshot()["leases"] == 1
    answers.close()
    assert process_pool().snapshot()["leases"] == 0
    assert ids(exchange(address, "double")(iter(numbers(3)))) == [0, 2, 4]
    assert service.counters()["connections"] == 1


def test_an_error_of_the_input_passes_through_and_ends_the_call(address):
    def source():
        yield numbers(3)[0]
        raise KeyError("from the reader of the file")

    with pytest.raises(KeyError, match="from the reader of the file"):
        list(exchange(address, "double")(source()))
    assert process_pool().snapshot()["leases"] == 0
    assert ids(exchange(address, "double")(iter(numbers(1)))) == [0]


def test_a_handlers_error_says_everything(address):
    with pytest.raises(HandlerFailed) as caught:
        list(exchange(address, "fail")(iter(numbers(*[10] * 10))))
    error, text = caught.value, str(caught.value)
    assert (error.kind, error.detail) == ("ValueError", "42 is not to my taste")
    assert error.handler == "fail"
    peer = address.partition("?")[0]
    for part in ("'fail'", peer, "ValueError", "42 is not to my taste", "batch 4"):
        assert part in text
    assert "in fail" in text.partition("In the service:")[2]


def test_an_unknown_handler_is_named(address):
    with pytest.raises(UnknownHandler, match="'nonsense'") as caught:
        list(exchange(address, "nonsense")(iter(numbers(1))))
    assert address.partition("?")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "column"),
    [
        (pa.record_batch({"id": pa.array([1])}), "word"),
        (pa.record_batch({"id": pa.array([1], pa.int32()), "word": ["a"]}), "id"),
        (pa.record_batch({"word": ["a"], "id": [1]}), "id"),
        (pa.record_batch({"id": [1], "word": ["a"], "more": [1]}), "more"),
    ],
    ids=["missing", "type", "order", "extra"],
)
def test_an_input_that_does_not_fit_names_its_column(address, batch, column):
    with pytest.raises(SchemaMismatch) as caught:
        list(exchange(address, "words")(iter([batch])))
    assert caught.value.column == column
    assert f"{column!r}" in str(caught.value)
    assert "after 0 batches sent" in str(caught.value)


def test_a_wanted_output_that_does_not_fit_names_its_column(address):
    wanted = pa.schema([("id", pa.int64()), ("word", pa.int64())])
    with pytest.raises(SchemaMismatch, match="word") as caught:
        list(exchange(address, "words", schema=wanted)(iter([WORDS_BATCH])))
    assert caught.value.column == "word"


def test_input_that_differs_from_the_declared_schema_is_not_sent(address, service):
    call = exchange(address, "echo", input_schema=WORDS)
    with pytest.raises(SchemaMismatch, match="'word'"):
        list(call(iter(numbers(1))))
    assert service.counters()["calls"] == 0


def test_a_service_that_is_down_fails_in_time():
    with pytest.raises(ConnectFailed, match=r"127\.0\.0\.1:9") as caught:
        list(exchange(NOBODY, "double", config=QUICK)(iter(numbers(1))))
    assert "'double'" in str(caught.value)


@pytest.mark.parametrize(
    ("addresses", "options", "tried"),
    [
        (["aqueduct+tcp://127.0.0.1:9"], {}, "tried once (retries=0)"),
        (
            ["aqueduct+tcp://127.0.0.1:9"],
            {"retries": 2, "backoff": "10ms"},
            "tried 3 times without an answer at aqueduct+tcp://127.0.0.1:9 (retries=2)",
        ),
        (
            ["aqueduct+tcp://127.0.0.1:10", "aqueduct+tcp://127.0.0.1:9"],
            {},
            (
                "tried once without an answer at aqueduct+tcp://127.0.0.1:10 and "
                "aqueduct+tcp://127.0.0.1:9 (retries=0)"
            ),
        ),
    ],
    ids=["one", "retries", "several"],
)
def test_a_service_that_is_down_says_where_how_often_and_what_to_check(addresses, options, tried):
    with pytest.raises(ConnectFailed) as caught:
        list(exchange(addresses, "double", **options)(iter(numbers(1))))
    assert str(caught.value).startswith(
        "aqueduct+tcp://127.0.0.1:9: 127.0.0.1:9: connection refused: no program listens there; "
        f"is the server started, and is this its port?; {tried} ['double' at "
    )


def test_a_service_killed_on_the_way_ends_the_call(child):
    killed = child("2")
    answers = exchange(killed.address, "stall", config=QUICK)(iter(numbers(*[1] * 10)))
    assert [next(answers).num_rows, next(answers).num_rows] == [1, 1]
    killed.line("taken")
    killed.kill()
    with pytest.raises(ConnectionLost) as caught:
        list(answers)
    text = str(caught.value)
    assert "'stall'" in text
    assert "2 received" in text


def test_a_service_that_was_restarted_is_found_again(child):
    first = child()
    assert ids(exchange(first.address, "double", config=QUICK)(iter(numbers(2)))) == [0, 2]
    port = first.address.partition("?")[0].rpartition(":")[2]
    first.kill()
    second = child("1", port)
    address = second.address.partition("?")[0]
    call = exchange(f"{address}?verify=off", "double", config=QUICK)
    assert ids(call(iter(numbers(2)))) == [0, 2]


def test_a_deadline_ends_a_call_that_stalls(address):
    call = exchange(address, "stall", deadline=1.0)
    with pytest.raises(DeadlineExceeded):
        list(call(iter(numbers(1, 1, 1))))


def test_the_errors_of_one_connection_stay_apart(child):
    killed = child("1")
    call = exchange(killed.address, "stall", config=QUICK)
    calls = [call(iter(numbers(1, 1, 1))) for _ in range(2)]
    for answers in calls:
        next(answers)
    killed.kill()
    for answers in calls:
        with pytest.raises(ConnectionLost) as caught:
            list(answers)
        assert str(caught.value).count("'stall'") == 1


def test_a_token_is_checked_by_the_service(running):
    def authorize(call):
        if call.token != "open sesame":
            raise Refused("no entry")

    with running(make(authorize=authorize)) as address:
        assert ids(exchange(address, "echo", token="open sesame")(iter(numbers(2)))) == [0, 1]
        with pytest.raises(Refused, match="no entry"):
            list(exchange(address, "echo", token="guess")(iter(numbers(2))))


def test_a_token_file_is_read_before_each_call(running, tmp_path):
    shown = []
    path = tmp_path / "token"
    with running(make(authorize=lambda call: shown.append(call.token))) as address:
        call = exchange(address, "echo", token_file=str(path))
        for text in ("one", "two\n"):
            path.write_text(text)
            assert ids(call(iter(numbers(2)))) == [0, 1]
        for wrong, text in (
            (b"", "is empty"),
            (b"a" * (16 << 10) + b"b", "has more than 16384 bytes"),
            (b"\xff", "is not UTF-8"),
        ):
            path.write_bytes(wrong)
            with pytest.raises(ConfigError, match=f"raised ValueError: {path} {text}"):
                list(call(iter(numbers(2))))
        endless = exchange(address, "echo", token_file="/dev/zero")
        with pytest.raises(ConfigError, match="/dev/zero has more than 16384 bytes"):
            list(endless(iter(numbers(2))))
    assert shown == ["one", "two"]
    with pytest.raises(ConfigError, match="token and token_file are both given"):
        exchange(address, "echo", token="one", token_file=str(path))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"address": "nowhere"}, "nowhere"),
        ({"address": "aqueduct://host?colour=red"}, "colour"),
        ({"handler": ""}, "handler"),
        ({"in_flight": 0}, "in_flight"),
        ({"in_flight": 2.5}, "in_flight"),
        ({"in_flight_bytes": -1}, "in_flight_bytes"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": float("nan")}, "deadline"),
        ({"headers": {"a": 1}}, "headers"),
        ({"connection_headers": {1: "a"}}, "connection_headers"),
    ],
)
def test_arguments_that_cannot_work_fail_on_the_driver(arguments, names):
    with pytest.raises(ConfigError, match=names):
        exchange(**{"address": NOBODY, "handler": "double", **arguments})


def test_the_function_pickles_and_keeps_its_run(address):
    call = exchange(address, "about", headers={"a": "b"}, token="secret")
    copy = pickle.loads(pickle.dumps(call))
    assert copy == call
    (answer,) = copy(iter(numbers(1)))
    assert answer.to_pylist() == [{"write_key": call.write_key, "attempt": ""}]
    assert exchange(address, "about").write_key != call.write_key
    assert "secret" not in repr(call)
    assert call.__name__ == "exchange_about"


def test_large_batches_travel(address):
    batch = pa.record_batch({"id": range(8_500_000)}, schema=NUMBERS)
    assert batch.nbytes > 64 << 20
    answers = list(exchange(address, "echo")(iter([batch, batch])))
    assert [answer.equals(batch) for answer in answers] == [True, True]
