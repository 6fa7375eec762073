"""Calls of clients join the trace of their caller, and are told to OpenTelemetry."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import aqueduct
from aqueduct.client.client import Client
from aqueduct.errors import (
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    HandlerFailed,
    UnknownHandler,
)
from tests.support.calls import config, connected, numbers, served, serving, until
from tests.support.neighbours import free_port

BATCH = numbers(1, 2, 3)
MANY = pa.record_batch({"id": list(range(20_000))})
FIT = 100_000
"""Bytes of a call of one batch, so that MANY is none."""


KINDS = ("echo", "give", "take")


class Told:
    """Providers of one test, and what they were told."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.telemetry = aqueduct.OpenTelemetry(
            tracer_provider=self.tracers, meter_provider=self.meters
        )
        self.tracer = self.tracers.get_tracer("test")

    @property
    def calls(self) -> list[Any]:
        """Spans of calls that clients made."""
        spans = self.exporter.get_finished_spans()
        return [span for span in spans if span.kind is SpanKind.CLIENT]

    def durations(self) -> list[dict[str, Any]]:
        """Attributes of what was measured."""
        data = self.reader.get_metrics_data()
        assert data is not None
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        return [
            dict(point.attributes or {})
            for metric in metrics
            if metric.name == "rpc.client.call.duration"
            for point in metric.data.data_points
        ]


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.tracers.shutdown()
    told.meters.shutdown()


class Seen:
    """A service that keeps the headers of its calls."""

    def __init__(self, telemetry: Any = None) -> None:
        self.headers: list[dict[str, str]] = []
        self.cut: Callable[[], object] = lambda: None
        """Ends the connections of the service."""
        limits = config(calls={"unary_bytes": FIT})
        service = self.service = aqueduct.Service("seen", config=limits, telemetry=telemetry)

        @service.handler("echo")
        def echo(batch, call):
            self.headers.append(dict(call.headers))
            return batch

        @service.handler("give", kind="source", output=BATCH.schema)
        def give(call):
            self.headers.append(dict(call.headers))
            yield BATCH

        @service.handler("take", kind="sink")
        def take(batches, call):
            self.headers.append(dict(call.headers))
            for _ in batches:
                pass

        @service.handler("fail")
        def fail(batch):
            raise ValueError("not to my taste")

        @service.handler("cut once", idempotent=True)
        async def cut_once(batch, call):
            self.headers.append(dict(call.headers))
            if len(self.headers) == 1:
                self.cut()
                await asyncio.sleep(60)
            return batch

        @service.handler("stall")
        async def stall(batches):
            async for batch in batches:
                yield batch
                await asyncio.sleep(60)


async def each_way(client: Client, **options: Any) -> None:
    await client.call("echo", BATCH, **options)
    await client.call_table("echo", BATCH, **options)
    await client.call("echo", MANY, **options)  # travels as an exchange does
    await client.exchange("echo", [BATCH], **options).read_all()
    await client.exchange("echo", pa.table({"id": [1]}).to_reader(), **options).read_all()
    await client.source("give", **options).read_all()
    await client.sink("take", [BATCH], **options)


WAYS = 7


def each_way_in_a_thread(client: aqueduct.SyncClient, **options: Any) -> None:
    client.call("echo", BATCH, **options)
    client.call_table("echo", BATCH, **options)
    client.call("echo", MANY, **options)
    client.exchange("echo", [BATCH], **options).read_all()
    client.exchange("echo", pa.table({"id": [1]}).to_reader(), **options).read_all()
    client.source("give", **options).read_all()
    client.sink("take", [BATCH], **options)


def parents(headers: list[dict[str, str]]) -> set[str]:
    return {each.get("traceparent", "none").split("-")[2] for each in headers}


def name_of(span: Any) -> str:
    return format(span.get_span_context().span_id, "016x")


@pytest.mark.parametrize("options", [{}, {"headers": {"mine": "yes"}}], ids=["plain", "headers"])
async def test_the_current_span_travels_with_every_call(told: Told, options: Any) -> None:
    seen = Seen()
    async with connected(seen.service) as client:
        await each_way(client, **options)
        with told.tracer.start_as_current_span("one") as one:
            await each_way(client, **options)
        with told.tracer.start_as_current_span("other") as other:
            await each_way(client, **options)
    assert len(seen.headers) == 3 * WAYS
    before, first, second = (seen.headers[place : place + WAYS] for place in (0, WAYS, 2 * WAYS))
    assert all("traceparent" not in each for each in before)
    assert parents(first) == {name_of(one)}
    assert parents(second) == {name_of(other)}
    assert all(each.get("mine") == ("yes" if options else None) for each in seen.headers)
    assert not told.calls  # it only travels


