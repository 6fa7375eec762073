"""A service that tells OpenTelemetry of its calls, with the SDK's own exporters."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys

import pyarrow as pa
import pytest
from opentelemetry import propagate, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import aqueduct
from aqueduct.errors import Cancelled, HandlerFailed, UnknownHandler
from aqueduct.service.telemetry import OpenTelemetry
from tests.support.calls import until
from tests.support.proxy import CuttingProxy

NUMBERS = pa.schema([("id", pa.int64())])
BATCH = pa.record_batch({"id": [1, 2, 3]}, schema=NUMBERS)


class Told:
    """Providers of one test, and what they were told."""

    def __init__(self):
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.telemetry = OpenTelemetry(tracer_provider=self.tracers, meter_provider=self.meters)
        self.tracer = self.tracers.get_tracer("test")

    @property
    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def points(self, name):
        """Values of a metric by their attributes."""
        found = {}
        data = self.reader.get_metrics_data()
        assert data is not None
        for resource in data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == name:
                        for point in metric.data.data_points:
                            found[tuple(sorted(dict(point.attributes or {}).items()))] = point
        return found

    def close(self):
        self.tracers.shutdown()
        self.meters.shutdown()


@pytest.fixture
def told():
    told = Told()
    yield told
    told.close()


def make(told, telemetry=None):
    service = aqueduct.Service("told", telemetry=telemetry or told.telemetry)

    @service.handler("function", input=NUMBERS)
    def function(batch):
        with told.tracer.start_as_current_span("in function"):
            return batch

    @service.handler("coroutine", input=NUMBERS)
    async def coroutine(batch):
        await asyncio.sleep(0)
        with told.tracer.start_as_current_span("in coroutine"):
            return batch

    @service.handler("function in turn", input=NUMBERS, max_concurrency=1)
    def function_in_turn(batch):
        with told.tracer.start_as_current_span("in function in turn"):
            return batch

    @service.handler("coroutine in turn", input=NUMBERS, max_concurrency=1)
    async def coroutine_in_turn(batch):
        with told.tracer.start_as_current_span("in coroutine in turn"):
            return batch

    @service.handler("generator in turn", input=NUMBERS, max_concurrency=1)
    def generator_in_turn(batches):
        for batch in batches:
            with told.tracer.start_as_current_span("in generator in turn"):
                pass
            yield batch

    @service.handler("generator", input=NUMBERS)
    def generator(batches):
        for batch in batches:
            with told.tracer.start_as_current_span("in generator"):
                pass
            yield batch

    @service.handler("async generator", input=NUMBERS)
    async def async_generator(batches):
        async for batch in batches:
            with told.tracer.start_as_current_span("in async generator"):
                await asyncio.sleep(0)
            yield batch

    @service.handler("fail", input=NUMBERS)
    def fail(batch):
        raise ValueError("not to my taste")

    @service.handler("stall", input=NUMBERS)
    async def stall(batches):
        async for batch in batches:
            yield batch
            await asyncio.sleep(60)

    return service


async def exchange(service, handler, headers=None):
    async with service.serving("memory://told") as live:
        async with await aqueduct.Client.connect(live.addresses[0]) as client:
            stream = client.exchange(handler, [BATCH, BATCH], headers=headers)
            return [batch async for batch in stream]


IN_TURN = [f"{shape} in turn" for shape in ("function", "coroutine", "generator")]


@pytest.mark.parametrize(
    "handler", ["function", "coroutine", "generator", "async generator", *IN_TURN]
)
async def test_a_call_is_a_child_of_the_span_that_came_with_it(told, handler):
    with told.tracer.start_as_current_span("driver") as driver:
        headers: dict[str, str] = {}
        propagate.inject(headers)
    assert len(await exchange(make(told), handler, headers)) == 2
    spans = told.spans
    call, within = spans[handler], spans[f"in {handler}"]
    assert call.context.trace_id == within.context.trace_id == driver.context.trace_id
    assert call.parent.span_id == driver.context.span_id
    assert within.parent.span_id == call.context.span_id
    assert call.kind is trace.SpanKind.SERVER
    assert call.attributes["rpc.method"] == handler
    assert call.attributes["aqueduct.status"] == "ok"
    assert call.attributes["aqueduct.batches_in"] == call.attributes["aqueduct.batches_out"] == 2
    assert call.attributes["aqueduct.rows_in"] == 6
    assert call.status.is_unset


async def test_a_call_without_a_span_begins_a_trace(told):
    await exchange(make(told), "function")
    assert told.spans["function"].parent is None


async def test_a_call_of_one_batch_is_a_call(told):
    service = make(told)
    async with service.serving("memory://told") as live:
        async with await aqueduct.Client.connect(live.addresses[0]) as client:
            await client.call("coroutine", BATCH)
            await client.call("function", BATCH)
    spans = told.spans
    for handler in ("coroutine", "function"):
        assert spans[f"in {handler}"].parent.span_id == spans[handler].context.span_id
        assert spans[handler].attributes["aqueduct.rows_out"] == 3


async def test_failures_are_errors_and_refusals_are_nothing(told):
    service = make(told)
    with pytest.raises(HandlerFailed):
        await exchange(service, "fail")
    with pytest.raises(UnknownHandler):
        await exchange(service, "nobody")
    assert list(told.spans) == ["fail"]
    span = told.spans["fail"]
    assert span.status.status_code is trace.StatusCode.ERROR
    assert "ValueError: not to my taste" in span.status.description
    assert span.attributes["aqueduct.status"] == "handler-failed"


async def test_an_abandoned_call_ends_its_span(told):
    service = make(told)
    async with service.serving("memory://told") as live:
        async with await aqueduct.Client.connect(live.addresses[0]) as client:
            stream = client.exchange("stall", [BATCH, BATCH])
            await anext(stream)
            await stream.aclose()
            with pytest.raises(Cancelled):
                await anext(stream)
    assert told.spans["stall"].attributes["aqueduct.status"] == "cancelled"


async def test_metrics_by_handler(told):
    service = make(told)
    await exchange(service, "function")
    with pytest.raises(HandlerFailed):
        await exchange(service, "fail")
    durations = told.points("aqueduct.server.duration")
    well = (("aqueduct.status", "ok"), ("rpc.method", "function"))
    ill = (("aqueduct.status", "handler-failed"), ("rpc.method", "fail"))
    assert durations[well].count == durations[ill].count == 1
    rows = told.points("aqueduct.server.rows")
    assert rows[("aqueduct.direction", "in"), ("rpc.method", "function")].value == 6
    assert rows[("aqueduct.direction", "out"), ("rpc.method", "function")].value == 6


async def test_metrics_of_calls_that_wait(told):
    service, held = make(told), asyncio.Event()

    @service.handler("hold", input=NUMBERS, max_concurrency=1)
    async def hold(batch):
        await held.wait()
        return batch

    async with service.serving("memory://told") as live:
        async with await aqueduct.Client.connect(live.addresses[0]) as client:
            calls = [asyncio.create_task(client.call("hold", BATCH)) for _ in range(3)]
            await until(lambda: service.counters()["waiting_calls"] == 2)
            found = told.points("aqueduct.server.waiting")
            assert [point.value for point in found.values()] == [2]
            held.set()
            await asyncio.gather(*calls)


async def test_metrics_of_what_the_process_holds(told):
    await exchange(make(told), "function")
    found = told.points("aqueduct.process.memory")
    names = {("aqueduct.account", name) for name in ("received", "kept", "sending")}
    assert {key for (key,) in found} == names
    assert all(point.value >= 0 for point in found.values())


async def test_cuts_after_which_connections_went_on(told):
    service = make(told)
    async with (
        service.serving("aqueduct+tcp://127.0.0.1:0?resume=60s") as running,
        CuttingProxy(running.addresses[0]) as proxy,
        await aqueduct.Client.connect(proxy.address) as client,
    ):
        for _ in range(2):
            await client.call("function", BATCH)
            proxy.cut()
        await client.call("function", BATCH)
        assert running.counters()["resumes"] == 2
        found = told.points("aqueduct.server.resumes")
        assert found[(("aqueduct.service", "told"),)].value == 2
    assert service.counters()["resumes"] == 2  # also of a serving that has ended
    found = told.points("aqueduct.server.connections")
    assert found[(("aqueduct.service", "told"),)].value == 1
    del service, running, client
    gc.collect()
    assert not told.points("aqueduct.server.resumes")


class Broken:
    def __init__(self, *, begins):
        self.begins = begins

    def began(self, call):
        if not self.begins:
            raise RuntimeError("no telemetry today")
        return self

    def ended(self, status, message, counters):
        raise RuntimeError("no telemetry today")


@pytest.mark.parametrize("begins", [True, False])
async def test_telemetry_that_raises_harms_no_call(told, caplog, begins):
    with caplog.at_level(logging.ERROR, "aqueduct"):
        service = make(told, Broken(begins=begins))
        assert len(await exchange(service, "function")) == 2
    assert "telemetry raised" in caplog.text
    assert "no telemetry today" in caplog.text


def test_nothing_is_imported_unless_it_is_asked_for():
    program = (
        "import sys, aqueduct.service.service, aqueduct.service.telemetry, spark_udfs; "
        "late = 'opentelemetry', 'aioquic', 'pandas'; "
        "print([name for name in sys.modules if name.startswith(late)])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert out.stdout.strip() == "[]"
