"""A call and batches made by hand, for handlers that are called as the functions they are."""

from __future__ import annotations

import asyncio
import queue

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.errors import Busy, Cancelled, ConfigError, LocalProtocolError
from aqueduct.testing import PeerCredentials, PeerIdentity
from tests.support.calls import NUMBERS, numbers


def test_a_call_tells_what_it_was_made_of() -> None:
    identity = PeerIdentity("sha256:" + 64 * "0", "CN=tester", ("tester.example",))
    credentials = PeerCredentials(1, 1000, 1000)
    call = aqueduct.testing.call(
        "score",
        kind="source",
        output_schema=NUMBERS,
        headers={"region": "north"},
        token="abc",
        deadline="5min",
        write_key="job-1",
        attempt="2",
        partition=aqueduct.Partition(3, 8),
        peer="10.0.0.7:40000",
        identity=identity,
        credentials=credentials,
        connection_headers={"agent": "test"},
        state={"customer": 7},
        number=12,
    )
    assert isinstance(call, aqueduct.Call)
    assert (call.handler, call.kind, call.schema) == ("score", "source", None)
    assert call.output_schema == NUMBERS
    assert (call.headers, call.connection_headers) == ({"region": "north"}, {"agent": "test"})
    assert (call.token, call.write_key, call.attempt) == ("abc", "job-1", "2")
    assert call.partition == aqueduct.Partition(3, 8)
    assert call.deadline is not None and 200 < call.deadline <= 300
    assert (call.peer, call.peer_identity) == ("10.0.0.7:40000", identity)
    assert call.peer_credentials == credentials
    assert call.state.customer == 7
    assert repr(call) == "<Call 12 of source 'score' from 10.0.0.7:40000>"


def test_without_arguments_it_is_a_plain_call() -> None:
    call = aqueduct.testing.call()
    assert (call.handler, call.kind, call.headers, call.token) == ("handler", "exchange", {}, None)
    assert (call.deadline, call.partition, call.peer_identity) == (None, None, None)
    assert (call.peer_credentials, call.cancelled) == (None, False)
    call.check()
    with pytest.raises(AttributeError, match=r"call\.state has no 'customer'"):
        call.state.customer  # noqa: B018


def test_it_can_be_cancelled() -> None:
    call = aqueduct.testing.call()
    told: list[bool] = []
    call.on_cancel(lambda: told.append(call.cancelled))
    call.cancel()
    call.cancel("a second time")  # once is all
    assert told == [True]
    with pytest.raises(Cancelled, match=r"^the client abandoned the call$"):
        call.check()
    other = aqueduct.testing.call()
    other.cancel(Busy("full"))
    assert isinstance(other.reason, Busy)


async def test_it_can_be_waited_for() -> None:
    call = aqueduct.testing.call()
    waiting = asyncio.ensure_future(call.wait_cancelled())
    await asyncio.sleep(0)
    assert not waiting.done()
    call.cancel()
    async with asyncio.timeout(20):
        await waiting


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"kind": "stream"}, ConfigError, "kind is 'stream'; it must be 'exchange', 'source' or"),
        ({"deadline": "soon"}, ConfigError, "call: deadline is 'soon'"),
        ({"headers": 5}, ConfigError, "call: headers is 5"),
        ({"schema": "id"}, ConfigError, "call: schema is 'id'"),
        ({"token": 5}, ConfigError, "call: token is"),
        ({"schema": NUMBERS, "write_key": 300 * "k"}, LocalProtocolError, "write key"),
    ],
)
def test_what_no_client_could_send_is_refused(arguments, error, text) -> None:
    with pytest.raises(error, match=text):
        aqueduct.testing.call(**arguments)


async def test_batches_are_read_by_handlers_of_each_shape() -> None:
    def generator(batches, call):
        first = next(batches)
        yield first
        yield from batches

    async def async_generator(batches, call):
        yield await anext(batches)
        async for batch in batches:
            yield batch

    async def sink(batches):
        return {"rows": sum([batch.num_rows async for batch in batches])}

    given = [numbers(1), numbers(2, 3)]
    call = aqueduct.testing.call(schema=NUMBERS)
    assert list(generator(aqueduct.testing.batches(*given), call)) == given
    stream = async_generator(aqueduct.testing.batches(*given), call)
    assert [batch async for batch in stream] == given
    assert await sink(aqueduct.testing.batches(*given)) == {"rows": 3}
    with pytest.raises(ConfigError, match=r"batch 1 is of type Table; it must be a pyarrow\.Rec"):
        aqueduct.testing.batches(given[0], pa.Table.from_batches(given))


async def test_a_cancelled_call_has_no_more_batches() -> None:
    call = aqueduct.testing.call(schema=NUMBERS)
    given = aqueduct.testing.batches(numbers(1), numbers(2), numbers(3), call=call)
    assert next(given) == numbers(1)
    assert await anext(given) == numbers(2)
    call.cancel("enough")
    with pytest.raises(Cancelled, match="enough"):
        next(given)
    with pytest.raises(asyncio.CancelledError):
        await anext(given)


@pytest.mark.parametrize("kind", ["for", "async for"])
async def test_a_service_cancels_reading_as_a_call_made_by_hand_does(kind: str) -> None:
    """The client goes away while the handler waits for its next batch."""
    service, raised = aqueduct.Service("test"), queue.SimpleQueue[BaseException]()
    address = f"memory://hand-made-{kind.replace(' ', '-')}"

    def read(batches):
        try:
            yield from batches
        except BaseException as error:
            raised.put(error)
            raise

    async def read_async(batches):
        try:
            async for batch in batches:
                yield batch
        except BaseException as error:
            raised.put(error)
            raise

    handler = read if kind == "for" else read_async
    service.handler("read", input=NUMBERS, output=NUMBERS)(handler)

    async def source():
        yield numbers(1)
        await asyncio.Event().wait()

    async with service.serving(address), aqueduct.Client(address) as client:
        async with client.exchange("read", source(), schema=NUMBERS) as stream:
            assert await anext(stream) == numbers(1)
        error = await asyncio.to_thread(raised.get, timeout=20)
    assert type(error) is (Cancelled if kind == "for" else asyncio.CancelledError)