@pytest.mark.parametrize("options", [{}, {"headers": {"mine": "yes"}}], ids=["plain", "headers"])
def test_the_current_span_travels_with_every_call_of_a_thread(told: Told, options: Any) -> None:
    seen = Seen()
    with served(seen.service, "tcp") as address:
        with aqueduct.SyncClient(address, config=seen.service.config) as client:
            with told.tracer.start_as_current_span("one") as one:
                each_way_in_a_thread(client, **options)
            each_way_in_a_thread(client, **options)
    assert parents(seen.headers[:WAYS]) == {name_of(one)}
    assert all("traceparent" not in each for each in seen.headers[WAYS:])
    assert len(seen.headers) == 2 * WAYS


async def test_headers_of_the_user_go_first_and_baggage_goes_with_them(told: Told) -> None:
    seen = Seen()
    mine = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    async with connected(seen.service) as client:
        token = context.attach(baggage.set_baggage("tenant", "north"))
        try:
            await client.call("echo", BATCH)
            with told.tracer.start_as_current_span("one"):
                await client.call("echo", BATCH, headers=mine)
        finally:
            context.detach(token)
    assert seen.headers == [{"baggage": "tenant=north"}, {"baggage": "tenant=north", **mine}]


async def test_every_call_is_a_span_if_that_is_asked_for(told: Told) -> None:
    seen = Seen(told.telemetry)
    async with connected(seen.service, "tcp", telemetry=told.telemetry) as client:
        with told.tracer.start_as_current_span("mine") as mine:
            await each_way(client)
        port = int(client.address.rpartition(":")[2])
    calls = told.calls
    assert [span.name for span in calls] == [*["echo"] * 5, "give", "take"]
    for span, headers in zip(calls, seen.headers, strict=True):
        assert span.parent.span_id == mine.get_span_context().span_id
        assert parents([headers]) == {format(span.context.span_id, "016x")}
        assert span.status.status_code is StatusCode.UNSET
        attributes = dict(span.attributes)
        assert attributes.pop("aqueduct.kind") in ("exchange", "source", "sink")
        assert attributes == {
            "rpc.system.name": "aqueduct",
            "rpc.method": span.name,
            "rpc.response.status_code": "ok",
            "server.address": "127.0.0.1",
            "server.port": port,
        }
    spans: Any = told.exporter.get_finished_spans()
    handlers = {span.parent.span_id for span in spans if span.kind is SpanKind.SERVER}
    assert handlers == {span.context.span_id for span in calls}  # both sides are one trace
    assert {each["rpc.method"] for each in told.durations()} == {"echo", "give", "take"}


def test_every_call_of_a_thread_is_a_span_if_that_is_asked_for(told: Told) -> None:
    seen = Seen()
    with served(seen.service, "unix") as address:
        with aqueduct.SyncClient(
            address, config=seen.service.config, telemetry=told.telemetry
        ) as client:
            each_way_in_a_thread(client)
            with pytest.raises(HandlerFailed):
                client.call("fail", BATCH)
    *well, failed = told.calls
    assert len(well) == WAYS
    assert parents(seen.headers) == {format(span.context.span_id, "016x") for span in well}
    assert {span.attributes["server.address"] for span in well} == {address.partition("://")[2]}
    assert failed.status.status_code is StatusCode.ERROR


async def test_a_call_that_fails_says_how(told: Told) -> None:
    async with connected(Seen().service, telemetry=told.telemetry) as client:
        with pytest.raises(HandlerFailed):
            await client.call("fail", BATCH)
        with pytest.raises(HandlerFailed):
            await client.exchange("fail", [BATCH]).read_all()
        with pytest.raises(UnknownHandler):
            await client.call("nobody", BATCH)
        lost = client.exchange("stall", [BATCH])
        await anext(lost)
    with pytest.raises(ConnectionLost):
        await anext(lost)
    kinds = ["handler-failed", "handler-failed", "unknown-handler", "ConnectionLost"]
    assert [span.attributes["error.type"] for span in told.calls] == kinds
    assert {span.status.status_code for span in told.calls} == {StatusCode.ERROR}
    assert all(span.events[0].name == "exception" for span in told.calls)
    assert {each["error.type"] for each in told.durations()} == set(kinds)


