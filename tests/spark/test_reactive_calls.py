"""The calls behind a partition as requests of ReactiveSocket, to a service that is no Aqueduct."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aqueduct.config import DEFAULT, ReactiveSocket, Timing
from aqueduct.errors import (
    BadCall,
    BatchTooLarge,
    CallError,
    Cancelled,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    SchemaMismatch,
)
from spark_udfs import exchange, exchange_by_key, exchange_files, exchange_grouped, list_files
from spark_udfs.calls.partition import leased
from spark_udfs.calls.pool import process_pool
from spark_udfs.worker.metrics import TaskMetrics
from spark_udfs.worker.task import NOWHERE
from tests.spark.callees import NUMBERS, answers, batch, calling, check_squares, until, value_of
from tests.support.reactive_peer import Stranger, stranger, stream_of

pytestmark = pytest.mark.spark


@pytest.fixture
def peer():
    with stranger() as (service, server):
        yield service, server


def gated(service: Stranger, server: Any) -> Any:
    """Holds up what is asked; returns what lets it go on."""
    service.gate = gate = asyncio.Event()
    return lambda: server.loop.call_soon_threadsafe(gate.set)


@pytest.mark.parametrize("options", [{}, {"ordered": False}, {"on_error": "report"}], ids=str)
def test_every_batch_has_its_answer(peer, options):
    service, server = peer
    numbers = TaskMetrics()
    given = (batch(value, 1 + 50 * (value % 7)) for value in range(100))
    found = list(answers(calling(str(server.address), **options), given, numbers=numbers))
    check_squares(found, 100, ordered=options.get("ordered", True))
    assert [answer.batch.num_rows for answer in sorted(found, key=lambda a: a.number)] == [
        1 + 50 * (value % 7) for value in range(100)
    ]
    assert len(service.asked) == numbers.batches_sent == numbers.batches_received == 100
    assert numbers.bytes_sent > 8 * numbers.rows_sent > 800
    assert process_pool().snapshot() == {"leases": 0, "connections": 1, "connected": 1}


def test_several_are_under_way(peer):
    service, server = peer
    open_gate = gated(service, server)
    found = answers(calling(str(server.address), in_flight=5), map(batch, range(20)))

    def go():
        until(lambda: service.at_work == 5)
        open_gate()

    threading.Thread(target=go).start()
    check_squares(list(found), 20)
    assert service.most_at_work == 5


def test_what_a_call_says_goes_with_each_request(peer):
    service, server = peer
    call = calling(str(server.address), deadline=30.0, token="let me", headers=(("a", "b"),))
    call = dataclasses.replace(call, write_key="work")
    check_squares(list(answers(call, map(batch, range(3)))), 3)
    for pairs in service.asked:
        assert 0 < int(pairs["deadline"]) <= 30_000
        assert (pairs["token"], pairs["arguments"]) == ("let me", '{"a":"b"}')
        assert pairs["write-key"].startswith("work")


@pytest.mark.parametrize("end", [True, False], ids=["with end marker", "without"])
def test_an_answer_with_dictionaries(peer, end):
    service, server = peer
    kind = pa.dictionary(pa.int32(), pa.string())
    service.answer = lambda table: stream_of(
        pa.table({"word": pa.array([f"{value}" for value in table["id"].to_pylist()]).cast(kind)}),
        end=end,
    )
    found = list(answers(calling(str(server.address)), map(batch, range(10))))
    assert [answer.batch["word"].to_pylist() for answer in found] == [
        [str(value**2)] for value in range(10)
    ]


def test_an_error_is_that_of_its_batch(peer):
    _, server = peer
    call = calling(str(server.address), on_error="report")
    found = list(answers(call, map(batch, [1, -2, 3])))
    assert [answer.number for answer in found] == [0, 1, 2]
    assert (value_of(found[0].batch), value_of(found[2].batch)) == (1, 9)
    assert "batch 1: no root of -1 here" in str(found[1].error)
    with pytest.raises(CallError, match=r"'square' at .*, batch 1: no root of -1 here") as raised:
        list(answers(calling(str(server.address)), map(batch, [1, -2, 3])))
    assert raised.value.batch == 1


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (lambda table: b"", BadCall, "no Arrow IPC stream"),
        (lambda table: b"[]", BadCall, "no Arrow IPC stream"),
        (lambda table: stream_of(table)[:-20], BadCall, "the answers of handler 'square'"),
        (lambda table: stream_of(table.rename_columns(["no"])), SchemaMismatch, "'id'"),
    ],
    ids=["nothing", "json", "cut", "other column"],
)
def test_an_answer_that_cannot_be(peer, answer, error, text):
    service, server = peer
    service.answer = answer
    with pytest.raises(error, match=text):
        list(answers(calling(str(server.address), schema=NUMBERS), map(batch, range(3))))
    service.answer = stream_of
    check_squares(list(answers(calling(str(server.address)), map(batch, range(3)))), 3)


def test_a_batch_above_the_frame_limit_is_split_by_rows(peer):
    service, server = peer
    config = dataclasses.replace(DEFAULT, reactivesocket=ReactiveSocket(frame_bytes=4096))
    table = pa.record_batch({"id": range(3000)}, schema=NUMBERS)
    found = list(answers(calling(str(server.address), config=config), [table, batch(7)]))
    assert found[0].batch["id"].to_pylist() == [value**2 for value in range(3000)]
    assert value_of(found[1].batch) == 49
    assert 7 <= len(service.asked) <= 15  # 24,000 bytes, and what each says beside


def test_a_row_above_the_frame_limit_is_an_error_that_names_it(peer):
    _, server = peer
    config = dataclasses.replace(DEFAULT, reactivesocket=ReactiveSocket(frame_bytes=4096))
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    row = pa.record_batch({"id": [1], "text": ["x" * 5000]}, schema=schema)
    score = exchange(str(server.address), "square", config=config)
    with pytest.raises(BatchTooLarge, match="frame_bytes"):
        list(score([row]))


def test_a_service_that_is_lost_is_asked_again_only_if_it_says_so(peer):
    """Whether a batch may be sent again a service of Aqueduct says, and this one cannot."""
    service, server = peer
    gated(service, server)
    found = answers(calling(str(server.address), retries=3), map(batch, range(20)))

    def lose():
        until(lambda: service.at_work > 1)
        asyncio.run_coroutine_threadsafe(server.close(), server.loop).result()

    losing = threading.Thread(target=lose)
    losing.start()
    with pytest.raises(ConnectionLost, match="'square' is not declared idempotent"):
        list(found)
    losing.join()
    with pytest.raises(ConnectFailed):
        list(answers(calling(str(server.address)), map(batch, range(2))))


def test_batches_are_spread_over_two_addresses(peer):
    service, server = peer
    with stranger() as (other, second):

        def source():
            for value in range(400):
                if value == 4:
                    until(lambda: len(second.connections) == 1)
                yield batch(value)

        call = calling(str(server.address), str(second.address))
        check_squares(list(answers(call, source())), 400)
        assert len(service.asked) + len(other.asked) == 400
        assert min(len(service.asked), len(other.asked)) > 0


def test_what_is_under_way_is_cancelled_when_the_executor_hangs_up(peer):
    service, server = peer
    gated(service, server)
    found = answers(calling(str(server.address)), map(batch, range(20)))
    raised: list[BaseException] = []

    def read():
        try:
            list(found)
        except Cancelled as error:
            raised.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: service.at_work == 8)
    process_pool().close()
    until(lambda: service.at_work == 0)
    reader.join(20)
    assert len(raised) == 1


def test_leaving_early_cancels_what_is_under_way(peer):
    service, server = peer
    turns = asyncio.Semaphore(0)
    service.gate = SimpleNamespace(wait=turns.acquire)

    def one():
        until(lambda: service.at_work == 8)
        server.loop.call_soon_threadsafe(turns.release)

    answering = threading.Thread(target=one)
    answering.start()
    found = answers(calling(str(server.address)), map(batch, range(20)))
    assert value_of(next(found).batch) == 0
    answering.join()
    assert service.at_work >= 7
    found.close()
    until(lambda: service.at_work == 0)
    assert process_pool().snapshot()["leases"] == 0
    check_squares(list(answers(calling(str(server.address)), iter(()))), 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"deadline": 0.3}, "deadline of 0.3 s"),
        ({"batch_deadline": 0.3}, "batch_deadline"),
        ({"config": dataclasses.replace(DEFAULT, timing=Timing(progress_deadline=0.4))}, "0.4 s"),
    ],
    ids=["deadline", "batch deadline", "progress"],
)
def test_a_service_that_does_not_answer(peer, options, text):
    service, server = peer
    gated(service, server)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=text):
        list(answers(calling(str(server.address), **options), map(batch, range(3))))
    assert time.monotonic() - began < 20


def test_what_it_cannot_carry_is_an_error_that_says_what_can(peer):
    _, server = peer
    call = calling(str(server.address))
    with (
        pytest.raises(ConfigError, match="an aqueduct:// or aqueduct"),
        leased(call, place=NOWHERE, numbers=TaskMetrics()) as client,
    ):
        client.call_table("square", batch(1))


def test_a_service_without_a_description_needs_a_schema(peer):
    _, server = peer
    with pytest.raises(ConfigError, match=r"does not say what its handler 'square'.*schema="):
        exchange(str(server.address), "square").output_schema(NUMBERS)
    declared = exchange(str(server.address), "square", schema=NUMBERS)
    assert declared.output_schema(NUMBERS).simpleString() == "struct<id:bigint>"
    doubled = exchange(str(server.address), "square", schema=NUMBERS, columns=["id"])
    with pytest.raises(ConfigError, match="replace"):
        doubled.output_schema(NUMBERS)


def counted(table: pa.Table) -> bytes:
    """The answer to a group: the square of its key, and how many rows of it came."""
    assert len(set(table["id"].to_pylist())) == 1
    return stream_of(pa.table({"id": table["id"][:1], "rows": [table.num_rows]}))


def test_a_job_sends_files(spark, peer, tmp_path):
    service, server = peer
    for number in range(3):
        ids = list(range(1000 * number, 1000 * number + 1000))
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"id": ids, "word": ["x"] * 1000}), path, row_group_size=500)
    files = list_files(spark, str(tmp_path), tasks=2)
    send = exchange_files(str(server.address), "square", columns=["id"])
    found = files.mapInArrow(send, send.schema).collect()
    assert sum(row.rows_out for row in found) == sum(row.rows_in for row in found) == 3000
    assert len(service.asked) == sum(row.batches_in for row in found) == send.numbers.batches_sent
    fetch = exchange_files(str(server.address), "square", columns=["id"], returns="answers")
    answers = pa.Table.from_batches(
        list(fetch(pa.record_batch({"path": [f"{tmp_path}/{n}.parquet"]}) for n in (2, 0)))
    )
    expected = [value**2 for value in (*range(2000, 3000), *range(1000))]
    assert answers["id"].to_pylist() == expected


def test_a_file_whose_batch_fails_has_a_receipt(peer, tmp_path):
    _, server = peer
    for name, value in (("bad", -2), ("good", 2)):
        pq.write_table(pa.table({"id": [value]}), tmp_path / name)
    send = exchange_files(
        str(server.address), "square", write=str(tmp_path / "out"), on_failure="report"
    )
    paths = pa.record_batch({"path": [f"{tmp_path}/bad", f"{tmp_path}/good"]})
    bad, good = (row for receipt in send(iter([paths])) for row in receipt.to_pylist())
    assert "no root of -1 here" in bad["error"] and f"{tmp_path}/bad" in bad["error"]
    assert bad["output"] is None
    assert pq.read_table(good["output"])["id"].to_pylist() == [4]


def test_a_job_sends_groups(spark, peer):
    service, server = peer
    service.answer = counted
    frame = spark.range(0, 300, 1, 3).selectExpr("id % 7 id")
    expected = [(key**2, 43 if key < 6 else 42) for key in range(7)]
    keyed = exchange_grouped(str(server.address), "square", form="key_table")
    found = frame.groupBy("id").applyInArrow(keyed, "id long, rows long").collect()
    assert sorted((row.id, row.rows) for row in found) == expected
    headers = [json.loads(pairs["arguments"]) for pairs in service.asked]
    assert sorted(json.loads(each["group-key"]) for each in headers) == [[k] for k in range(7)]
    together = exchange_by_key(str(server.address), "square", ["id"])
    found = together.apply(frame, "id long, rows long").collect()
    assert sorted((row.id, row.rows) for row in found) == expected
    assert len(service.asked) == 14


@pytest.mark.parametrize("make", ["grouped", "by key"])
def test_a_group_above_the_frame_limit_is_not_split(make, peer):
    """A function of one batch would take each part for a group."""
    service, server = peer
    service.answer = counted
    config = dataclasses.replace(DEFAULT, reactivesocket=ReactiveSocket(frame_bytes=4096))
    group = batch(3, 2000)
    if make == "grouped":
        grouped = exchange_grouped(str(server.address), "square", config=config)
        call = lambda found: grouped(pa.Table.from_batches([found])).to_batches()  # noqa: E731
    else:
        keyed = exchange_by_key(str(server.address), "square", ["id"], config=config)
        call = lambda found: list(keyed(iter([found])))  # noqa: E731
    with pytest.raises(BatchTooLarge, match=r"a group has 1\d+ bytes.*frame_bytes.*aqueduct\+tls"):
        call(group)
    assert not service.asked
    assert [each.to_pylist() for each in call(batch(3, 20))] == [[{"id": 9, "rows": 20}]]


@pytest.mark.parametrize("form", ["batches", "key_batches"])
def test_a_group_of_several_batches_is_an_error_that_says_what_can(form):
    with pytest.raises(ConfigError, match=rf"form='{form}'.* has no place at .*aqueduct\+tls://"):
        exchange_grouped("reactivesocket+tcp://127.0.0.1:1", "square", form=form)
