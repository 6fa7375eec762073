"""A peer that breaks bpmux, or uses it up: it is cut off with a reason, or bounded."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aqueduct.bpmux import BpmuxRequest, BpmuxSink, BpmuxStream, Duplex
from aqueduct.errors import ConnectionLost, Ended, RemoteProtocolError
from aqueduct.testing.stream_relay import End, Fate, StreamRelay
from tests.bpmux.pairs import BRISK, FAMILIES, attacked, eventually, joined, within
from tests.carriers.chunks import Kind, chunk, partial

pytestmark = pytest.mark.parametrize("family", FAMILIES)

KiB = 1 << 10
MiB = 1 << 20
SMALL = replace(
    BRISK,
    bpmux=replace(BRISK.bpmux, entities=100, payload_bytes=64 * KiB, unanswered_pings=50),
    byte_stream=replace(BRISK.byte_stream, top_credit=64 * KiB),
)

VIOLATIONS = {
    "no chunk at all": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "a number longer than it need be": bytes.fromhex("60f800"),
    "a payload without credit": chunk(Kind.IN_SINK, 0, bytes(64 * KiB + 1)),
    "an opening without payload": chunk(Kind.OUT_SINK, 1, credit=5),
    "a response to nothing": chunk(Kind.IN_REQUEST, 0, b"!"),
    "an end of nothing": chunk(Kind.IN_STREAM, 9, end=b""),
    "an acknowledgement of nothing": chunk(Kind.IN_SINK, 0, ack=True),
    "two ends": chunk(Kind.OUT_SINK, 1, b"", end=b"") + chunk(Kind.OUT_SINK, 1, end=b""),
    "a second top level": chunk(Kind.DUPLEX, 0, b""),
    "too much credit": chunk(Kind.IN_STREAM, 0, credit=2**64 - 1) * 2,
    "more than a partial payload has": partial(3) + chunk(Kind.OUT_SINK, 1, b"four"),
    "a partial payload above the limit": partial(MiB) + chunk(Kind.OUT_SINK, 1, b"begin"),
    "two partial payloads": partial(3) * 2,
}


@pytest.mark.requirement("BP-4")
@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_violation_ends_the_connection_at_once(
    family: str, tmp_path: Path, name: str
) -> None:
    async with attacked(family, tmp_path, SMALL) as (peer, connection):
        waiting = [
            asyncio.create_task(connection.receive()),
            asyncio.create_task(connection.request(b"?")),
            asyncio.create_task(connection.accept()),
        ]
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0))
        await peer.say(VIOLATIONS[name])
        if name == "two ends":
            waiting.pop()  # it was opened
        for work in waiting:
            with pytest.raises(ConnectionLost, match="broke bpmux") as caught:
                await within(work)
            assert isinstance(caught.value.__cause__, RemoteProtocolError)
        await peer.until_over()
        await connection.wait_closed()
        assert not connection._link.live


async def test_a_peer_that_grants_nothing_gets_nothing(family: str, tmp_path: Path) -> None:
    """Neither on the top level nor on a sink, and the waits end by their deadlines."""
    async with attacked(family, tmp_path) as (peer, connection):
        with pytest.raises(TimeoutError):
            await connection.send(b"message", timeout=0.05)
        with pytest.raises(TimeoutError):
            await connection.request(bytes(300 * KiB), timeout=0.05)
        with pytest.raises(TimeoutError):
            await connection.ping(timeout=0.05)
        sink = connection.open_sink()
        await peer.until(lambda: peer.of(Kind.OUT_SINK, 1))
        with pytest.raises(TimeoutError):
            await sink.send(b"!", timeout=0.05)
        sink.end(b"no credit for this")
        stream = connection.open_stream()
        await peer.until(lambda: peer.of(Kind.OUT_STREAM, stream.identifier))
        assert not peer.payload(Kind.IN_SINK, 0)
        assert not peer.of(Kind.OUT_REQUEST, 0)  # taken back before it left
        await within(asyncio.ensure_future(connection.close()))
        assert [found.end for found in peer.of(Kind.IN_SINK, 0)] == [b""]


async def test_pings_without_end_are_cut_off_when_no_answer_is_read(
    family: str, tmp_path: Path
) -> None:
    async with attacked(family, tmp_path, SMALL) as (peer, connection):
        peer.read(False)
        many = chunk(Kind.IN_STREAM, 0, ping=True) * 10_000
        with pytest.raises((ConnectionError, TimeoutError)):
            for _ in range(10_000):
                await peer.say(many)
        await connection.wait_closed()
        assert "unanswered_pings" in str(connection.error)


async def test_pings_that_are_read_are_answered_without_end(family: str, tmp_path: Path) -> None:
    async with attacked(family, tmp_path, SMALL) as (peer, connection):
        for answered in range(40, 4001, 40):
            await peer.say(chunk(Kind.IN_STREAM, 0, ping=True) * 40)
            await peer.until(lambda: len(peer.of(Kind.IN_SINK, 0)) == answered)  # noqa: B023
        assert connection.error is None


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize("kind", [Kind.OUT_REQUEST, Kind.OUT_SINK, Kind.OUT_STREAM, Kind.DUPLEX])
async def test_entities_without_end_are_cut_off(family: str, tmp_path: Path, kind: Kind) -> None:
    async with attacked(family, tmp_path, SMALL) as (peer, connection):
        await peer.say(*(chunk(kind, number, b"") for number in range(1, 200)))
        await connection.wait_closed()
        assert "Bpmux.entities" in str(connection.error)
        assert len(connection._opened) <= 100


async def test_entities_that_end_at_once_are_bounded_too(family: str, tmp_path: Path) -> None:
    """Nobody accepts them, and the peer forgets them: the queue has the same limit."""
    async with attacked(family, tmp_path, SMALL) as (peer, connection):
        with pytest.raises(ConnectionError):
            for number in range(100_000):
                await peer.say(chunk(Kind.OUT_SINK, 1 + number % 50, b"", end=b""))
                await peer.until(lambda: peer.over or len(peer.chunks) > number)  # noqa: B023
                if peer.over:
                    raise ConnectionResetError
        assert "not accepted" in str(connection.error)


async def test_payloads_of_no_bytes_are_bounded(family: str, tmp_path: Path) -> None:
    async with attacked(family, tmp_path, window=1000) as (peer, connection):
        await peer.say(chunk(Kind.OUT_SINK, 1, b""))
        stream = await connection.accept()
        assert isinstance(stream, BpmuxStream)
        await peer.say(chunk(Kind.OUT_SINK, 1, b"") * 1001)
        await connection.wait_closed()
        assert "whose window is 1000" in str(connection.error)


async def test_an_unread_stream_takes_its_window_and_no_more(family: str, tmp_path: Path) -> None:
    async with attacked(family, tmp_path, window=10 * KiB) as (peer, connection):
        await peer.say(chunk(Kind.OUT_SINK, 1, b""))
        stream = await connection.accept()
        assert isinstance(stream, BpmuxStream)
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 1) == 10 * KiB)
        await peer.say(chunk(Kind.OUT_SINK, 1, bytes(10 * KiB)))
        assert len(await stream.receive()) == 10 * KiB
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 1) == 20 * KiB)
        await peer.say(chunk(Kind.OUT_SINK, 1, bytes(10 * KiB)) + chunk(Kind.OUT_SINK, 1, b"!"))
        await connection.wait_closed()
        assert "BP-10" in str(connection.error)


async def test_a_peer_that_stops_reading_is_waited_for_and_left(
    family: str, tmp_path: Path
) -> None:
    """What waits for it is one payload each; a close does not wait for ever."""
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0))
        peer.read(False)
        await peer.say(chunk(Kind.IN_STREAM, 0, credit=2**40))
        await peer.say(chunk(Kind.OUT_STREAM, 1, b"", credit=2**40))
        sink = await connection.accept()
        assert isinstance(sink, BpmuxSink)
        with pytest.raises(TimeoutError):
            while True:
                await sink.send(bytes(200 * KiB), timeout=0.3)
        queued = sink.entity.queued + connection._transport.get_write_buffer_size()
        assert queued <= MiB
        await within(asyncio.ensure_future(connection.close()))


async def test_half_an_end_is_the_end(family: str, tmp_path: Path) -> None:
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.say(chunk(Kind.OUT_SINK, 1, b"", credit=5))
        stream = await connection.accept()
        assert isinstance(stream, BpmuxStream)
        peer.sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionLost, match="without a close"):
            await stream.receive()
        await peer.until_over()


async def test_an_end_inside_a_chunk_is_named(family: str, tmp_path: Path) -> None:
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.say(chunk(Kind.OUT_SINK, 1, b"hello")[:-2])
        peer.sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionLost, match="broke bpmux"):
            await connection.receive()


async def test_a_reset_inside_a_chunk(family: str, tmp_path: Path) -> None:
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.say(chunk(Kind.OUT_SINK, 1, b"hello")[:-2])
        waiting = asyncio.create_task(connection.receive())
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        with pytest.raises(ConnectionLost):
            await within(waiting)


async def test_a_byte_at_a_time_is_understood(family: str, tmp_path: Path) -> None:
    async with attacked(family, tmp_path) as (peer, connection):
        said = (
            chunk(Kind.OUT_REQUEST, 3, b"question", credit=10)
            + partial(6)
            + chunk(Kind.DUPLEX, 1, b"dup", ping=True)
            + chunk(Kind.DUPLEX, 1, b"lex")
            + chunk(Kind.IN_SINK, 0, b"message")
        )
        for byte in said:
            await peer.say(bytes([byte]))
            await asyncio.sleep(0)
        assert await connection.receive() == b"message"
        request, duplex = await connection.accept(), await connection.accept()
        assert isinstance(request, BpmuxRequest) and isinstance(duplex, Duplex)
        assert (request.payload, duplex.payload) == (b"question", b"duplex")
        await request.respond(b"answer")
        await peer.until(lambda: peer.payload(Kind.IN_REQUEST, 3) == b"answer")


async def conversation(family: str, folder: Path, proxy: StreamRelay) -> list[str]:
    """A request each way, a sink and a message; how each step ended."""
    told = []
    async with joined(family, folder, proxy=proxy) as pair:

        async def serve() -> None:
            request = await pair.server.accept()
            assert isinstance(request, BpmuxRequest)
            await request.respond(await pair.server.request(b"and you?"))
            stream = await pair.server.accept()
            assert isinstance(stream, BpmuxStream)
            async for payload in stream:
                await pair.server.send(payload)

        async def call() -> None:
            asking = asyncio.create_task(pair.client.request(b"who?"))
            try:
                request = await pair.client.accept()
                assert isinstance(request, BpmuxRequest)
                await request.respond(b"me")
                assert await asking == b"me"
            finally:
                asking.cancel()
            async with pair.client.open_sink(b"numbers") as sink:
                await sink.send(b"one")
                await sink.send(bytes(300))
                assert await pair.client.receive() == b"one"
                assert await pair.client.receive() == bytes(300)

        serving, calling = asyncio.create_task(serve()), asyncio.create_task(call())
        for work in (calling, serving):
            try:
                await within(work)
                told.append("done")
            except (ConnectionLost, Ended) as error:
                told.append(type(error).__name__)
        await pair.client.close()
        await eventually(lambda: not pair.listener.connections)
        assert not pair.client._link.live and not pair.server._link.live
    return told


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("end", [End.FIN, End.RESET])
async def test_a_cut_at_any_byte_ends_in_connection_lost(
    family: str, tmp_path: Path, way: str, end: End
) -> None:
    proxy = StreamRelay()
    assert await conversation(family, tmp_path, proxy) == ["done", "done"]
    length = getattr(proxy.link, way).passed
    assert 300 < length < 700
    for at in [*range(60), *range(60, length, 7)]:
        fate = Fate(limit=at, end=end)
        proxy = StreamRelay(up=fate) if way == "up" else StreamRelay(down=fate)
        told = await conversation(family, tmp_path, proxy)
        assert set(told) <= {"done", "ConnectionLost"}
        if at < length // 2:
            assert told[0] == "ConnectionLost"


async def test_a_conversation_in_any_pieces(family: str, tmp_path: Path) -> None:
    for fate in (Fate(piece=1), Fate(piece=9, chop=True), Fate(delay=0.002)):
        assert await conversation(family, tmp_path, StreamRelay(up=fate, down=fate)) == [
            "done",
            "done",
        ]


@pytest.mark.parametrize("work", ["request", "sink", "stream", "duplex", "send", "ping"])
async def test_nothing_is_written_after_a_loss(family: str, tmp_path: Path, work: str) -> None:
    """Python 3.12 and 3.13 would watch the closed socket's number for ever, see ``_flush``."""
    loop = asyncio.get_running_loop()
    async with joined(family, tmp_path) as pair:
        connection, transport = pair.client, pair.client._transport
        number = transport.get_extra_info("socket").fileno()
        transport.abort()  # the loop tells the connection of it only in its next turn
        begin: dict[str, Callable[[], Any]] = {
            "request": lambda: asyncio.create_task(connection.request(b"?", timeout=5)),
            "sink": lambda: connection.open_sink(b"open"),
            "stream": lambda: connection.open_stream(b"open"),
            "duplex": lambda: connection.open_duplex(b"open"),
            "send": lambda: asyncio.create_task(connection.send(b"text", timeout=5)),
            "ping": lambda: asyncio.create_task(connection.ping(timeout=5)),
        }
        # A chunk for the transport at once, and what a user does before it is told.
        connection.open_sink(b"first")
        begun = begin[work]()
        await within(asyncio.ensure_future(connection.wait_closed()))
        if isinstance(begun, asyncio.Task):
            with pytest.raises(ConnectionLost):
                await within(begun)
        assert not loop.remove_writer(number)
        assert not loop.remove_reader(number)