async def test_a_call_that_is_left_early_is_no_error(told: Told) -> None:
    async with connected(Seen().service, telemetry=told.telemetry) as client:
        async with client.exchange("stall", [BATCH]) as stream:
            await anext(stream)
        asked = asyncio.create_task(client.call("stall", BATCH))
        await until(lambda: client.endpoints[0].outstanding_bytes > 0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    assert len(told.calls) == 2
    for span in told.calls:
        assert span.attributes["rpc.response.status_code"] == "cancelled"
        assert span.status.status_code is StatusCode.UNSET


async def test_a_call_of_a_closed_client_is_a_span_that_failed(told: Told) -> None:
    async with serving(Seen().service) as running:
        client = await Client.connect(running.addresses[0], telemetry=told.telemetry)
        await client.close()
        with pytest.raises(aqueduct.AqueductError):
            await client.call("echo", BATCH)
        with pytest.raises(aqueduct.AqueductError):
            client.exchange("echo", [BATCH])
    assert [span.status.status_code for span in told.calls] == [StatusCode.ERROR] * 2


async def test_calls_at_once_have_spans_of_their_own(told: Told) -> None:
    seen = Seen()

    async def work(client: Client, name: str) -> str:
        with told.tracer.start_as_current_span(name) as span:
            await client.call("echo", BATCH)
            await client.exchange("echo", [BATCH]).read_all()
            return name_of(span)

    async with connected(seen.service) as client:
        names = await asyncio.gather(*(work(client, f"{number}") for number in range(10)))
    assert sorted(parents(seen.headers)) == sorted(names)


# ------------------------------------------------------------ several addresses, and retries


def nobody() -> str:
    return f"aqueduct+tcp://127.0.0.1:{free_port()}"


def quick(told: Told, **options: Any) -> dict[str, Any]:
    return {"telemetry": told.telemetry, "backoff": 0.01, "backoff_limit": 0.05, **options}


async def test_a_call_over_several_addresses_is_one_span(told: Told) -> None:
    seen = Seen(told.telemetry)
    async with serving(seen.service, "tcp") as running:
        places = [nobody(), running.addresses[0]]
        async with aqueduct.Client(places, config=seen.service.config, **quick(told)) as client:
            with told.tracer.start_as_current_span("mine") as mine:
                await each_way(client, headers={"mine": "yes"})
            with pytest.raises(HandlerFailed):
                await client.exchange("fail", [BATCH]).read_all()
            with pytest.raises(HandlerFailed):
                await client.call("fail", BATCH)
    *calls, first, second = told.calls
    assert [span.name for span in calls] == [*["echo"] * 5, "give", "take"]
    for span, headers in zip(calls, seen.headers, strict=True):
        assert span.parent.span_id == mine.get_span_context().span_id
        assert parents([headers]) == {name_of(span)} and headers["mine"] == "yes"
        assert span.attributes["rpc.response.status_code"] == "ok"
        assert span.attributes["server.address"] == client.address
    assert [span.attributes["error.type"] for span in (first, second)] == ["handler-failed"] * 2
    assert {each["rpc.method"] for each in told.durations()} == {"echo", "give", "take", "fail"}


def test_a_call_of_a_thread_over_several_addresses_is_one_span(told: Told) -> None:
    seen = Seen()
    with served(seen.service, "tcp") as address:
        limits = seen.service.config
        with aqueduct.SyncClient([nobody(), address], config=limits, **quick(told)) as client:
            with told.tracer.start_as_current_span("mine") as mine:
                each_way_in_a_thread(client)
            for ask in (
                client.exchange("fail", [BATCH]).read_all,
                lambda: client.call("fail", BATCH),
            ):
                with pytest.raises(HandlerFailed):
                    ask()
            with client.exchange("stall", [BATCH]) as stream:
                next(stream)
            client.source("give")  # dropped before anything is asked for
            gc.collect()
    calls, others = told.calls[:WAYS], told.calls[WAYS:]
    assert [parents([headers]) for headers in seen.headers] == [{name_of(span)} for span in calls]
    assert {span.parent.span_id for span in calls} == {mine.get_span_context().span_id}
    words = [span.attributes["rpc.response.status_code"] for span in (*calls, *others)]
    assert words == [*["ok"] * WAYS, *["handler-failed"] * 2, *["cancelled"] * 2]


async def test_attempts_at_one_call_are_one_span(told: Told) -> None:
    for asks in (
        lambda client: client.call("cut once", BATCH),
        lambda client: client.exchange("cut once", [BATCH]).read_all(),
    ):
        seen = Seen()
        async with serving(seen.service, "tcp") as running:
            seen.cut = lambda: [each.close_soon(3, "cut") for each in running.connections]
            async with aqueduct.Client(running.addresses, **quick(told, retries=5)) as client:
                await asks(client)
        span = told.calls[-1]
        assert [parents([each]) for each in seen.headers] == [{name_of(span)}] * 2
        assert span.attributes["rpc.response.status_code"] == "ok"
        assert span.attributes["server.address"] == "127.0.0.1"
    assert len(told.calls) == len(told.durations()) == 2


def test_attempts_at_one_call_of_a_thread_are_one_span(told: Told) -> None:
    seen = Seen()
    with served(seen.service, "tcp") as address:
        with aqueduct.SyncClient(address, **quick(told, retries=5)) as client:
            links = client._endpoints
            seen.cut = lambda: links.last and links.last.connection.close_soon(3, "cut")
            client.call("cut once", BATCH)
    (span,) = told.calls
    assert [parents([each]) for each in seen.headers] == [{name_of(span)}] * 2


async def test_a_call_over_several_addresses_that_is_left_early_is_one_span(told: Told) -> None:
    async with serving(Seen().service, "tcp") as running:
        places = [nobody(), running.addresses[0]]
        async with aqueduct.Client(places, **quick(told)) as client:
            async with client.exchange("stall", [BATCH]) as stream:
                await anext(stream)
            stream = client.exchange("stall", [BATCH])
            await anext(stream)
            del stream
            gc.collect()
            await until(lambda: len(told.calls) == 2)
            asked = asyncio.create_task(client.call("stall", BATCH))
            await until(lambda: any(each.outstanding_bytes for each in client.endpoints))
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            lost = client.exchange("stall", [BATCH])
            await anext(lost)
        with pytest.raises(ConnectionLost):
            await anext(lost)
    *left, closed = told.calls
    assert [span.attributes["rpc.response.status_code"] for span in left] == ["cancelled"] * 3
    assert closed.attributes["error.type"] == "ConnectionLost"


async def test_a_call_that_reaches_no_address_is_a_span_that_failed(told: Told) -> None:
    client = aqueduct.Client([nobody(), nobody()], **quick(told))
    with pytest.raises(ConnectFailed):
        await client.call("echo", BATCH)
    with pytest.raises(ConnectFailed):
        await client.exchange("echo", [BATCH]).read_all()
    await client.close()
    assert [span.attributes["error.type"] for span in told.calls] == ["ConnectFailed"] * 2


@pytest.mark.parametrize("where", ["calls", "headers", "ended"])
async def test_an_observer_that_raises_fails_no_call(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Observed:
        @property
        def headers(self) -> dict[str, str]:
            if where == "headers":
                raise ValueError("no room")
            return {}

        def ended(self, error: BaseException | None) -> None:
            raise ValueError("no room")

    class Observer:
        def calls(self, handler: str, kind: str, address: str) -> Observed:
            if where == "calls":
                raise ValueError("no room")
            return Observed()

    seen = Seen()
    async with connected(seen.service, "tcp", telemetry=Observer()) as client:
        await each_way(client)
    when = "end" if where == "ended" else "beginning"
    told = {record.message for record in caplog.records}
    wanted = (f"telemetry raised at the {when} of a call of {name!r}" for name in KINDS)
    assert told.issuperset(wanted)


def test_what_is_no_observer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"telemetry is 5; it must be an object with calls\("):
        aqueduct.SyncClient("aqueduct+tcp://127.0.0.1:1", telemetry=5)  # type: ignore[arg-type]


PROGRAM = """
import sys
import pyarrow as pa
import aqueduct
from tests.support.calls import sync_client

service = aqueduct.Service("test")
service.handler("echo")(lambda batch: batch)
with sync_client(service, "tcp") as client:
    client.call("echo", pa.record_batch({"id": [1]}))
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_opentelemetry_is_not_imported_for_a_call() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr


def test_no_span_is_current_here() -> None:
    assert not trace.get_current_span().get_span_context().is_valid
