"""Tables of Polars, DuckDB, pandas and nanoarrow go in, and answers become tables of theirs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import duckdb
import nanoarrow
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import aqueduct
from aqueduct.arrow.capsules import to_polars
from aqueduct.client.call import Batches
from aqueduct.client.client import Client
from aqueduct.client.options import CallOptions
from aqueduct.client.sync_client import SyncClient
from aqueduct.errors import (
    BatchTooLarge,
    Cancelled,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    HandlerFailed,
    LocalProtocolError,
    SchemaMismatch,
    WrongType,
)
from tests.support.calls import config, connected, serving, sync_client, until

ROWS: dict[str, list[Any]] = {
    "id": [1, 2, 3],
    "word": ["one", None, "a word of more than twelve bytes"],
}


def in_polars() -> Any:
    return pl.DataFrame(ROWS)


def in_duckdb() -> Any:
    text = "select * from (values (1::bigint, 'one'), (2, null), (3, $word)) t(id, word)"
    return duckdb.connect().sql(text, params={"word": ROWS["word"][2]})


def in_pandas() -> pd.DataFrame:
    return pd.DataFrame(ROWS)


def in_chunks() -> pa.ChunkedArray:
    batches = pa.table(ROWS).to_batches(max_chunksize=2)
    return pa.chunked_array([each.to_struct_array() for each in batches])


class Once:
    """One batch of a library that offers no stream."""

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        found: tuple[object, object] = pa.record_batch(ROWS).__arrow_c_array__(requested_schema)
        return found


class Source:
    """A stream of another library: it says in which threads it is used, and when it is released."""

    def __init__(self, batches: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        self.threads: set[int] = set()
        self.released = threading.Event()
        self._batches = batches
        self.opening: Callable[[], object] = lambda: None

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        self.threads.add(threading.get_ident())
        self.opening()
        reader = pa.RecordBatchReader.from_batches(pa.schema([("id", pa.int64())]), self._read())
        return reader.__arrow_c_stream__(requested_schema)

    def _read(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._batches():
                self.threads.add(threading.get_ident())
                yield batch
        finally:
            self.released.set()


def stops(began: threading.Event, may: threading.Event) -> Callable[[], object]:
    """What says that it has begun, and returns when it may."""

    def stop() -> None:
        began.set()
        assert may.wait(30)

    return stop


def numbers(count: int) -> Callable[[], Iterator[pa.RecordBatch]]:
    return lambda: (pa.record_batch({"id": [number]}) for number in range(count))


def endless() -> Iterator[pa.RecordBatch]:
    while True:
        yield pa.record_batch({"id": [7]})


FORMS: dict[str, Callable[[], Any]] = {
    "polars": in_polars,
    "duckdb": in_duckdb,
    "duckdb reader": lambda: in_duckdb().to_arrow_reader(),
    "pandas": in_pandas,
    "nanoarrow": lambda: nanoarrow.ArrayStream(pa.table(ROWS)),
    "nanoarrow array": lambda: nanoarrow.Array(pa.record_batch(ROWS).to_struct_array()),
    "table": lambda: pa.table(ROWS),
    "batch": lambda: pa.record_batch(ROWS),
    "reader": lambda: pa.table(ROWS).to_reader(),
    "chunks": in_chunks,
    "c array": Once,
    "list": lambda: [in_polars()[:2], in_polars()[2:]],
    "list of Tables": lambda: [pa.table(ROWS)],
}


def make_service() -> aqueduct.Service:
    service = aqueduct.Service("tables")
    service.handler("echo")(lambda batch: batch)

    @service.handler("count", kind="sink")
    def count(batches):
        return {"rows": sum(batch.num_rows for batch in batches)}

    @service.handler("polars")
    def polars(batch):
        return pl.from_arrow(batch)

    @service.handler("parts")
    async def parts(batches):
        async for batch in batches:
            frame: Any = pl.from_arrow(batch)
            yield pl.concat([frame, frame], rechunk=False)

    @service.handler("column")
    def column(batch):
        return pl.Series([1])

    return service


@pytest.fixture(scope="module")
def syncly() -> Iterator[SyncClient]:
    with sync_client(make_service(), "tcp") as client:
        yield client


@pytest.fixture
async def client():
    async with connected(make_service()) as client:
        yield client


def rows(table: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = table.to_pydict()
    return found


@pytest.mark.parametrize("form", FORMS)
async def test_any_table_goes_into_every_call_of_a_client(client: Client, form: str) -> None:
    made = FORMS[form]
    assert rows(await client.exchange("echo", made()).read_all()) == ROWS
    assert (await client.sink("count", made()))["rows"] == 3
    if not form.startswith("list"):
        assert rows(await client.call("echo", made())) == ROWS
        assert rows(await client.call_table("echo", made())) == ROWS


@pytest.mark.parametrize("form", FORMS)
def test_any_table_goes_into_every_call_of_a_sync_client(syncly: SyncClient, form: str) -> None:
    made = FORMS[form]
    assert rows(syncly.exchange("echo", made()).read_all()) == ROWS
    assert syncly.sink("count", made())["rows"] == 3
    if not form.startswith("list"):
        assert rows(syncly.call("echo", made())) == ROWS
        assert rows(syncly.call_table("echo", made())) == ROWS


async def test_answers_become_tables_of_each_library(client: Client) -> None:
    def asked() -> aqueduct.Stream:
        return client.exchange("echo", in_polars())

    assert rows(await asked().to_table()) == ROWS
    assert (await asked().to_polars()).equals(in_polars())
    found = await asked().to_pandas(types_mapper=pd.ArrowDtype)
    assert found["word"].dtype.pyarrow_dtype == pa.string_view()
    assert found["id"].tolist() == ROWS["id"]


def test_answers_of_a_sync_client_become_tables_of_each_library(syncly: SyncClient) -> None:
    def asked() -> aqueduct.SyncStream:
        return syncly.exchange("echo", in_polars())

    assert rows(asked().to_table()) == ROWS
    assert asked().to_polars().equals(in_polars())
    assert asked().to_pandas()["word"].tolist()[0] == "one"
    query = "select sum(id)::int, count(word) from answers"
    answers = asked()  # which DuckDB finds by its name
    queried: Any = duckdb.sql(query)
    assert queried.fetchall() == [(6, 2)], answers
    assert pl.DataFrame(asked()).equals(in_polars())
    assert rows(pa.table(asked())) == ROWS
    assert rows(nanoarrow_table(asked())) == ROWS


def nanoarrow_table(given: Any) -> pa.Table:
    return pa.table(nanoarrow.ArrayStream(given))


def test_a_sync_stream_is_read_lazily_and_knows_its_schema_first(syncly: SyncClient) -> None:
    source = Source(endless)
    with syncly.exchange("echo", source) as stream:
        reader = stream.to_reader()
        assert reader.schema == pa.schema([("id", pa.int64())])
        assert reader.read_next_batch()["id"].to_pylist() == [7]
        assert not stream.over
    assert source.released.wait(10)


async def test_an_async_stream_knows_its_schema_before_the_first_batch(client: Client) -> None:
    may = threading.Event()

    def later() -> Iterator[pa.RecordBatch]:
        may.wait(30)
        yield pa.record_batch({"id": [1]})

    async with client.exchange("echo", Source(later)) as stream:
        assert stream.schema is None
        assert (stream.number, stream.over, dict(stream.counters)) == (-1, False, {})
        assert stream.capabilities == frozenset()
        assert await stream.opened() == pa.schema([("id", pa.int64())])
        may.set()
        assert rows(await stream.read_all()) == {"id": [1]}


async def test_no_batches_are_a_table_without_rows(client: Client, syncly: SyncClient) -> None:
    assert (await client.exchange("echo", Source(numbers(0))).read_all()).num_rows == 0
    found = syncly.exchange("echo", Source(numbers(0))).to_polars()
    assert found.schema == {"id": pl.Int64}


async def test_an_async_stream_is_no_stream_of_arrow(client: Client) -> None:
    async with client.exchange("echo", in_polars()) as stream:
        with pytest.raises(LocalProtocolError, match=r"await stream.read_all\(\)"):
            pl.DataFrame(stream)


async def test_a_sink_has_no_table() -> None:
    async with connected(make_service()) as client:
        stream = client._stream("sink", "count", in_polars(), CallOptions())
        with pytest.raises(LocalProtocolError, match=r"Client\.sink"):
            await stream.read_all()


# ------------------------------------------------------------ no copy, and no loss


def address_of(series: pl.Series) -> int:
    """Of its values; what it exports is no copy of them."""
    first, second = (pa.chunked_array(series).chunk(0).buffers()[1].address for _ in range(2))
    assert first == second
    return int(first)


def addresses(batch: pa.RecordBatch) -> set[int]:
    return {each.address for column in batch.columns for each in column.buffers() if each}


def test_the_buffers_of_a_frame_are_those_that_leave() -> None:
    frame = pl.DataFrame({"id": range(10_000), "word": ["a word of many bytes"] * 10_000})
    address = address_of(frame["id"])
    source = Batches(frame, None, handler="echo", peer="", limit=1 << 30)
    (batch,) = source.batches
    assert batch["id"].buffers()[1].address == address
    sent = {
        pa.py_buffer(each).address for each in source.encode(batch).buffers if len(each) > 10_000
    }
    assert sent <= addresses(batch)
    assert address in sent


async def test_a_frame_of_the_answers_has_the_memory_in_which_they_came(client: Client) -> None:
    frame = pl.DataFrame({"id": range(10_000)})
    table = await client.exchange("echo", frame).read_all()
    (came,) = table["id"].chunks
    assert address_of(to_polars(table)["id"]) == came.buffers()[1].address


TYPES = {
    "text": ["a", "a text of more than twelve bytes", None],
    "bytes": [b"1", None, b"\x00\xff"],
    "category": pl.Series(["u", "v", "u"], dtype=pl.Categorical),
    "enum": pl.Series(["u", "v", None], dtype=pl.Enum(["u", "v"])),
    "list": [[1], [2, 3], None],
    "texts": [["a"], [], None],
    "struct": [{"a": 1, "b": "x"}, {"a": 2, "b": None}, None],
    "array": pl.Series([[1, 2], [3, 4], None], dtype=pl.Array(pl.Int32, 2)),
    "decimal": pl.Series([1, 2, None]).cast(pl.Decimal(10, 2)),
    "time": pl.Series([1, 2, None]).cast(pl.Datetime("us", "UTC")),
    "lasts": pl.Series([1, 2, None]).cast(pl.Duration("ms")),
    "nothing": pl.Series([None, None, None]),
}


async def test_types_of_polars_come_back_as_they_went(client: Client, syncly: SyncClient) -> None:
    frame = pl.DataFrame(TYPES)
    answers: tuple[Any, ...] = (
        await client.exchange("echo", frame).to_polars(),
        syncly.exchange("echo", frame).to_polars(),
        pl.from_arrow(await client.call("echo", frame)),
    )
    for found in answers:
        assert found.schema == frame.schema
        assert found.equals(frame)


DUCKDB_TYPES = """
    select 1::hugeint h, 'a text of more than twelve bytes' s, [1, 2] l, {'a': 1} st,
        map {'k': 1} m, 'a'::enum('a', 'b') e, uuid() u, interval 1 day iv,
        1.5::decimal(38, 2) d, now() ts, 1::utinyint ut, time '10:00' tm, '101'::blob bl,
        union_value(num := 2) un, [1, 2]::int[2] ar, '{}'::json j
