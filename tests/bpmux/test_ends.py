"""Ends: of the top level (BP-R14), of what was taken back (BP-R15), of connections and servers."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduct.bpmux import (
    BpmuxConnection,
    BpmuxRequest,
    BpmuxSink,
    BpmuxStream,
    Duplex,
    connect,
    serve,
)
from aqueduct.errors import ConnectionLost, Ended
from aqueduct.protocol.bpmux.state import PLACES
from tests.bpmux.pairs import BRISK, FAMILIES, answering, attacked, eventually, joined, place_for
from tests.bpmux.pairs import within as soon
from tests.carriers.chunks import Kind, chunk

pytestmark = pytest.mark.parametrize("family", FAMILIES)

KiB = 1 << 10
MiB = 1 << 20


# The end of the top level


@pytest.mark.requirement("BP-R14")
async def test_what_is_open_goes_on_after_the_end_of_the_top_level(
    family: str, tmp_path: Path
) -> None:
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0))
        await peer.say(
            chunk(Kind.IN_STREAM, 0, credit=1000),
            chunk(Kind.OUT_REQUEST, 5, b"a question", credit=100),
            chunk(Kind.OUT_SINK, 1, b"numbers"),
            chunk(Kind.IN_SINK, 0, b"last words"),
        )
        request, stream = await connection.accept(), await connection.accept()
        assert isinstance(request, BpmuxRequest) and isinstance(stream, BpmuxStream)
        asking = asyncio.create_task(connection.request(b"and you?"))
        await peer.until(lambda: peer.payload(Kind.OUT_REQUEST, 0))
        await peer.say(chunk(Kind.IN_SINK, 0, end=b"good night"))
        await peer.until(lambda: any(found.ack for found in peer.of(Kind.IN_STREAM, 0)))
        assert connection.error is None
        # Both ways, and this side may still open.
        await request.respond(b"an answer")
        await peer.until(lambda: peer.payload(Kind.IN_REQUEST, 5) == b"an answer")
        await peer.say(chunk(Kind.OUT_REQUEST, 5, ack=True))
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 1))
        await peer.say(chunk(Kind.OUT_SINK, 1, b"one"), chunk(Kind.IN_REQUEST, 0, b"fine"))
        assert await stream.receive() == b"one"
        assert await soon(asking) == b"fine"
        assert await connection.receive() == b"last words"
        with pytest.raises(ConnectionLost, match="good night"):
            await connection.receive()
        assert connection.error is None
        # In the end the connection is closed.
        await peer.say(chunk(Kind.OUT_SINK, 1, end=b"all"))
        with pytest.raises(Ended):
            await stream.receive()
        await peer.until_over()
        await connection.wait_closed()
        assert connection.error is not None
        assert (connection.error.code, connection.error.reason) == (0, "good night")
        assert connection.error.remote


@pytest.mark.requirement("BP-R14")
async def test_after_the_end_of_the_top_level_what_does_not_move_is_closed(
    family: str, tmp_path: Path
) -> None:
    config = replace(BRISK, bpmux=replace(BRISK.bpmux, closing_deadline=0.2))
    async with attacked(family, tmp_path, config) as (peer, connection):
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0))
        await peer.say(
            chunk(Kind.OUT_SINK, 1, b""),
            chunk(Kind.IN_SINK, 0, end=b"bye"),
            chunk(Kind.IN_STREAM, 0, ping=True),
        )
        stream = await connection.accept()
        assert isinstance(stream, BpmuxStream)
        with pytest.raises(ConnectionLost, match=r"Bpmux\.closing_deadline") as caught:
            await stream.receive()
        assert (caught.value.code, caught.value.reason) == (0, "bye")
        await connection.wait_closed()


@pytest.mark.requirement("BP-R14")
async def test_the_end_of_the_top_level_alone_closes(family: str, tmp_path: Path) -> None:
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.say(chunk(Kind.IN_SINK, 0, end=b""))
        await peer.until_over()
        await connection.wait_closed()
        with pytest.raises(ConnectionLost):
            await connection.accept()
        async for _ in connection:
            raise AssertionError("nothing was opened")


# What is taken back


def unsent(connection: BpmuxConnection) -> tuple[int, int]:
    """Entities beside the top level, and what stands in a queue of the scheduler."""
    turns = connection.mux.turns
    queues = (turns.urgent, turns.fresh, turns.bulky, connection.mux.scheduler.waiting)
    count = sum(connection.mux.count(place) for place in range(len(PLACES))) - 2
    return count, sum(map(len, queues))


@pytest.mark.requirement("BP-R15")
async def test_a_request_that_was_given_up_before_it_left_is_never_sent(
    family: str, tmp_path: Path
) -> None:
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0))
        for size in (10, 300 * KiB):
            with pytest.raises(TimeoutError):
                await connection.request(bytes(size), timeout=0.05)
            asking = asyncio.create_task(connection.request(bytes(size)))
            await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        assert unsent(connection) == (0, 0)
        assert connection._link.queued == 0
        await peer.say(chunk(Kind.IN_STREAM, 0, credit=MiB))
        await connection.send(b"a message")
        await peer.until(lambda: peer.payload(Kind.IN_SINK, 0) == b"a message")
        assert not peer.of(Kind.OUT_REQUEST, 0)
        asking = asyncio.create_task(connection.request(b"?"))
        await peer.until(lambda: peer.of(Kind.OUT_REQUEST, 4) or peer.of(Kind.OUT_REQUEST, 0))
        asking.cancel()


@pytest.mark.requirement("BP-R15")
async def test_a_request_that_has_left_in_part_is_cancelled(family: str, tmp_path: Path) -> None:
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.say(chunk(Kind.IN_STREAM, 0, credit=5))
        asking = asyncio.create_task(connection.request(bytes(300 * KiB)))
        await peer.until(lambda: peer.of(Kind.OUT_REQUEST, 0))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await peer.say(chunk(Kind.IN_STREAM, 0, credit=MiB))
        await peer.until(lambda: peer.of(Kind.OUT_REQUEST, 0)[-1].end == b"")
        assert len(peer.payload(Kind.OUT_REQUEST, 0)) == 300 * KiB
        await peer.say(chunk(Kind.IN_REQUEST, 0, ack=True))
        await eventually(lambda: not unsent(connection)[0])


@pytest.mark.requirement("BP-R15")
async def test_openings_that_were_given_up_before_they_left_are_never_sent(
    family: str, tmp_path: Path
) -> None:
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0))
        for _ in range(200):
            with pytest.raises(ValueError, match="mine"):
                async with connection.open_sink(b"payload"):
                    raise ValueError("mine")
            with pytest.raises(ValueError, match="mine"):
                async with connection.open_duplex(b"payload") as duplex:
                    raise ValueError("mine")
            assert duplex.sink.acknowledged and duplex.stream.acknowledged
            stream = connection.open_stream(b"payload")
            stream.end()
            assert await stream.wait_ended() == b""
        assert unsent(connection)[0] == 0
        assert unsent(connection)[1] < 200
        assert connection._link.queued == 0
        assert len(connection._link.live) == 2
        await peer.say(chunk(Kind.IN_STREAM, 0, credit=MiB))
        await connection.send(b"a message")
        await peer.until(lambda: peer.payload(Kind.IN_SINK, 0) == b"a message")
        kinds = {found.kind for found in peer.chunks}
        assert kinds <= {Kind.IN_SINK, Kind.IN_STREAM}


@pytest.mark.requirement("BP-R15")
async def test_a_payload_that_was_given_up_before_it_left_is_never_sent(
    family: str, tmp_path: Path
) -> None:
    """Sends in Partial mode, and answers."""
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.say(
            chunk(Kind.OUT_REQUEST, 1, b""),
            chunk(Kind.OUT_STREAM, 1, b"", credit=3),
        )
        request, sink = await connection.accept(), await connection.accept()
        assert isinstance(request, BpmuxRequest)
        assert not isinstance(sink, BpmuxRequest | BpmuxStream | Duplex)
        await sink.send(b"abc")
        with pytest.raises(TimeoutError):
            await sink.send(b"never", partial=True, timeout=0.05)
        with pytest.raises(TimeoutError):
            await request.respond(b"never", timeout=0.05)
        assert connection._link.queued == 0
        await peer.say(
            chunk(Kind.OUT_STREAM, 1, credit=100), chunk(Kind.OUT_REQUEST, 1, credit=100)
        )
        await sink.send(b"def", partial=True)
        await request.respond(b"now")
        await peer.until(lambda: peer.payload(Kind.IN_REQUEST, 1) == b"now")
        await peer.until(lambda: peer.payload(Kind.IN_SINK, 1) == b"abcdef")


@pytest.mark.requirement("BP-R15")
async def test_an_end_waits_for_credit_for_its_payload(family: str, tmp_path: Path) -> None:
    async with attacked(family, tmp_path) as (peer, connection):
        sink = connection.open_sink()
        sink.end(b"goodbye")
        closing = asyncio.create_task(connection.close(b"reason"))
        await peer.until(lambda: peer.of(Kind.OUT_SINK, 1))
        await peer.say(
            chunk(Kind.IN_STREAM, 1, credit=7),
            chunk(Kind.IN_STREAM, 0, credit=6),
        )
        await peer.until(lambda: [c.end for c in peer.of(Kind.OUT_SINK, 1)][-1] == b"goodbye")
        await peer.until(lambda: [c.end for c in peer.of(Kind.IN_SINK, 0)] == [b"reason"])
        await peer.say(chunk(Kind.IN_STREAM, 0, ack=True))
        await soon(closing)


@pytest.mark.requirement("BP-R15")
async def test_an_end_without_credit_leaves_bare_when_the_connection_closes(
    family: str, tmp_path: Path
) -> None:
    config = replace(BRISK, timing=replace(BRISK.timing, close_linger=0.4))
    async with attacked(family, tmp_path, config) as (peer, connection):
        sink = connection.open_sink()
        sink.end(b"goodbye")
        stuck = connection.open_sink()
        await peer.until(lambda: peer.of(Kind.OUT_SINK, 2))
        await peer.say(chunk(Kind.IN_STREAM, 2, credit=1))
        sending = asyncio.create_task(stuck.send(b"unsent", partial=True))
        await peer.until(lambda: peer.payload(Kind.OUT_SINK, 2) == b"u")
        await soon(asyncio.ensure_future(connection.close(b"reason")))
        with pytest.raises(ConnectionLost):
            await sending
        await peer.until_over()
        assert [c.end for c in peer.of(Kind.OUT_SINK, 1)] == [None, b""]
        assert [c.end for c in peer.of(Kind.IN_SINK, 0)] == [b""]
        # An end would have said that all was sent.
        assert {c.end for c in peer.of(Kind.OUT_SINK, 2)} == {None}


# Connections and servers


async def test_closing_again_is_the_same(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        for side in (pair.client, pair.server):
            async with side:
                await asyncio.gather(side.close(b"one"), side.close(b"two"), side.close())
            await side.close()
        await pair.listener.close()
        await asyncio.gather(pair.listener.close(), pair.listener.close())
        assert not pair.listener.connections and not pair.listener._tasks


async def test_a_server_is_left_with_connections_that_are_being_closed(
    family: str, tmp_path: Path
) -> None:
    """By the client, by the handler, and by both twice: nothing is left behind, nothing raised."""
    closing: list[asyncio.Task[None]] = []
    made: list[BpmuxConnection] = []

    async def handler(connection: BpmuxConnection) -> None:
        made.append(connection)
        closing.extend(asyncio.create_task(connection.close(b"a")) for _ in range(2))
        async with connection:
            await asyncio.sleep(0)

    before = asyncio.all_tasks()
    async with await serve(handler, place_for(family, tmp_path), config=BRISK) as server:
        clients = [await connect(server.place, config=BRISK) for _ in range(5)]
        await eventually(lambda: len(made) == 5)
        for client in clients:
            closing.extend(asyncio.create_task(client.close()) for _ in range(2))
    await soon(asyncio.gather(*closing))
    assert not server.connections and not server._tasks
    assert asyncio.all_tasks() == before
    assert all(connection._gone.done() for connection in [*made, *clients])


async def test_a_close_that_is_cancelled_leaves_nothing_open(family: str, tmp_path: Path) -> None:
    async with attacked(family, tmp_path) as (peer, connection):
        peer.read(False)
        closing = asyncio.create_task(connection.close())
        again = asyncio.create_task(connection.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await soon(again)
        await connection.wait_closed()
        assert not connection._link.live


async def test_a_server_whose_close_is_cancelled_cancels_its_handlers(
    family: str, tmp_path: Path
) -> None:
    ended = asyncio.Event()

    async def handler(connection: BpmuxConnection) -> None:
        try:
            await answering(connection)
        finally:
            ended.set()

    server = await serve(handler, place_for(family, tmp_path), config=BRISK)
    client = await connect(server.place, config=BRISK)
    assert await client.request(b"a") == b"A"
    client._transport.pause_reading()  # the server's close has no answer
    closing = asyncio.create_task(server.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with asyncio.timeout(30):
        await ended.wait()
    await server.close()
    assert not server.connections and not server._tasks
    client._transport.resume_reading()
    await client.close()


# The end of the transport's half after that of the top level


@pytest.mark.requirement("BP-R14")
async def test_a_peer_that_sends_no_more_gets_the_answers_that_are_due(
    family: str, tmp_path: Path
) -> None:
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0))
        await peer.say(
            chunk(Kind.IN_STREAM, 0, credit=1000),
            chunk(Kind.OUT_REQUEST, 5, b"a question", credit=100),
            chunk(Kind.OUT_STREAM, 6, b"numbers", credit=100),
            chunk(Kind.OUT_SINK, 7, b"unfinished"),
            chunk(Kind.IN_SINK, 0, end=b"bye"),
        )
        request, sink, stream = [await connection.accept() for _ in range(3)]
        assert isinstance(request, BpmuxRequest) and isinstance(sink, BpmuxSink)
        assert isinstance(stream, BpmuxStream)
        asking = asyncio.create_task(connection.request(b"and you?"))
        await peer.until(lambda: peer.payload(Kind.OUT_REQUEST, 0))
        peer.sock.shutdown(socket.SHUT_WR)
        # What needs more of its bytes is over, the rest is not.
        with pytest.raises(ConnectionLost, match="bye"):
            await soon(asking)
        with pytest.raises(ConnectionLost, match="bye"):
            await stream.receive()
        assert connection.error is None
        await request.respond(b"an answer")
        await sink.send(b"one")
        await peer.until(lambda: peer.payload(Kind.IN_REQUEST, 5) == b"an answer")
        assert connection.error is None
        sink.end(b"all")
        await peer.until_over()
        assert peer.payload(Kind.IN_SINK, 6) == b"one"
        await connection.wait_closed()


@pytest.mark.requirement("BP-R14")
async def test_a_peer_that_has_gone_for_good_is_not_waited_for(family: str, tmp_path: Path) -> None:
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0))
        await peer.say(
            chunk(Kind.IN_STREAM, 0, credit=1000),
            chunk(Kind.OUT_REQUEST, 5, b"a question", credit=100),
            chunk(Kind.IN_SINK, 0, end=b"bye"),
        )
        request = await connection.accept()
        assert isinstance(request, BpmuxRequest)
        await peer.until(lambda: any(found.ack for found in peer.of(Kind.IN_STREAM, 0)))
        peer.close()
        await soon(
            asyncio.ensure_future(connection.wait_closed())
        )  # long before Bpmux.closing_deadline
        with pytest.raises(ConnectionLost, match="bye"):
            await request.respond(b"too late")
