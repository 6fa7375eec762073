"""Two programs over bpmux alone: requests, sinks, streams, duplexes, messages, and their ends."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduct.bpmux import BpmuxConnection, BpmuxRequest, BpmuxSink, BpmuxStream, Duplex
from aqueduct.errors import ConnectionLost, Ended, LocalProtocolError
from aqueduct.protocol.bpmux.state import PLACES
from aqueduct.testing.stream_relay import StreamRelay
from tests.bpmux.pairs import BRISK, FAMILIES, Pair, answering, eventually, joined, within

pytestmark = pytest.mark.parametrize("family", FAMILIES)

KiB = 1 << 10
MiB = 1 << 20


def entities(connection: BpmuxConnection) -> dict[str, int]:
    """What there still is, beside the top level."""
    counts = {name: connection.mux.count(place) for place, name in enumerate(PLACES)}
    counts["sink_out"] -= 1
    counts["stream_out"] -= 1
    return {name: count for name, count in counts.items() if count}


async def nothing_left(pair: Pair) -> None:
    await eventually(lambda: not entities(pair.client) and not entities(pair.server))


async def test_requests_both_ways_at_once(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        tasks = [asyncio.create_task(answering(side)) for side in (pair.client, pair.server)]
        texts = [b"text %d" % number for number in range(200)]
        for side in (pair.client, pair.server):
            found = await asyncio.gather(*(side.request(text) for text in texts))
            assert found == [text.upper() for text in texts]
        assert await pair.client.request() == b""
        await nothing_left(pair)
        assert len(pair.client._link.live) == 2  # the top level
        await pair.client.close()
        for task in tasks:
            await within(task)  # the loops over what is opened end with the connection


@pytest.mark.parametrize("size", [1, 300 * KiB, 3 * MiB])
async def test_requests_and_responses_of_any_size(family: str, tmp_path: Path, size: int) -> None:
    """Above the window, and above a chunk, they travel in pieces (BP-16)."""
    data = random.Random(size).randbytes(size)
    async with joined(family, tmp_path) as pair:
        asking = asyncio.create_task(pair.client.request(data))
        request = await pair.server.accept()
        assert isinstance(request, BpmuxRequest)
        assert request.payload == data
        await request.respond(data[::-1])
        assert await within(asking) == data[::-1]
        await nothing_left(pair)


async def test_a_request_that_is_cancelled_is_cancelled_there(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        asking = asyncio.create_task(pair.client.request(b"?"))
        request = await pair.server.accept()
        assert isinstance(request, BpmuxRequest)
        assert not request.cancelled
        asking.cancel()
        assert await request.wait_cancelled() == b""
        assert request.cancelled
        await request.respond(b"too late")  # and of no effect
        await nothing_left(pair)


async def test_a_request_has_a_deadline(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        with pytest.raises(TimeoutError):
            await pair.client.request(b"?", timeout=0.05)
        request = await pair.server.accept()
        assert isinstance(request, BpmuxRequest)
        await request.wait_cancelled()
        await nothing_left(pair)


async def test_a_request_may_be_refused(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        asking = asyncio.create_task(pair.client.request(b"?"))
        request = await pair.server.accept()
        assert isinstance(request, BpmuxRequest)
        request.refuse(b"not today")
        with pytest.raises(Ended) as caught:
            await within(asking)
        assert caught.value.payload == b"not today"
        with pytest.raises(LocalProtocolError):
            await request.respond(b"after all")
        await nothing_left(pair)


async def test_a_request_has_one_answer(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        asking = asyncio.create_task(pair.client.request(b"?"))
        request = await pair.server.accept()
        assert isinstance(request, BpmuxRequest)
        await request.respond(b"one")
        with pytest.raises(LocalProtocolError):
            await request.respond(b"two")
        assert await within(asking) == b"one"
        assert await request.wait_cancelled() == b""  # it has its answer


async def test_a_sink_is_read_as_a_stream(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        async with pair.client.open_sink(b"first") as sink:
            stream = await pair.server.accept()
            assert isinstance(stream, BpmuxStream)
            assert (stream.payload, sink.payload) == (b"first", b"")
            assert stream.identifier == sink.identifier == 1
            for size in (0, 1, 100 * KiB, 256 * KiB, 2 * MiB):
                sending = asyncio.create_task(sink.send(bytes(size)))
                assert await stream.receive() == bytes(size)
                await within(sending)
        assert [message async for message in stream] == []
        assert isinstance(stream.error, Ended)
        with pytest.raises(Ended):
            await stream.receive()
        assert await sink.wait_ended() == b""
        with pytest.raises(LocalProtocolError):
            await sink.send(b"more")
        await nothing_left(pair)


async def test_a_stream_is_written_as_a_sink(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        stream = pair.client.open_stream(b"please")
        sink = await pair.server.accept()
        assert isinstance(sink, BpmuxSink)
        assert sink.payload == b"please"
        for number in range(1000):
            await sink.send(b"%d" % number)
        sink.end(b"goodbye")
        assert [int(message) async for message in stream] == list(range(1000))
        assert isinstance(stream.error, Ended)
        assert stream.error.payload == b"goodbye"
        await nothing_left(pair)


async def test_the_reader_may_end_a_stream(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        async with pair.client.open_stream() as stream:
            sink = await pair.server.accept()
            assert isinstance(sink, BpmuxSink)
            await sink.send(b"one")
            assert await stream.receive() == b"one"
            await sink.send(b"unread")
        assert await sink.wait_ended() == b""
        with pytest.raises(Ended):
            await sink.send(b"two")
        with pytest.raises(LocalProtocolError):
            await stream.receive()
        await nothing_left(pair)


async def test_the_reader_of_a_sink_says_why(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        sink = pair.client.open_sink()
        stream = await pair.server.accept()
        assert isinstance(stream, BpmuxStream)
        stream.end(b"enough")
        assert await sink.wait_ended() == b"enough"
        assert await stream.wait_ended() == b""
        await nothing_left(pair)


async def test_a_duplex_goes_both_ways_and_ends_twice(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        mine = pair.client.open_duplex(b"hello")
        theirs = await pair.server.accept()
        assert isinstance(theirs, Duplex)
        assert theirs.payload == b"hello"
        data = [random.Random(number).randbytes(100 * KiB) for number in range(20)]

        async def echo() -> None:
            async for message in theirs:
                await theirs.send(message)
            theirs.end()

        echoing = asyncio.create_task(echo())

        async def send() -> None:
            for one in data:
                await mine.send(one)
            mine.sink.end()

        sending = asyncio.create_task(send())
        assert [message async for message in mine] == data
        await within(sending)
        await within(echoing)
        await nothing_left(pair)


async def test_messages_of_the_top_level(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        for side, other in ((pair.client, pair.server), (pair.server, pair.client)):
            for size in (0, 5, 2 * MiB):
                sending = asyncio.create_task(side.send(bytes(size)))
                assert await other.receive() == bytes(size)
                await within(sending)


async def test_a_peer_that_does_not_read_stops_the_sender(family: str, tmp_path: Path) -> None:
    """By credit (BP-10): no byte above the window comes, and reading lets as many follow."""
    async with joined(family, tmp_path, window=10 * KiB) as pair:
        sink = pair.client.open_sink()
        stream = await pair.server.accept()
        assert isinstance(stream, BpmuxStream)
        for _ in range(10):
            await sink.send(bytes(KiB))
        with pytest.raises(TimeoutError):
            await sink.send(bytes(KiB), timeout=0.05)
        assert not sink.entity.items  # nothing of it was sent, and nothing waits
        assert sink.entity.credit_out == 0
        for number in range(5):
            assert len(await stream.receive()) == KiB
            await sink.send(bytes([number]) * KiB)
        with pytest.raises(TimeoutError):
            await sink.send(bytes(KiB), timeout=0.05)


async def test_a_payload_that_may_not_be_cut_waits_for_all_its_credit(
    family: str, tmp_path: Path
) -> None:
    async with joined(family, tmp_path, window=10 * KiB) as pair:
        sink = pair.client.open_sink()
        stream = await pair.server.accept()
        assert isinstance(stream, BpmuxStream)
        with pytest.raises(TimeoutError):
            await sink.send(bytes(10 * KiB + 1), partial=False, timeout=0.05)
        await sink.send(bytes(10 * KiB), partial=False)
        assert len(await stream.receive()) == 10 * KiB
        await sink.send(bytes(100), partial=True)
        assert len(await stream.receive()) == 100
        sending = asyncio.create_task(sink.send(bytes(500 * KiB)))
        assert len(await stream.receive()) == 500 * KiB
        await within(sending)


async def test_what_is_opened_is_held_back_until_it_is_accepted(
    family: str, tmp_path: Path
) -> None:
    """Opening payloads have the credit of the top level (BP-R5)."""
    small = replace(BRISK, byte_stream=replace(BRISK.byte_stream, top_credit=64 * KiB))
    async with joined(family, tmp_path, small) as pair:
        await pair.client.ping()  # the credit is here
        sinks = [pair.client.open_sink(bytes(16 * KiB)) for _ in range(10)]
        await pair.client.ping()
        await pair.client.ping()
        assert len(pair.server._opened) == 4
        for _ in sinks:
            opened = await pair.server.accept()
            assert isinstance(opened, BpmuxStream)
            assert len(opened.payload) == 16 * KiB


async def test_a_bulky_sink_does_not_hold_up_a_request(family: str, tmp_path: Path) -> None:
    """Counted in bytes at a slow proxy, whose own buffers are small: a chunk, and what the
    transport and the kernel hold, pass before the request; 8 MiB wait.
    """
    mark = BRISK.byte_stream.notsent_lowat
    config = replace(BRISK, byte_stream=replace(BRISK.byte_stream, unix_buffer=mark))
    proxy = StreamRelay(buffer=4096)
    async with joined(family, tmp_path, config, window=64 * MiB, proxy=proxy) as pair:
        sink = pair.client.open_sink()
        stream = await pair.server.accept()
        assert isinstance(stream, BpmuxStream)
        await eventually(lambda: sink.entity.credit_out)
        way = proxy.link.up
        way.stall()
        way.let(300 * KiB)
        sending = asyncio.create_task(sink.send(bytes(8 * MiB), partial=True))
        await eventually(lambda: way.passed == way.limit)
        asking = asyncio.create_task(pair.client.request(b"?"))
        await asyncio.sleep(0)
        before = way.passed
        while not pair.server._opened:
            way.let(16 * KiB)
            await eventually(lambda: way.passed == way.limit)
            for _ in range(5):
                await asyncio.sleep(0)
        kernel = 3 * mark if family == "unix" else mark
        assert way.passed - before <= BRISK.bpmux.chunk + kernel + 128 * KiB
        way.resume()
        request = await pair.server.accept()
        assert isinstance(request, BpmuxRequest)
        await request.respond(b"!")
        assert await within(asking) == b"!"
        assert len(await stream.receive()) == 8 * MiB
        await within(sending)


async def test_pings_are_answered(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        times = await asyncio.gather(*(pair.client.ping() for _ in range(50)))
        assert all(0 < seconds < 30 for seconds in times)
        sink = pair.client.open_sink()
        stream = await pair.server.accept()
        assert isinstance(stream, BpmuxStream)
        assert await sink.ping() > 0
        assert await stream.ping() > 0


async def test_close_brings_its_reason_and_ends_everything(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        sink = pair.client.open_sink()
        stream = await pair.server.accept()
        assert isinstance(stream, BpmuxStream)
        asking = asyncio.create_task(pair.server.request(b"?"))
        await pair.client.accept()
        await sink.send(b"last words")
        await pair.client.close(b"good night")
        assert await stream.receive() == b"last words"
        for work in (stream.receive(), asking, pair.server.accept(), pair.server.ping()):
            with pytest.raises(ConnectionLost) as caught:
                await within(asyncio.ensure_future(work))
            assert (caught.value.reason, caught.value.remote) == ("good night", True)
        for call in (pair.client.open_sink, pair.server.open_sink):
            with pytest.raises(ConnectionLost):
                call()
        with pytest.raises(ConnectionLost):
            await sink.send(b"more")
        await pair.server.wait_closed()
        await eventually(lambda: not pair.listener.connections)
        assert not pair.client._link.live and not pair.server._link.live
        await pair.client.close()  # again


async def test_both_may_close_at_once(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        async with asyncio.timeout(30):
            await asyncio.gather(pair.client.close(b"me"), pair.server.close(b"you"))


async def test_a_silent_peer_is_gone(family: str, tmp_path: Path) -> None:
    timing = replace(BRISK.timing, idle_timeout=0.4, ping_interval=0.1)
    config = replace(BRISK, timing=timing)
    async with joined(family, tmp_path, config, proxy=(proxy := StreamRelay())) as pair:
        waiting = asyncio.create_task(pair.client.receive())
        await asyncio.sleep(1.0)
        assert pair.client.error is None  # pings are answered
        proxy.link.up.stall()
        proxy.link.down.stall()
        with pytest.raises(ConnectionLost, match="idle_timeout"):
            await within(waiting)