"""


@pytest.mark.parametrize("views", [False, True])
async def test_types_of_duckdb_come_back_as_they_went(client: Client, views: bool) -> None:
    connection = duckdb.connect()
    if views:
        connection.execute("set arrow_output_version = '1.4'")
        connection.execute("set produce_arrow_string_view = true")
    wanted = connection.sql(DUCKDB_TYPES).to_arrow_table()
    found = await client.exchange("echo", wanted.to_reader()).read_all()
    assert found.schema.equals(wanted.schema, check_metadata=True)
    assert found.equals(wanted)
    assert pa.types.is_string_view(wanted.schema.field("s").type) == views


async def test_an_index_of_pandas_comes_back(client: Client) -> None:
    frame = in_pandas().set_index("id")
    found = await client.exchange("echo", frame).to_pandas()
    assert found.index.name == "id"
    assert found["word"].tolist()[0] == "one"


WANTED = pa.schema(
    [
        ("text", pa.string()),
        ("bytes", pa.large_binary()),
        ("list", pa.list_(pa.int64())),
        ("texts", pa.list_(pa.string())),
        ("struct", pa.struct([("a", pa.int64()), ("b", pa.string())])),
    ]
)


async def test_a_frame_takes_on_the_layout_that_is_asked_for(
    client: Client, syncly: SyncClient
) -> None:
    frame = pl.DataFrame({name: TYPES[name] for name in WANTED.names})
    given: tuple[Any, ...] = (frame, [frame], iter([frame]))
    for each in given:
        found = await client.exchange("echo", each, schema=WANTED).read_all()
        assert found.schema == WANTED
        assert rows(found) == frame.to_dict(as_series=False)
    assert syncly.exchange("echo", frame, schema=WANTED).read_all().schema == WANTED
    batch = pa.record_batch(found.to_batches()[0])
    made = await client.exchange("polars", batch).read_all()  # the handler's views, too
    assert made.schema == WANTED
    assert made == found
    other = pa.schema([WANTED.field(0).with_type(pa.int32()), *list(WANTED)[1:]])
    with pytest.raises(SchemaMismatch, match="'text'"):
        await client.exchange("echo", frame, schema=other).read_all()


async def test_one_batch_takes_on_the_schema_that_is_asked_for(
    client: Client, syncly: SyncClient
) -> None:
    frame = pl.DataFrame({name: TYPES[name] for name in WANTED.names})
    for found in (
        await client.call("echo", frame, schema=WANTED),
        await client.call_table("echo", frame, schema=WANTED),
        syncly.call("echo", frame, schema=WANTED),
        syncly.call_table("echo", frame, schema=WANTED, deadline=20),
    ):
        assert found.schema == WANTED
        assert found.to_pylist() == frame.to_dicts()
    noted = WANTED.with_metadata({"made": "by hand"})
    batch = pa.record_batch(found.to_batches()[0])
    assert (await client.call("echo", batch, schema=noted)).schema.metadata == noted.metadata
    other = pa.schema([WANTED.field(0).with_type(pa.int32()), *list(WANTED)[1:]])
    for given in (frame, batch):
        with pytest.raises(SchemaMismatch, match=r"input of handler 'echo'.*'text'"):
            await client.call("echo", given, schema=other)
        with pytest.raises(SchemaMismatch, match=r"input of handler 'echo'.*'text'"):
            syncly.call_table("echo", given, schema=other)
    large = pa.schema([WANTED.field(0).with_type(pa.large_string()), *list(WANTED)[1:]])
    with pytest.raises(SchemaMismatch):  # a batch of PyArrow is as its owner made it
        await client.call("echo", batch, schema=large)
    for wrong in ("text", {"text": "string"}):
        with pytest.raises(WrongType, match="schema"):
            await client.call("echo", frame, schema=wrong)
        with pytest.raises(WrongType, match="schema"):
            syncly.call("echo", batch, schema=wrong)


# ------------------------------------------------------- threads, and the end of streams


async def test_a_stream_is_opened_and_read_by_no_thread_of_the_loop(client: Client) -> None:
    began, may = threading.Event(), threading.Event()

    source = Source(numbers(5))
    source.opening = stops(began, may)
    stream = client.exchange("echo", source)
    await until(began.is_set)
    assert rows(await client.call("echo", in_polars())) == ROWS  # the loop is free
    may.set()
    assert rows(await stream.read_all()) == {"id": [0, 1, 2, 3, 4]}
    assert threading.get_ident() not in source.threads
    assert await asyncio.to_thread(source.released.wait, 10)


async def test_streams_that_block_do_not_hold_up_each_other(client: Client) -> None:
    may = threading.Event()

    def later() -> Iterator[pa.RecordBatch]:
        may.wait(30)
        yield pa.record_batch({"id": [1]})

    slow = [client.exchange("echo", Source(later)) for _ in range(8)]
    assert rows(await client.exchange("echo", Source(numbers(2))).read_all()) == {"id": [0, 1]}
    may.set()
    for stream in slow:
        assert rows(await stream.read_all()) == {"id": [1]}


async def test_a_stream_that_is_left_early_is_released(client: Client) -> None:
    connection = duckdb.connect()
    query = connection.sql("select range as id from range(100000000)")
    async with client.exchange("echo", query) as stream:
        await anext(stream)

    def is_free() -> bool:
        try:
            return bool(connection.sql("select 1").fetchall() == [(1,)])
        except duckdb.Error:  # a thread is just reading: it releases the query when it comes back
            return False

    await until(is_free)
    source = Source(endless)
    async with client.exchange("echo", source) as stream:
        await anext(stream)
    assert await asyncio.to_thread(source.released.wait, 10)


def test_a_query_that_a_sync_client_leaves_early_is_released(syncly: SyncClient) -> None:
    connection = duckdb.connect()
    with syncly.exchange("echo", connection.sql("select range x from range(100000000)")) as stream:
        next(stream)
    assert connection.sql("select 1").fetchall() == [(1,)]


async def test_a_stream_that_blocks_does_not_hold_up_who_closes_it(client: Client) -> None:
    began, may = threading.Event(), threading.Event()

    def blocks() -> Iterator[pa.RecordBatch]:
        began.set()
        assert may.wait(30)
        yield pa.record_batch({"id": [1]})

    source = Source(blocks)
    stream = client.exchange("echo", source)
    await until(began.is_set)
    await stream.aclose()
    assert not source.released.is_set()
    may.set()
    assert await asyncio.to_thread(source.released.wait, 10)  # by the thread, as it comes back


async def test_a_call_that_is_closed_before_its_input_is_open(client: Client) -> None:
    began, may = threading.Event(), threading.Event()
    source = Source(numbers(1))
    source.opening = stops(began, may)
    stream = client.exchange("echo", source)
    reader = asyncio.create_task(anext(stream))
    await until(began.is_set)
    await stream.aclose()
    assert stream.over
    for asked in (reader, anext(stream), stream.opened()):
        with pytest.raises(Cancelled, match="was closed here"):
            await asked
    may.set()
    await stream.aclose()


async def test_a_reader_that_is_cancelled_does_not_end_the_opening(client: Client) -> None:
    began, may = threading.Event(), threading.Event()
    source = Source(numbers(1))
    source.opening = stops(began, may)
    stream = client.exchange("echo", source)
    reader = asyncio.create_task(anext(stream))
    await until(began.is_set)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    may.set()
    assert rows(await stream.read_all()) == {"id": [0]}


async def test_the_deadline_counts_while_the_input_opens(client: Client) -> None:
    may = threading.Event()
    source = Source(numbers(1))
    source.opening = lambda: may.wait(30)
    try:
        stream = client.exchange("echo", source, deadline=0.05)
        with pytest.raises(DeadlineExceeded, match=r"'echo' at .* did not open within 0.05 s"):
            await stream.read_all()
    finally:
        may.set()


async def test_a_connection_that_is_closed_while_the_input_opens() -> None:
    began, may = threading.Event(), threading.Event()
    source = Source(numbers(1))
    source.opening = stops(began, may)
    async with serving(make_service()) as running:
        client = await Client.connect(running.addresses[0])
        stream = client.exchange("echo", source)
        await until(began.is_set)
        await client.close()
        may.set()
        with pytest.raises((ConnectionLost, LocalProtocolError), match="closed"):
            await stream.read_all()


# --------------------------------------------------- several addresses, and what is sent again


@pytest.mark.parametrize("form", ["polars", "duckdb", "pandas", "list", "list of Tables"])
async def test_any_table_goes_to_several_addresses(form: str) -> None:
    service = make_service()
    async with serving(service) as one, serving(service) as other:
        async with aqueduct.Client([*one.addresses, *other.addresses]) as client:
            assert rows(await client.exchange("echo", FORMS[form]()).read_all()) == ROWS
            assert (await client.sink("count", FORMS[form]()))["rows"] == 3
            answers = client.exchange("echo", FORMS[form]())
            assert rows(await client.exchange("echo", answers).read_all()) == ROWS


@pytest.mark.parametrize("form", ["polars", "duckdb", "list"])
def test_any_table_goes_to_several_addresses_of_a_sync_client(form: str) -> None:
    with sync_client(make_service(), "tcp", retries=1) as client:
        assert rows(client.exchange("echo", FORMS[form]()).read_all()) == ROWS
        assert client.sink("count", FORMS[form]())["rows"] == 3


async def test_a_stream_to_several_addresses_is_opened_by_no_thread_of_the_loop() -> None:
    began, may = threading.Event(), threading.Event()
    source = Source(numbers(5))
    source.opening = stops(began, may)
    async with connected(make_service(), retries=1) as client:
        stream = client.exchange("echo", source)
        await until(began.is_set)
        assert rows(await client.call("echo", in_polars())) == ROWS  # the loop is free
        may.set()
        assert rows(await stream.read_all()) == {"id": [0, 1, 2, 3, 4]}
    assert threading.get_ident() not in source.threads
    assert await asyncio.to_thread(source.released.wait, 10)


async def test_a_stream_to_several_addresses_that_is_closed_while_it_opens() -> None:
    may = threading.Event()
    source = Source(numbers(1))
    source.opening = lambda: may.wait(30)
    async with connected(make_service(), retries=1) as client:
        with pytest.raises(DeadlineExceeded, match=r"'echo' at .* did not open within 0.05 s"):
            await client.exchange("echo", source, deadline=0.05).read_all()
        stream = client.exchange("echo", source)
        reader = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        for asked in (reader, anext(stream)):
            with pytest.raises(Cancelled, match="was closed here"):
                await asked
        may.set()
        source = Source(endless)
        async with client.exchange("echo", source) as stream:
            await anext(stream)
        assert await asyncio.to_thread(source.released.wait, 10)
        with pytest.raises(ConfigError, match="compression"):
            client.exchange("echo", source, compression="none of these")
        with pytest.raises(duckdb.Error, match="nowhere"):
            query = duckdb.connect().sql("select error('nowhere') as x from range(1)")
            await client.exchange("echo", query).read_all()


def test_a_query_is_released_that_a_sync_client_sends_again_if_need_be() -> None:
    connection = duckdb.connect()
    with sync_client(make_service(), "tcp", retries=1) as client:
        query = connection.sql("select range x from range(100000000)")
        with client.exchange("echo", query) as stream:
            next(stream)
        assert connection.sql("select 1").fetchall() == [(1,)]


async def test_calls_follow_each_other(client: Client, syncly: SyncClient) -> None:
    once = client.exchange("echo", in_polars())
    assert rows(await client.exchange("echo", once).read_all()) == ROWS
    assert rows(await client.call_table("echo", await client.call("echo", in_polars()))) == ROWS

    def twice() -> dict[str, list[Any]]:
        return rows(syncly.exchange("echo", syncly.exchange("echo", in_polars())).read_all())

    assert await asyncio.to_thread(twice) == ROWS


async def test_an_error_of_the_first_call_is_that_of_the_second(client: Client) -> None:
    with pytest.raises(HandlerFailed, match="'column'"):
        await client.exchange("echo", client.exchange("column", in_polars())).read_all()


# ------------------------------------------------------------------ what handlers make


async def test_a_handler_answers_with_a_frame(client: Client, syncly: SyncClient) -> None:
    frame = in_polars()
    assert (await client.exchange("polars", frame).to_polars()).equals(frame)
    assert syncly.exchange("polars", frame).to_polars().equals(frame)
    assert rows(await client.call("polars", frame)) == ROWS
    twice = await client.exchange("parts", frame).read_all()
    assert twice.num_rows == 6
    assert len(twice["id"].chunks) == 1  # one answer for one batch


async def test_a_handler_that_answers_with_one_column(client: Client) -> None:
    with pytest.raises(HandlerFailed, match=r"the output of handler 'column': Series is one col"):
        await client.exchange("column", in_polars()).read_all()


# ------------------------------------------------------------------------------ errors


async def test_errors_of_a_query_are_its_own(client: Client, syncly: SyncClient) -> None:
    wrong = "select cast('a' || range as int) y from range(3)"
    with pytest.raises(duckdb.ConversionException, match="a0"):
        await client.exchange("echo", duckdb.connect().sql(wrong)).read_all()
    with pytest.raises(duckdb.ConversionException, match="a0"):
        syncly.exchange("echo", duckdb.connect().sql(wrong))
    with pytest.raises(duckdb.ConversionException, match="a0"):
        await client.call("echo", duckdb.connect().sql(wrong))


async def test_an_error_in_the_middle_says_where_it_was_raised(client: Client) -> None:
    def breaks() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"id": [1]})
        raise ValueError("the disk is gone")

    source = Source(breaks)
    with pytest.raises(pa.ArrowInvalid, match="the disk is gone") as caught:
        await client.exchange("echo", source).read_all()
    assert caught.value.__notes__ == ["It was raised as the input of handler 'echo' was read."]
    assert await asyncio.to_thread(source.released.wait, 10)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (pl.Series([1]), r"Series is one column, .* series\.to_frame\(\)"),
        (pa.chunked_array([[1]]), "the input of handler 'echo': ChunkedArray is one column"),
        (pa.array([1]), "is one column"),
        (pl.LazyFrame({"id": [1]}), r"got LazyFrame; give what its collect\(\) returns"),
        (duckdb.connect(), r"got DuckDBPyConnection; .* to_arrow_reader\(\) returns"),
        ([pl.LazyFrame({"id": [1]})], r"got LazyFrame in a list; give what its collect\(\) ret"),
    ],
    ids=["series", "chunks", "array", "lazy frame", "connection", "list"],
)
async def test_what_is_no_table_is_refused(
    client: Client, syncly: SyncClient, given: Any, text: str
) -> None:
    with pytest.raises(WrongType, match=text):
        await client.exchange("echo", given).read_all()
    with pytest.raises(WrongType, match=text):
        syncly.exchange("echo", given)


async def test_wrong_options_are_refused_before_anything_is_opened(client: Client) -> None:
    source = Source(numbers(1))
    with pytest.raises(LocalProtocolError, match="deadline"):
        client.exchange("echo", source, deadline=-1)
    assert not source.threads


async def test_other_columns_than_were_announced(client: Client) -> None:
    with pytest.raises(SchemaMismatch, match="the input of handler 'echo'"):
        await client.exchange("echo", in_polars(), schema=pa.schema([("no", pa.int8())])).read_all()


async def test_a_batch_of_a_stream_above_the_limit_is_named() -> None:
    limits = config(calls={"batch_limit": 100_000})
    async with connected(make_service(), client_config=limits) as client:
        frame = pl.DataFrame({"id": range(100_000)})
        with pytest.raises(BatchTooLarge, match=r"input of handler 'echo': .* of 100000 .*batch_l"):
            await client.exchange("echo", frame).read_all()


async def test_a_library_that_is_not_there(
    client: Client, syncly: SyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("polars", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
        text = rf"to_{name} needs the package {name} .*pip install 'aqueduct-arrow\[{name}\]'"
        for stream in (
            client.exchange("echo", [pa.record_batch(ROWS)]),
            syncly.exchange("echo", [pa.record_batch(ROWS)]),
        ):
            with pytest.raises(ConfigError, match=text):
                found = getattr(stream, f"to_{name}")()
                if isinstance(stream, aqueduct.Stream):
                    await found


def test_the_library_imports_no_other_library() -> None:
    program = (
        "import sys, aqueduct.client.client, aqueduct.client.sync_client, aqueduct.service.service;"
        "print([n for n in ('pandas', 'polars', 'duckdb', 'opentelemetry') if n in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"
