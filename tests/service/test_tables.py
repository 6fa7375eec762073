"""Tables of a service: what may be registered, how they are asked, what leaves of a split."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.config import Tables
from aqueduct.errors import (
    BadCall,
    Busy,
    ConfigError,
    HandlerFailed,
    Refused,
    SchemaMismatch,
    UnknownHandler,
)
from aqueduct.rpc.filters import Filter
from aqueduct.rpc.table_scan import (
    ANSWER,
    PLAN,
    QUESTION,
    READ,
    READING,
    Limit,
    ScanPlan,
    ScanRead,
    ScanRequest,
)
from tests.support.calls import config, connected, until

SCHEMA = pa.schema([("id", pa.int64()), ("word", pa.string()), ("x", pa.float64())])


def rows(start, end):
    numbers = range(start, end)
    columns = [list(numbers), [f"w{n}" for n in numbers], [n / 2 for n in numbers]]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)],
        schema=SCHEMA,
    )


@pytest.fixture
def service():
    return aqueduct.Service("test")


async def ask(client, table, question, **options):
    batch = await client.call(
        PLAN + table, question.encode(Tables()), output_schema=ANSWER, **options
    )
    return ScanPlan.decode(batch, Tables())


async def read(client, table, split=None, filters=(), *, expected=None, headers=None):
    reading = ScanRead(split, filters).encode()
    stream = client.source(
        READ + table, output_schema=expected, headers={**(headers or {}), READING: reading}
    )
    return [batch async for batch in stream]


class Log:
    """Entries that grow.

    More of the story.
    """

    schema = SCHEMA
    newest = 25

    def __init__(self):
        self.commits = []

    def read(self, split):
        yield rows(*split)

    def initial(self):
        return {"row": 0}

    def latest(self, start, limit):
        ends = [self.newest, limit.until and limit.until["row"]]
        ends.append(limit.rows and start["row"] + limit.rows)
        return {"row": min(end for end in ends if end is not None)}

    def between(self, start, end, request):
        step = request.partitions or 10
        return ([row, min(row + step, end["row"])] for row in range(start["row"], end["row"], step))

    def commit(self, end):
        self.commits.append(end)


class AsyncLog:
    schema = SCHEMA

    def __init__(self):
        self.log = Log()
        self.commits = self.log.commits

    async def read(self, split, request):
        yield rows(*split)

    async def initial(self):
        return {"row": 0}

    async def latest(self, start, limit):
        await asyncio.sleep(0)
        return self.log.latest(start, limit)

    async def between(self, start, end, request):
        return self.log.between(start, end, request)

    async def commit(self, end, request):
        self.log.commit(end)


# The simple form


@pytest.mark.parametrize("carrier", ["memory", "quic", "draft"])
async def test_a_generator_is_a_table_of_one_split(service, carrier):
    @service.table("words", schema=SCHEMA)
    def words():
        """All the words."""
        yield rows(0, 3)
        yield rows(3, 5)

    async with connected(service, carrier) as client:
        answer = await ask(
            client, "words", ScanRequest("plan", filters=(Filter("is_null", ("x",)),))
        )
        assert answer == ScanPlan(SCHEMA, False, ("no",), (None,))
        assert await read(client, "words") == [rows(0, 3), rows(3, 5)]
    assert words is not None


@pytest.mark.requirement("AC-72")
async def test_splits_are_read_one_by_one(service):
    @service.table("words", schema=SCHEMA, splits=[[0, 2], [2, 2], [2, 5]])
    async def words(split, request):
        if split[0] < split[1]:
            yield rows(*split)

    async with connected(service) as client:
        answer = await ask(client, "words", ScanRequest("plan"))
        assert answer.splits == ([0, 2], [2, 2], [2, 5])
        found = [await read(client, "words", split) for split in answer.splits]
        assert found == [[rows(0, 2)], [], [rows(2, 5)]]


async def test_splits_know_what_is_wanted(service):
    seen = []

    def splits(request):
        seen.append((request.table, request.columns, request.partitions, request.call.headers["k"]))
        return (n for n in range(request.partitions))

    @service.table("words", schema=SCHEMA, splits=splits)
    def words(split):
        yield rows(split, split + 1)

    async with connected(service) as client:
        question = ScanRequest("plan", columns=("x", "id"), partitions=3)
        answer = await ask(client, "words", question, headers={"k": "v"})
    assert answer.splits == (0, 1, 2)
    assert answer.schema == pa.schema([SCHEMA.field("x"), SCHEMA.field("id")])
    assert seen == [("words", ("x", "id"), 3, "v")]


@pytest.mark.requirement("AC-78")
async def test_only_the_columns_that_are_expected_leave(service):
    seen = []

    @service.table("words", schema=SCHEMA)
    def words(request):
        seen.append(request.columns)
        yield rows(0, 3)  # with all columns: the others are left out
        yield rows(3, 5).select(list(request.columns))

    async with connected(service) as client:
        for names in ([], ["x"], ["word", "id"]):
            expected = pa.schema([SCHEMA.field(name) for name in names])
            found = await read(client, "words", expected=expected)
            assert [batch.num_rows for batch in found] == [3, 2]
            assert [batch.schema for batch in found] == [expected] * 2
            assert names == [] or found[1] == rows(3, 5).select(names)
    assert seen == [(), ("x",), ("word", "id")]


async def test_a_column_that_the_table_has_not(service):
    service.table("words", schema=SCHEMA)(lambda: (yield rows(0, 1)))
    async with connected(service) as client:
        with pytest.raises(SchemaMismatch, match="has no column 'wort'; did you mean 'word'"):
            await ask(client, "words", ScanRequest("plan", columns=("wort",)))
        with pytest.raises(SchemaMismatch, match="column 'id' of table 'words' is wanted twice"):
            await ask(client, "words", ScanRequest("plan", columns=("id", "id")))
        expected = pa.schema([("id", pa.int64()), ("wort", pa.string())])
        with pytest.raises(SchemaMismatch, match="column 'wort' is missing"):
            await read(client, "words", expected=expected)
        with pytest.raises(SchemaMismatch, match="column 'id' has another type: wanted string"):
            await read(client, "words", expected=pa.schema([("id", pa.string())]))


async def test_a_schema_made_of_the_call(service):
    @service.table("any", schema=lambda call: pa.schema([(call.headers["name"], pa.int64())]))
    def any_name(request):
        yield pa.record_batch([pa.array([1])], names=list(request.columns))

    async with connected(service) as client:
        answer = await ask(client, "any", ScanRequest("schema"), headers={"name": "a"})
        assert answer.schema == pa.schema([("a", pa.int64())])
        (batch,) = await read(client, "any", headers={"name": "b"})
        assert batch.to_pydict() == {"b": [1]}


# Filters


async def test_filters_are_applied(service):
    seen = []

    @service.table("words", schema=SCHEMA, filters="applied")
    def words(request):
        seen.append((request.columns, [str(each) for each in request.filters]))
        yield rows(0, 10).select(list(request.columns))
        yield rows(10, 20)

    big = Filter("greater", ("id",), 7)
    even = Filter("in", ("word",), ("w8", "w12", "w2"))
    odd = Filter("equal", ("nothing",), 1)
    async with connected(service) as client:
        answer = await ask(
            client, "words", ScanRequest("plan", columns=("x",), filters=(big, odd, even))
        )
        assert answer.taken == ("yes", "no", "yes")
        assert answer.schema.names == ["x"]
        found = await read(client, "words", None, (big, even), expected=answer.schema)
        assert pa.Table.from_batches(found).to_pydict() == {"x": [4.0, 6.0]}
        with pytest.raises(BadCall, match="no one column 'nothing'"):
            await read(client, "words", None, (odd,))
    assert seen == [(("x", "id", "word"), ["id > 7", "word in ('w8', 'w12', 'w2')"])]


async def test_filters_are_applied_beside_views_and_runs(service):
    views = pa.array(["a", None, "b"], pa.string_view())
    batch = pa.record_batch(
        {
            "id": [1, 2, 3],
            "text": views,
            "list": pa.array([["a"], None, []], pa.list_(pa.binary_view())),
            "runs": pa.RunEndEncodedArray.from_arrays([1, 3], views.slice(1)),
        }
    )
    service.table("views", schema=batch.schema, filters="applied")(lambda: (yield batch))
    few = Filter("greater", ("id",), 2)
    async with connected(service) as client:
        answer = await ask(client, "views", ScanRequest("plan", filters=(few,)))
        assert answer.taken == ("yes",)
        (found,) = await read(client, "views", None, (few,), expected=answer.schema)
        assert found.to_pylist() == batch.slice(2).to_pylist()


async def test_a_table_chooses_its_filters(service):
    class Chooser:
        schema = SCHEMA

        def takes(self, filter):
            return {"equal": True, "less": "partly"}.get(filter.operation)

        def splits(self, request):
            return [[str(each) for each in request.filters]]

        def read(self, split, request):
            assert split == [str(each) for each in request.filters]
            yield rows(0, 2)

    service.table("words", Chooser())
    filters = tuple(Filter(name, ("id",), 1) for name in ("equal", "less", "greater"))
    async with connected(service) as client:
        answer = await ask(client, "words", ScanRequest("plan", filters=filters))
        assert answer.taken == ("yes", "partly", "no")
        assert answer.splits == (["id = 1", "id < 1"],)
        assert await read(client, "words", answer.splits[0], filters[:2]) == [rows(0, 2)]


# Streams


@pytest.mark.requirement("AC-76")
@pytest.mark.parametrize("kind", [Log, AsyncLog])
async def test_offsets(service, kind):
    log = kind()
    service.table("log", log)
    async with connected(service) as client:
        assert (await ask(client, "log", ScanRequest("schema"))).streams
        start = (await ask(client, "log", ScanRequest("initial"))).offset
        assert start == {"row": 0}
        limit = Limit(rows=7)
        end = (await ask(client, "log", ScanRequest("latest", start=start, limit=limit))).offset
        assert end == {"row": 7}
        assert (await ask(client, "log", ScanRequest("latest", start=end))).offset == {"row": 25}
        question = ScanRequest("latest", start=end, limit=Limit(until={"row": 9}))
        assert (await ask(client, "log", question)).offset == {"row": 9}
        question = ScanRequest("between", columns=("id",), start=start, end=end, partitions=5)
        answer = await ask(client, "log", question)
        assert answer.splits == ([0, 5], [5, 7])
        assert answer.schema.names == ["id"]
        assert await read(client, "log", answer.splits[1]) == [rows(5, 7)]
        await ask(client, "log", ScanRequest("commit", end=end))
        assert log.commits == [end]
        # Read as a table, it has what there is now.
        answer = await ask(client, "log", ScanRequest("plan"))
        assert answer.splits == ([0, 10], [10, 20], [20, 25])


@pytest.mark.requirement("AC-76")
async def test_a_table_without_offsets_is_no_stream(service):
    service.table("words", schema=SCHEMA)(lambda: (yield rows(0, 1)))
    service.table("log", Log())
    async with connected(service) as client:
        with pytest.raises(BadCall, match="'words' is no stream: it has no offsets, and was asked"):
            await ask(client, "words", ScanRequest("initial"))
        with pytest.raises(BadCall, match="asked 'latest' needs 'start', an offset"):
            await ask(client, "log", ScanRequest("latest"))
        with pytest.raises(BadCall, match="asked 'between' needs 'end', an offset"):
            await ask(client, "log", ScanRequest("between", start={}))


# What goes wrong


@pytest.mark.parametrize(
    ("splits", "error", "message"),
    [
        (lambda: 5, HandlerFailed, "splits of table 'words' gave a int; splits are a list of JSON"),
        (lambda: "abc", HandlerFailed, "splits of table 'words' gave a str; splits are a list"),
        (lambda: [1, {2}], BadCall, "splits of table 'words': split 1 has no form in JSON"),
        (
            lambda: ["x" * 30],
            BadCall,
            "split 0 has 32 bytes of JSON, above the limit of 20 (Tables",
        ),
        (lambda: range(9), BadCall, "more splits than the limit of 5 (Tables.splits)"),
        (lambda: [1 / 0], HandlerFailed, "division by zero"),
    ],
)
async def test_splits_that_are_none(splits, error, message):
    service = aqueduct.Service("test", config=config(tables={"splits": 5, "split_bytes": 20}))
    service.table("words", schema=SCHEMA, splits=splits)(lambda split: (yield rows(0, 1)))
    async with connected(service) as client:
        with pytest.raises(error, match=re.escape(message)):
            await ask(client, "words", ScanRequest("plan"))


async def test_other_results_that_are_none(service):
    class Wrong(Log):
        def initial(self):
            return 5

        def latest(self, start, limit):
            return {"row": {1}}

        def takes(self, filter):
            return "perhaps"

        def read(self, split):
            yield [1]

    service.table("log", Wrong())
    service.table("any", schema=lambda call: 5)(lambda: (yield rows(0, 1)))
    async with connected(service) as client:
        with pytest.raises(BadCall, match="offset of initial of table 'log' is a dict, not int"):
            await ask(client, "log", ScanRequest("initial"))
        with pytest.raises(BadCall, match="offset of latest of table 'log' has no form in JSON"):
            await ask(client, "log", ScanRequest("latest", start={}))
        question = ScanRequest("plan", filters=(Filter("is_null", ("x",)),))
        with pytest.raises(
            HandlerFailed, match="takes of table 'log' gave 'perhaps' for x is null"
        ):
            await ask(client, "log", question)
        with pytest.raises(
            HandlerFailed, match="read of table 'log' yielded a list, not a pyarrow"
        ):
            await read(client, "log")
        with pytest.raises(HandlerFailed, match="schema of table 'any' gave a int"):
            await ask(client, "any", ScanRequest("schema"))
        with pytest.raises(BadCall, match="the call has no 'aqueduct-read' in its metadata"):
            [batch async for batch in client.source(READ + "log")]


@pytest.mark.requirement("AC-73")
async def test_a_hostile_question_is_a_bad_call_and_the_service_lives(service):
    service.table("words", schema=SCHEMA)(lambda: (yield rows(0, 1)))
    async with connected(service) as client:
        for text in ("", "[", json.dumps({"version": 1}), "[" * 100_000, "x" * (2 << 20)):
            batch = pa.RecordBatch.from_arrays([pa.array([text])], schema=QUESTION)
            with pytest.raises(BadCall):
                await client.call(PLAN + "words", batch, output_schema=ANSWER)
        for text in ("", "[", json.dumps({"version": 9}), '{"version":1,"filters":[{"op":{}}]}'):
            with pytest.raises(BadCall):
                [b async for b in client.source(READ + "words", headers={READING: text})]
        assert (await ask(client, "words", ScanRequest("schema"))).schema == SCHEMA


async def test_a_reader_that_is_left_is_told(service):
    ended = []

    @service.table("words", schema=SCHEMA)
    async def words(request):
        try:
            while True:
                yield rows(0, 100)
        finally:
            ended.append(request.call.cancelled)

    async with connected(service) as client:
        stream = client.source(READ + "words", headers={READING: ScanRead().encode()})
        async with contextlib.aclosing(stream):
            assert (await anext(aiter(stream))).num_rows == 100
        await until(lambda: ended == [True])


async def test_limits_and_leave_are_those_of_calls():
    gate = asyncio.Event()

    def authorize(call):
        if call.handler.startswith(READ) and call.token != "open":
            raise Refused(f"{call.handler} wants a token")

    service = aqueduct.Service("test", authorize=authorize)

    @service.table("words", schema=SCHEMA, max_calls=1)
    async def words():
        yield rows(0, 1)
        await gate.wait()

    async with connected(service) as client:
        with pytest.raises(Refused, match=r"aqueduct\.table\.read\.words wants a token"):
            await read(client, "words")
        options: dict[str, Any] = {"headers": {READING: ScanRead().encode()}, "token": "open"}
        async with contextlib.aclosing(client.source(READ + "words", **options)) as first:
            await anext(aiter(first))
            with pytest.raises(Busy, match="has 1 calls open, which is its limit"):
                [batch async for batch in client.source(READ + "words", **options)]
        gate.set()


async def test_splits_wait_for_their_turn():
    gate, reading, most = asyncio.Event(), 0, 0
    service = aqueduct.Service("test")

    @service.table("words", schema=SCHEMA, splits=range(6), max_concurrency=2, queue=3)
    async def words(split):
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await gate.wait()
        reading -= 1
        yield rows(split, split + 1)

    async def split(number):
        options: dict[str, Any] = {"headers": {READING: ScanRead(number).encode()}}
        return [batch async for batch in client.source(READ + "words", **options)]

    async with connected(service) as client:
        calls = [asyncio.create_task(split(number)) for number in range(5)]
        await until(lambda: service.counters()["waiting_calls"] == 3)
        with pytest.raises(Busy, match=r"2 calls running.*max_concurrency.*3 calls waiting"):
            await split(5)
        await ask(client, "words", ScanRequest("schema"))  # a question does not wait
        gate.set()
        found = await asyncio.gather(*calls)
    assert [batch["id"].to_pylist() for (batch,) in found] == [[0], [1], [2], [3], [4]]
    assert most == 2


@pytest.mark.requirement("AC-71")
async def test_tables_are_described(service):
    service.table("log", Log())
    service.table("any", schema=lambda call: SCHEMA, description="Anything.")(lambda: (yield))
    async with connected(service) as client:
        description = await client.describe()
        log, other = description.tables
        assert (log.name, log.schema, log.streams, log.summary) == (
            "log",
            SCHEMA,
            True,
            "Entries that grow.",
        )
        assert (other.name, other.schema, other.streams, other.summary) == (
            "any",
            None,
            False,
            "Anything.",
        )
        assert description.handlers == ()
        with pytest.raises(UnknownHandler, match=r"did you mean 'aqueduct\.table\.plan\.log'"):
            await ask(client, "logs", ScanRequest("schema"))


# Registration


def generator(split, request):
    yield rows(0, 1)


def stream(**changes):
    log = Log()
    for name, value in changes.items():
        setattr(log, name, value)
    return log


async def coroutine(request):
    return {}


@pytest.mark.requirement("AC-72")
@pytest.mark.parametrize(
    ("name", "table", "options", "message"),
    [
        ("", generator, {}, "a table's name is ''; it must be printable text of 1 to 200 bytes"),
        ("a\n", generator, {}, "a table's name is 'a\\n'; it must be printable text"),
        ("é" * 101, generator, {}, "it must be printable text of 1 to 200 bytes"),
        (5, generator, {}, "a table's name is 5;"),
        ("t", generator, {"schema": None}, "table 't': schema must be a pyarrow.Schema or a func"),
        ("t", generator, {"schema": [("a", "b")]}, "or a function of the Call that makes one, not"),
        (
            "t",
            generator,
            {"schema": pa.schema([("a", pa.int8()), ("a", pa.int8())])},
            "table 't': the column 'a' has no name of its own",
        ),
        ("t", generator, {"schema": pa.schema([("", pa.int8())])}, "the column '' has no name of"),
        ("t", generator, {"splits": 5}, "table 't': splits gave a int; splits are a list of JSON"),
        ("t", generator, {"splits": [{1}]}, "table 't': splits: split 0 has no form in JSON"),
        (
            "t",
            generator,
            {"filters": "all"},
            "filters is 'all'; it must be 'applied' or a function",
        ),
        (
            "t",
            lambda: [rows(0, 1)],
            {},
            "read must be written as generator or async generator, not",
        ),
        ("t", Log, {}, "table 't': give an object, Log(...), not its class"),
        ("t", object(), {}, "it has no method read, a generator of the batches of a split"),
        ("t", stream(initial=5), {}, "table 't': initial must be a function, not int"),
        (
            "t",
            stream(initial=coroutine),
            {},
            "are coroutine functions, or none: initial is a corou",
        ),
        ("t", stream(latest=lambda start: {}), {}, "latest is called with (start, limit, request)"),
        ("t", stream(commit=lambda: None), {}, "commit is called with (end, request), where reque"),
        ("t", lambda a, b, c: (yield), {}, "read is called with (request), where request may be"),
        ("t", lambda a, b, c: (yield), {"splits": []}, "read is called with (split, request), wh"),
        ("t", generator, {"splits": [], "max_calls": 0}, "max_calls is 0; it must be 1 or more"),
    ],
)
def test_what_cannot_be_registered(service, name, table, options, message):
    with pytest.raises(ConfigError) as caught:
        service.table(name, table, **{"schema": SCHEMA, **options})
    assert message in str(caught.value)
    assert [name for name in service.handlers if name != "aqueduct.describe"] == []


def test_a_stream_is_whole():
    class Half:
        schema = SCHEMA

        def read(self, split):
            yield rows(0, 1)

        def initial(self):
            return {}

    with pytest.raises(ConfigError, match="a stream has initial, latest, between; latest is miss"):
        aqueduct.Service("test").table("half", Half())

    class Commits:
        schema = SCHEMA

        def read(self, split):
            yield rows(0, 1)

        def commit(self, end):
            pass

    with pytest.raises(ConfigError, match="a stream has initial, latest, between; initial is mis"):
        aqueduct.Service("test").table("commits", Commits())


def test_one_table_of_a_name(service):
    service.table("words", Log())
    with pytest.raises(ConfigError, match="the service 'test' has a table 'words' already"):
        service.table("words", Log())
    with pytest.raises(ConfigError, match=r"names that begin with 'aqueduct\.' are the library's"):
        service.handler("aqueduct.table.plan.more")(lambda batch: batch)


async def test_an_object_of_one_split(service):
    class Words:
        schema = SCHEMA

        def read(self, split):
            assert split is None
            yield rows(0, 1)

    service.table("words", Words())
    async with connected(service) as client:
        assert (await ask(client, "words", ScanRequest("plan"))).splits == (None,)
        assert await read(client, "words") == [rows(0, 1)]


@pytest.mark.parametrize(
    "function",
    [
        lambda: (yield rows(0, 1)),
        lambda request: (yield rows(0, 1)),
        lambda request=None: (yield rows(0, 1)),
        lambda number=5: (yield rows(0, number // 5)),
        lambda *arguments: (yield rows(0, len(arguments))),
    ],
)
async def test_ways_to_write_a_table_of_one_split(service, function):
    service.table("words", schema=SCHEMA)(function)
    async with connected(service) as client:
        assert await read(client, "words") == [rows(0, 1)]
