"""Requests of ReactiveSocket answered by handlers: each interaction, and what cannot be mapped."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import weakref

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.errors import Busy, ConfigError, ConnectFailed, ReactiveError, Refused
from aqueduct.reactivesocket import connect
from aqueduct.service.reactive_call import ReactiveCall
from tests.reactivesocket.pairs import TLS, frame, frames, within
from tests.service.reactive_clients import (
    TCP,
    WORDS,
    asked,
    asking,
    batches_of,
    by_hand,
    headers,
    ipc,
    rows_of,
    words,
)
from tests.support.calls import config, until
from tests.support.selection import mostly_long


@pytest.fixture
def service():
    service = aqueduct.Service("words")
    service.sunk = []  # type: ignore[attr-defined]

    @service.handler("upper", input=WORDS)
    async def upper(batch):
        return words(*(word.upper() for word in batch["word"].to_pylist()))

    @service.handler("thread", input=WORDS)
    def thread(batch):
        return batch

    @service.handler("twice", input=WORDS)
    async def twice(batches):
        async for batch in batches:
            yield batch
            yield batch

    @service.handler("count", kind="source", output=WORDS)
    async def count(call):
        for number in range(int(call.headers.get("to", "3"))):
            yield words(str(number))

    @service.handler("plain", kind="source", output=WORDS)
    def plain():
        yield from map(words, "ab")

    @service.handler("keep", kind="sink", input=WORDS)
    async def keep(batches):
        async for batch in batches:
            service.sunk.append(  # type: ignore[attr-defined]
                batch["word"].to_pylist()
            )

    @service.handler("lose", kind="sink", input=WORDS)
    def lose(batches):
        raise ValueError("lost them")

    return service


@pytest.mark.parametrize("handler", ["upper", "thread"])
async def test_a_function_of_one_batch_completes_with_one_item(service, handler):
    async with asking(service) as (running, client):
        item = await client.request(asked(handler, words("A", "B")))
        assert rows_of(item.data) == [["A", "B"]]
        await until(lambda: not running.calls)
        counted = running.counters()
        assert (counted["calls"], counted["rows_in"], counted["rows_out"]) == (1, 2, 2)
        assert (counted["connections"], counted["open_connections"]) == (1, 1)
        (state,) = running.state()["connections"]
        assert state["carrier"] == "reactivesocket"
        assert json.dumps(running.state())
        assert [connection.peer for connection in running.connections] == [state["peer"]]
        assert running.memory()["connections"] >= 1


@pytest.mark.parametrize(
    ("handler", "rows"), [("count", [["0"], ["1"], ["2"]]), ("plain", ["a", "b"])]
)
async def test_a_source_is_a_stream_of_its_batches(service, handler, rows):
    async with asking(service) as (_, client):
        async with client.stream(asked(handler), n=2) as stream:
            assert await batches_of(stream) == [list(row) for row in rows]


@pytest.mark.parametrize(
    ("handler", "rows"), [("upper", [["A"]]), ("thread", [["a"]]), ("twice", [["a"], ["a"]])]
)
async def test_an_exchange_of_one_batch_is_a_stream_of_its_answers(service, handler, rows):
    async with asking(service) as (_, client):
        async with client.stream(asked(handler, words("a")), n=8) as stream:
            assert await batches_of(stream) == rows


@pytest.mark.parametrize("read", ["generator", "async generator", "mixed"])
async def test_a_table_is_a_stream_of_all_its_splits(service, read):
    if read == "generator":

        @service.table("log", schema=WORDS, splits=["a", "b"])
        def log(split):
            yield words(split)
    elif read == "async generator":

        @service.table("log", schema=WORDS, splits=lambda: ["a", "b"])
        async def log(split):
            yield words(split)
    else:

        @service.table("log")
        class Log:
            schema = WORDS

            async def splits(self, request):
                return ["a", "b"]

            def read(self, split, request):
                yield words(split)

    async with asking(service) as (_, client):
        async with client.stream(asked("log"), n=8) as stream:
            assert await batches_of(stream) == [["a"], ["b"]]


async def test_items_together_are_a_stream_with_the_dictionaries_that_they_need():
    kind = pa.dictionary(pa.int8(), pa.string())
    service = aqueduct.Service("coded")

    @service.handler("codes", kind="source", output=pa.schema([("c", kind)]))
    def codes():
        for values in (["a", "b"], ["c"], ["c", "d"]):
            yield pa.record_batch({"c": pa.array(values).dictionary_encode().cast(kind)})

    async with asking(service) as (_, client):
        async with client.stream(asked("codes"), n=8) as stream:
            items = [bytes(item.data) async for item in stream]
    assert rows_of(*items) == [["a", "b"], ["c"], ["c", "d"]]


async def test_a_subscription_ends_with_an_error_that_says_so(service):
    async with asking(service) as (running, client):
        found = []
        with pytest.raises(ReactiveError, match=r"ended: handler 'count' has no more, .*RS-17"):
            async with client.subscribe(asked("count", arguments='{"to":"2"}'), n=8) as stream:
                while (item := await stream.receive()) is not None:
                    found.append(bytes(item.data))
        assert rows_of(*found) == [["0"], ["1"]]
        await until(lambda: not running.calls)
        assert running.counters()["failed"] == 0


async def test_what_is_fired_reaches_a_sink_and_its_errors_the_log(service, caplog):
    caplog.set_level(logging.INFO)
    async with asking(service) as (running, client):
        await client.fire(asked("keep", words("a", "b")))
        await until(lambda: service.sunk == [["a", "b"]])
        assert running.counters()["unreported"] == 0
        await client.fire(asked("lose", words("a")))
        await until(lambda: running.counters()["unreported"] == 1)
        assert "raised ValueError: lost them" in caplog.text
        await client.fire(asked("upper", words("a")))
        await client.fire(b"no call")
        await until(lambda: running.counters()["unreported"] == 3)
        assert "asked by REQUEST_FNF with a body: it takes a batch that is to be answered" in (
            caplog.text
        )
        assert running.counters()["failed"] == 1
        assert running.counters()["refused"] == 2


UNMAPPED = [
    ("request", asked("count", words("a")), "is a source, .* REQUEST_STREAM or REQUEST_SUB"),
    ("request", asked("twice", words("a")), "is no function of one batch, .* by REQUEST_STREAM"),
    ("request", asked("keep", words("a")), "is a sink, .*REQUEST_FNF; .* address of aqueduct"),
    ("request", asked("upper"), "the request has no body, and a batch is wanted there"),
    ("request", headers(handler="upper") + ipc(words())[:-8][:64], "the schema of the body has"),
    ("request", asked("uper", words("a")), "unknown-handler: .* did you mean 'upper'"),
    ("request", asked("upper", pa.record_batch({"n": [1]})), "schema-mismatch: .*'word'"),
    ("request", b"", "INVALID: bad-call: the headers cannot be read"),
    ("request", headers(handler="upper") + b"[]", "bad-call: the body is no Arrow IPC stream"),
    ("stream", asked("upper"), "is an exchange, .*REQUEST_STREAM without a body"),
    ("stream", asked("count", words("a")), "is a source, .* without a body"),
    ("subscribe", asked("upper", words("a")), "by REQUEST_SUB with a body"),
    ("stream", asked("aqueduct.sink.write.store", words("a")), "no handler"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "data", "says"), UNMAPPED, ids=[each[2][:40] for each in UNMAPPED]
)
async def test_what_cannot_be_mapped_is_an_error_that_says_how(service, kind, data, says):
    async with asking(service) as (running, client):
        with pytest.raises(ReactiveError, match=says):
            if kind == "request":
                await client.request(data)
            else:
                async with getattr(client, kind)(data) as stream:
                    await within(stream.receive())
        await until(lambda: not running.calls)
        assert running.counters()["refused"] == 1
        assert rows_of((await client.request(asked("upper", words("a")))).data) == [["A"]]


@pytest.mark.parametrize(
    ("kind", "body"),
    [("request", [words("a")]), ("stream", [words("a")]), ("subscribe", [])],
    ids=["request", "stream with a body", "subscription"],
)
async def test_a_table_is_asked_by_a_stream_without_a_body_alone(service, kind, body):
    @service.table("log", schema=WORDS)
    def log():
        yield words("a")

    says = "unknown-handler: 'log' is a table: ask it by REQUEST_STREAM without a body"
    async with asking(service) as (_, client):
        with pytest.raises(ReactiveError, match=says):
            if kind == "request":
                await client.request(asked("log", *body))
            else:
                async with getattr(client, kind)(asked("log", *body)) as stream:
                    await within(stream.receive())


async def test_what_writes_exactly_once_is_for_other_addresses(service):
    class Shelf:
        def open(self, attempt, call):
            raise AssertionError

        def commit(self, write_key, prepared): ...

        def abort(self, write_key, prepared): ...

    service.sink("store", Shelf(), schema=WORDS)
    async with asking(service) as (_, client):
        with pytest.raises(ReactiveError, match=r"exactly once .*aqueduct\+tcp:// takes it"):
            async with client.stream(asked("aqueduct.sink.write.store", words("a"))) as stream:
                await stream.receive()


async def test_more_than_one_batch_is_an_error(service):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, WORDS) as writer:
        writer.write_batch(words("a"))
        writer.write_batch(words("b"))
    async with asking(service) as (_, client):
        with pytest.raises(ReactiveError, match=r"bad-call: .*follow the record batch"):
            await client.request(headers(handler="upper") + sink.getvalue().to_pybytes())
        with pytest.raises(ReactiveError, match=r"bad-call: the body has a schema and no batch"):
            await client.request(headers(handler="upper") + WORDS.serialize().to_pybytes())


async def test_an_error_of_the_handler_is_told_and_logged(service, caplog):
    @service.handler("bad", input=WORDS)
    async def bad(batch):
        raise KeyError("it")

    async with asking(service) as (running, client):
        with pytest.raises(
            ReactiveError, match=r"APPLICATION_ERROR: handler-failed: raised KeyErr"
        ):
            await client.request(asked("bad", words("a")))
        await until(lambda: running.counters()["failed"] == 1)
        assert "bad" in caplog.text


async def test_an_answer_above_the_limit_of_an_item_names_the_limit():
    settings = config(reactivesocket={"item_bytes": 1000, "frame_bytes": 700})
    service = aqueduct.Service("large", config=settings)

    @service.handler("large", input=WORDS)
    async def large(batch):
        return words("x" * int(batch["word"][0].as_py()))

    async with asking(service) as (_, client):
        item = await client.request(asked("large", words("500")))  # in fragments
        assert rows_of(item.data) == [["x" * 500]]
        with pytest.raises(ReactiveError, match=r"batch-too-large: .* limit of 1000 .*item_bytes"):
            await client.request(asked("large", words("5000")))


async def test_authorize_sees_token_arguments_peer_and_deadline():
    seen = []

    def decide(call):
        seen.append((call.handler, call.token, dict(call.headers), call.write_key, call.attempt))
        assert call.peer.startswith("127.0.0.1:")
        return call.token == "open"

    service = aqueduct.Service("closed", authorize=decide)
    service.handler("echo", input=WORDS)(lambda batch: batch)
    setup = headers(token="open")
    async with asking(service, setup=setup) as (_, client):
        await client.request(
            asked("echo", words("a"), arguments='{"k":"v"}', write_key="w", attempt="2")
        )
        assert seen == [("echo", "open", {"k": "v"}, "w", "2")]
        with pytest.raises(ReactiveError, match=r"REJECTED: refused: the service does not allow"):
            await client.request(asked("echo", words("a"), token="wrong"))
        assert seen[1][1] == "wrong"


@pytest.mark.parametrize("denied", ["plan", "read", None])
async def test_authorize_is_asked_for_the_plan_and_the_reading_of_a_table(denied):
    seen = []

    def decide(call):
        seen.append((call.handler, call.token))
        return call.handler != f"aqueduct.table.{denied}.log"

    service = aqueduct.Service("closed", authorize=decide)

    @service.table("log", schema=WORDS)
    def log():
        yield words("a")

    async with service.serving(TCP, "aqueduct+tcp://127.0.0.1:0", drain=0) as running:
        (own,) = (each for each in running.addresses if each.startswith("aqueduct"))
        (other,) = (each for each in running.addresses if each.startswith("reactive"))
        async with await connect(other) as reactive, await aqueduct.Client.connect(own) as client:
            rows = client.source("aqueduct.table.rows.log")
            stream = reactive.stream(asked("log", token="t"))
            if denied is None:
                assert await batches_of(stream) == [["a"]]
                assert [batch.to_pydict() async for batch in rows] == [{"word": ["a"]}]
                told = [name.split(".")[2] for name, token in seen if token]
                assert told == ["plan", "read"]
                return
            with pytest.raises(ReactiveError, match="REJECTED: refused: the service does not"):
                await batches_of(stream)
            with pytest.raises(Refused, match="does not allow"):
                assert [batch async for batch in rows]


async def test_a_call_that_began_is_not_said_to_be_rejected():
    service = aqueduct.Service("full")

    @service.handler("half", kind="source", output=WORDS)
    async def half():
        yield words("a")
        raise Busy("no room for the rest")

    @service.handler("one", input=WORDS, max_calls=1)
    async def one(batch):
        await asyncio.sleep(20)

    async with asking(service) as (running, client):
        stream = client.stream(asked("half"), n=4)
        await stream.receive()
        with pytest.raises(ReactiveError, match=r"CANCELED: busy: .*no room for the rest"):
            await stream.receive()
        waiting = asyncio.ensure_future(client.request(asked("one", words("a"))))
        await until(lambda: running.calls)
        with pytest.raises(ReactiveError, match=r"REJECTED: busy: .*handler 'one' has 1 calls"):
            await client.request(asked("one", words("a")))
        waiting.cancel()


async def test_requests_wait_for_their_turn_and_rows_of_several_run_together():
    service, held, runs = aqueduct.Service("turns"), asyncio.Event(), []

    @service.handler("model", input=WORDS, batch=aqueduct.Batching(), queue=3)
    async def model(batch):
        runs.append(batch["word"].to_pylist())
        await held.wait()
        return batch

    @service.handler("names", kind="source", output=WORDS, max_concurrency=1)
    async def names():
        await held.wait()
        yield words("a")

    async with asking(service) as (running, client):
        first = asyncio.ensure_future(client.request(asked("model", words("a"))))
        await until(lambda: runs)
        others = [
            asyncio.ensure_future(client.request(asked("model", words(word)))) for word in "bc"
        ]
        text = asked("model", format="json") + json.dumps([{"word": "d"}]).encode()
        plain = asyncio.ensure_future(client.request(text))
        await until(lambda: running.counters()["waiting_calls"] == 3)
        with pytest.raises(ReactiveError, match=r"busy: .*3 calls waiting"):
            await client.request(asked("model", words("e")))
        streams = [
            asyncio.ensure_future(batches_of(client.stream(asked("names"), n=4))) for _ in range(3)
        ]
        await until(lambda: running.counters()["waiting_calls"] == 5)
        held.set()
        for future, word in zip((first, *others), "abc", strict=True):
            assert rows_of((await future).data) == [[word]]
        assert json.loads(bytes((await plain).data)) == [{"word": "d"}]
        for stream in streams:
            assert await stream == [["a"]]
    assert runs == [["a"], ["b", "c", "d"]]


async def test_a_setup_that_cannot_be_read_is_rejected(service):
    async with service.serving(TCP, drain=0) as running:
        client = await connect(running.addresses[0], setup=headers(format="xml"))
        with pytest.raises(ConnectFailed, match=r"the format is b'xml'; there are arrow and json"):
            await client.request(asked("upper", words("a")))
        await client.close()
        assert running.counters()["connections"] == 0


async def test_the_deadline_is_that_of_the_call():
    service = aqueduct.Service("slow")
    ended = []

    @service.handler("wait", input=WORDS)
    async def wait(batch, call):
        assert 0 < call.deadline <= 0.05
        call.on_cancel(lambda: ended.append(call.reason))
        await asyncio.sleep(20)

    async with asking(service) as (_, client):
        with pytest.raises(
            ReactiveError, match=r"deadline-exceeded: .* within the deadline of 0.05"
        ):
            await client.request(asked("wait", words("a"), deadline="50"))
        await until(lambda: ended)


@pytest.mark.parametrize("kind", ["request", "stream", "subscribe"])
async def test_a_handler_sees_that_the_client_cancelled(kind):
    service = aqueduct.Service("slow")
    calls, over = [], []

    @service.handler("wait", input=WORDS)
    async def wait(batch, call):
        calls.append(call)
        try:
            await asyncio.sleep(20)
        finally:
            over.append(call.cancelled)

    @service.handler("ever", kind="source", output=WORDS)
    async def ever(call):
        calls.append(call)
        try:
            yield words("a")
            await asyncio.sleep(20)
        finally:
            over.append(call.cancelled)

    async with asking(service) as (running, client):
        if kind == "request":
            task = asyncio.ensure_future(client.request(asked("wait", words("a"))))
            await until(lambda: calls)
            task.cancel()
        else:
            async with getattr(client, kind)(asked("ever"), n=2) as stream:
                await stream.receive()
        await until(lambda: over == [True])
        assert str(calls[0].reason) == "the client abandoned the call"
        await until(lambda: not running.calls)
        assert running.counters()["cancelled"] == 1


async def test_a_handler_sees_that_the_connection_is_lost(service):
    over = []

    @service.handler("ever", kind="source", output=WORDS)
    async def ever(call):
        try:
            yield words("a")
            await asyncio.sleep(20)
        finally:
            over.append(call.reason)

    async with asking(service) as (running, client):
        stream = client.stream(asked("ever"), n=2)
        await stream.receive()
        await client.close()
        await until(lambda: over)
        await until(lambda: not running.connections)
        assert running.counters()["cancelled"] == 1


async def test_limits_of_calls_hold_for_requests():
    service = aqueduct.Service("small", config=config(calls={"max_calls_connection": 2}))
    free = asyncio.Event()

    @service.handler("wait", input=WORDS)
    async def wait(batch):
        await free.wait()
        return batch

    async with asking(service) as (running, client):
        waiting = [asyncio.ensure_future(client.request(asked("wait", words("a")))) for _ in "ab"]
        await until(lambda: len(running.calls) == 2)
        with pytest.raises(
            ReactiveError, match=r"REJECTED: busy: 2 calls are open on this connect"
        ):
            await client.request(asked("wait", words("a")))
        free.set()
        for item in await asyncio.gather(*waiting):
            assert rows_of(item.data) == [["a"]]


async def test_a_drain_lets_calls_end_and_ends_subscriptions_at_once():
    service = aqueduct.Service("ending")
    free = asyncio.Event()

    @service.handler("wait", input=WORDS)
    async def wait(batch):
        await free.wait()
        return batch

    @service.handler("ever", kind="source", output=WORDS)
    async def ever():
        while True:
            yield words("a")
            await asyncio.sleep(0.01)

    async with service.serving(TCP) as running:
        client = await connect(running.addresses[0])
        waiting = asyncio.ensure_future(client.request(asked("wait", words("a"))))
        subscribed = client.subscribe(asked("ever"), n=4)
        await subscribed.receive()
        await until(lambda: len(running.calls) == 2)
        closing = asyncio.ensure_future(running.close(drain=20))
        with pytest.raises(
            ReactiveError, match=r"CANCELED: draining: the service 'ending' is ending"
        ):
            while await within(subscribed.receive()) is not None:
                pass
        with pytest.raises(ReactiveError, match=r"REJECTED: draining: .* is ending"):
            await client.request(asked("wait", words("a")))
        assert not waiting.done()
        free.set()
        assert rows_of((await waiting).data) == [["a"]]
        await within(closing)
        await client.close()


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error():
    service = aqueduct.Service("ending")

    @service.handler("ever", kind="source", output=WORDS)
    async def ever():
        while True:
            yield words("a")
            await asyncio.sleep(0.01)

    async with service.serving(TCP) as running:
        client = await connect(running.addresses[0])
        stream = client.stream(asked("ever"), n=4)
        await stream.receive()
        closing = asyncio.ensure_future(running.close(drain=0.2))
        with pytest.raises(
            ReactiveError, match=r"CANCELED: draining: the service 'ending' is ending"
        ):
            while await within(stream.receive()) is not None:
                pass
        await within(closing)
        await client.close()


@pytest.mark.parametrize("drain", mostly_long([0, 1], 1))
async def test_a_client_that_reads_nothing_does_not_hold_up_the_end_of_a_drain(drain):
    waits = {"close_linger": 60.0, "progress_deadline": 60.0}
    service = aqueduct.Service("ending", config=config(timing=waits))
    batch = words("x" * (1 << 20))

    @service.handler("ever", kind="source", output=WORDS)
    async def ever():
        while True:
            yield batch

    async with service.serving(TCP) as running, by_hand(running) as peer:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        peer.say(frame(frames.REQUEST_SUB, 1, asked("ever"), n=1000))
        await until(lambda: running.memory()["sending_bytes"] > 4 << 20)
        async with asyncio.timeout(20):
            await running.close(drain=drain)
        assert not running.connections


async def test_telemetry_is_told_of_requests(service):
    told = []

    class Observation:
        def ended(self, code, message, counters):
            told.append((code, counters["rows_out"]))

    class Observer:
        def began(self, call):
            told.append(call.handler)
            return Observation()

    service.telemetry = Observer()
    async with asking(service) as (_, client):
        await client.request(asked("upper", words("a", "b")))
        await until(lambda: told == ["upper", ("ok", 2)])


@pytest.mark.parametrize("family", ["tls", "unix", "ws", "wss"])
async def test_a_service_answers_at_every_address(service, family, tmp_path):
    address = f"reactivesocket+{family}://127.0.0.1:0"
    if family == "unix":
        address = f"reactivesocket+unix://{tmp_path}/s"
    tls = TLS if family in ("tls", "wss") else None
    async with asking(service, address, tls=tls) as (running, client):
        assert running.addresses[0].startswith(f"reactivesocket+{family}://")
        assert rows_of((await client.request(asked("upper", words("a")))).data) == [["A"]]


async def test_addresses_of_both_kinds_are_served_together(service):
    async with service.serving(TCP, "memory://both", drain=0) as running:
        assert len(running.addresses) == 2
        async with await aqueduct.Client.connect("memory://both") as client:
            assert (await client.call("upper", words("a")))["word"].to_pylist() == ["A"]
        async with await connect(running.addresses[1]) as client:
            assert rows_of((await client.request(asked("upper", words("a")))).data) == [["A"]]
        assert running.counters()["connections"] == 2


async def test_a_client_that_reads_late_hears_of_the_end_after_the_drain(service):
    @service.handler("flood", kind="source", output=WORDS)
    async def flood():
        while True:
            yield words("x" * (1 << 20))

    service.config = config(timing={"close_linger": 100})
    async with service.serving(TCP, drain=0) as running, by_hand(running) as peer:
        peer.say(frame(frames.REQUEST_STREAM, 1, asked("flood"), n=100))
        await until(lambda: running.state()["connections"])
        await until(lambda: running.state()["connections"][0]["queued_bytes"] > 1 << 20)
        closing = asyncio.create_task(running.close(drain=0))
        await asyncio.sleep(0.6)  # a hundredth of the time that a close may take
        assert not closing.done()
        kind = frames.RESPONSE
        while kind == frames.RESPONSE:
            kind, _, stream, data = await peer.read()
        assert (kind, stream) == (frames.ERROR, 1), data
        await within(closing)


async def test_web_pages_need_their_origin(service):
    address = "reactivesocket+ws://127.0.0.1:0"
    origins = ["https://a.example"]
    # They do not concern the other address.
    async with service.serving(address, TCP, origins=origins, drain=0) as running:
        async with await connect(running.addresses[0], origin="https://a.example") as client:
            assert rows_of((await client.request(asked("upper", words("a")))).data) == [["A"]]
        with pytest.raises(ConnectFailed, match=r"403"):
            await connect(running.addresses[0], origin="https://b.example")


async def test_nothing_is_left_of_calls_and_connections(service):
    async with service.serving(TCP, drain=0) as running:
        gc.collect()
        gc.disable()
        try:
            async with await connect(running.addresses[0]) as client:
                for handler in ("upper", "thread"):
                    await client.request(asked(handler, words("a")))
                with pytest.raises(ReactiveError):
                    await client.request(asked("nothing", words("a")))
                for handler in ("count", "plain"):
                    async with client.stream(asked(handler), n=8) as stream:
                        await batches_of(stream)
                await client.fire(asked("keep", words("a")))
                await until(lambda: service.sunk and not running.calls)
                calls = [
                    weakref.ref(each) for each in gc.get_objects() if type(each) is ReactiveCall
                ]
                (connection,) = running.connections
                seen = weakref.ref(connection)
                del connection
            await until(lambda: not running.connections)
            await until(lambda: not any(call() for call in calls))
        finally:
            gc.enable()
        async with await connect(running.addresses[0]) as client:  # the listener knows the last one
            await client.request(asked("upper", words("a")))
        await until(lambda: gc.collect() >= 0 and seen() is None)
    assert running.addresses == []


async def test_an_address_that_is_taken_ends_the_start(service):
    async with service.serving(TCP, drain=0) as running:
        with pytest.raises(ConfigError, match=r"in use|taken"):
            async with service.serving("memory://other", running.addresses[0]):
                pass
        async with service.serving("memory://other", drain=0):
            pass
