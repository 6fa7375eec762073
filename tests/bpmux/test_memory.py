"""What one connection holds: bounded while it lives (BP-R12), and gone when it is gone."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress
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
from aqueduct.bpmux.payloads import Payloads
from aqueduct.errors import AqueductError, ConnectionLost, Ended, SendQueueFull
from tests.bpmux.pairs import BRISK, FAMILIES, attacked, eventually, joined, place_for, within
from tests.carriers.chunks import Kind, chunk, partial
from tests.support.collector import uncollected

KiB = 1 << 10
MiB = 1 << 20
LIMIT = 4 * MiB
TIGHT = replace(BRISK, bpmux=replace(BRISK.bpmux, connection_bytes=LIMIT, payload_bytes=2 * MiB))


async def close(one: BpmuxConnection, other: BpmuxConnection) -> None:
    await one.close(b"done")


async def closed_by_the_peer(one: BpmuxConnection, other: BpmuxConnection) -> None:
    await other.close(b"done")


async def abort(one: BpmuxConnection, other: BpmuxConnection) -> None:
    one._transport.abort()


async def reset(one: BpmuxConnection, other: BpmuxConnection) -> None:
    sock = other._transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other._transport.abort()


async def violate(one: BpmuxConnection, other: BpmuxConnection) -> None:
    other._transport.write(chunk(Kind.IN_STREAM, 77, credit=1))


ENDS = (close, closed_by_the_peer, abort, reset, violate)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_the_memory_goes_with_the_connection(
    family: str, tmp_path: Path, end: Callable[[BpmuxConnection, BpmuxConnection], object]
) -> None:
    """Unread messages, openings that nobody accepted, partial payloads, waits and errors."""
    gone: list[weakref.ref[object]] = []
    arrived: asyncio.Future[weakref.ref[BpmuxConnection]] = (
        asyncio.get_running_loop().create_future()
    )

    async def handler(connection: BpmuxConnection) -> None:
        arrived.set_result(weakref.ref(connection))
        await connection.wait_closed()

    async def talk() -> None:
        client = await connect(listener.place, config=BRISK)
        server = (await arrived)()
        assert server is not None
        await client.ping()
        streams = [client.open_sink(bytes(10 * KiB)) for _ in range(3)]
        opened = await server.accept()
        await streams[0].send(bytes(20 * KiB))
        await client.send(bytes(30 * KiB))
        duplex = client.open_duplex(b"both")
        waiting = [
            asyncio.create_task(work)
            for work in (
                client.request(bytes(64 * KiB)),
                client.request(b"!"),
                client.receive(),
                client.accept(),
                duplex.receive(),
                client.ping(),
                server.ping(),
                server.receive(),
            )
        ]
        await eventually(lambda: len(server._opened) == 5)
        waiting[1].cancel()
        with pytest.raises(TimeoutError):
            await duplex.receive(timeout=0.01)
        things = [client, server, opened, *streams, duplex.sink, duplex.stream]
        gone.extend(weakref.ref(thing) for thing in things)
        gone.extend(
            weakref.ref(half) for half, *_ in server._opened if not isinstance(half, Duplex)
        )
        gone.extend(weakref.ref(each.mux._budget) for each in (client, server))
        done = end(client, server)
        assert asyncio.iscoroutine(done)
        await done
        await within(asyncio.gather(client.wait_closed(), server.wait_closed()))
        for found in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(found, (bytes, float, AqueductError, asyncio.CancelledError))
        waiting.clear()
        with pytest.raises(ConnectionLost):
            await client.request(b"too late")

    with uncollected():
        async with await serve(handler, place_for(family, tmp_path), config=BRISK) as listener:
            await asyncio.create_task(talk())
            await eventually(lambda: not listener.connections and not listener._tasks)
            await eventually(lambda: not any(thing() for thing in gone))


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_task_that_is_cancelled_leaves_nothing_behind(family: str, tmp_path: Path) -> None:
    async with joined(family, tmp_path) as pair:
        before = set(pair.client._link.live)
        with uncollected():
            tasks = [
                asyncio.create_task(pair.client.request(b"?" * 100 * KiB)),
                asyncio.create_task(pair.client.receive()),
                asyncio.create_task(pair.client.ping()),
                asyncio.create_task(pair.client.accept()),
            ]
            seen: list[weakref.ref[object]] = [weakref.ref(task) for task in tasks]
            await asyncio.sleep(0)
            (call,) = pair.client._link.live - before
            seen.append(weakref.ref(call))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del tasks, task, call
            await eventually(lambda: not any(each() for each in seen))
            assert pair.client._link.live == before


def held(connection: BpmuxConnection) -> int:
    return connection.mux.held


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_peer_within_its_credit_cannot_make_a_connection_hold_more(
    family: str, tmp_path: Path
) -> None:
    """300 streams, each with a payload of 2 MiB in pieces: as much as there is credit for."""
    async with attacked(family, tmp_path, TIGHT) as (peer, connection):
        for number in range(1, 301):
            await peer.say(chunk(Kind.OUT_SINK, number, b""))
        streams = [await connection.accept() for _ in range(300)]
        await peer.say(chunk(Kind.IN_STREAM, 0, ping=True))
        await peer.until(lambda: peer.of(Kind.IN_SINK, 0))
        sent = dict.fromkeys(range(1, 301), 0)
        for turn in range(12):
            moved = 0
            for number in sent:
                credit = peer.credit(Kind.IN_STREAM, number) - sent[number]
                assert credit > 0 or sent[number]
                size = min(credit, 2 * MiB - 1 - sent[number])
                if size:
                    head = b"" if sent[number] else partial(2 * MiB)
                    await peer.say(head + chunk(Kind.OUT_SINK, number, bytes(size)))
                    sent[number] += size
                    moved += size
            if not moved:
                break
            await peer.say(chunk(Kind.IN_STREAM, 0, ping=True))
            await peer.until(lambda: len(peer.of(Kind.IN_SINK, 0)) == turn + 2)  # noqa: B023
            assert held(connection) <= LIMIT
        else:
            raise AssertionError("credit is granted without end")
        assert held(connection) == sum(sent.values()) > LIMIT // 2
        assert connection.mux.held + connection.mux._budget.granted <= LIMIT  # type: ignore[union-attr]
        # One that is waited for may be completed beside what the others hold.
        last = streams[-1]
        assert isinstance(last, BpmuxStream)
        waiting = asyncio.create_task(last.receive())
        while sent[300] < 2 * MiB:
            await peer.until(lambda: peer.credit(Kind.IN_STREAM, 300) > sent[300])
            size = min(peer.credit(Kind.IN_STREAM, 300), 2 * MiB) - sent[300]
            await peer.say(chunk(Kind.OUT_SINK, 300, bytes(size)))
            sent[300] += size
            assert held(connection) <= LIMIT + 2 * MiB
        assert await within(waiting) == bytes(2 * MiB)
        assert held(connection) == sum(sent.values()) - 2 * MiB


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize("family", FAMILIES)
async def test_many_large_requests_at_once_are_answered_within_the_limit(
    family: str, tmp_path: Path
) -> None:
    """Fifty payloads each way, of 600 KiB: seven times what either side may hold."""
    size = 600 * KiB
    most = 0
    async with joined(family, tmp_path, TIGHT) as pair:

        async def answer() -> None:
            async for opened in pair.server:
                assert isinstance(opened, BpmuxRequest)
                asyncio.get_running_loop().create_task(opened.respond(opened.payload))

        answering = asyncio.create_task(answer())
        asking = [asyncio.create_task(pair.client.request(bytes([n]) * size)) for n in range(50)]
        while not all(task.done() for task in asking):
            await asyncio.wait(asking, timeout=0.01)
            most = max(most, held(pair.client), held(pair.server))
        for number, task in enumerate(asking):
            assert await task == bytes([number]) * size
        assert most <= LIMIT + 2 * MiB
        assert held(pair.client) == held(pair.server) == 0
        answering.cancel()


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize("partially", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
async def test_streams_that_nobody_reads_do_not_stop_the_one_that_is_read(
    family: str, tmp_path: Path, partially: bool
) -> None:
    """All of the room is taken by forty others; the last ones are read first."""
    async with joined(family, tmp_path, TIGHT, window=256 * KiB) as pair:
        size = 100 * KiB if partially else 30 * KiB

        async def fill(sink: BpmuxSink, number: int) -> None:
            for _ in range(4):
                await sink.send(bytes([number]) * size, partial=partially, timeout=60)
            sink.end()

        streams = [pair.client.open_stream() for _ in range(40)]
        sinks = [await pair.server.accept() for _ in streams]
        filling = []
        for number, sink in enumerate(sinks):
            assert isinstance(sink, BpmuxSink)
            filling.append(asyncio.create_task(fill(sink, number)))
        await eventually(lambda: held(pair.client) > LIMIT // 8)
        for number in reversed(range(40)):
            found = [payload async for payload in streams[number]]
            assert found == [bytes([number]) * size] * 4
        await within(asyncio.gather(*filling))
        assert held(pair.client) == 0


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize("family", FAMILIES)
async def test_idle_streams_leave_credit_for_others(family: str, tmp_path: Path) -> None:
    """A thousand streams with a window of 1 MiB each, on which nothing is sent."""
    async with joined(family, tmp_path, TIGHT, window=MiB) as pair:
        idle = [pair.client.open_sink() for _ in range(1000)]
        taken = [await pair.server.accept() for _ in idle]
        last = pair.client.open_sink()
        stream = await pair.server.accept()
        assert isinstance(stream, BpmuxStream)
        reading = asyncio.create_task(stream.receive())
        await last.send(bytes(MiB))
        assert await within(reading) == bytes(MiB)
        assert len(taken) == 1000
        assert pair.server.mux._budget.granted <= LIMIT + MiB  # type: ignore[union-attr]


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize("family", FAMILIES)
async def test_what_handles_hold_is_given_back_when_they_are_dropped(
    family: str, tmp_path: Path
) -> None:
    async with joined(family, tmp_path, TIGHT) as pair:
        for _ in range(3):
            sinks = [pair.client.open_sink(bytes(10 * KiB)) for _ in range(20)]
            for sink in sinks:
                opened = await pair.server.accept()
                await sink.send(bytes(50 * KiB))
                sink.end(b"x" * 200)
                await sink.wait_ended()
                del opened
            await eventually(lambda: held(pair.server) == 0)
        refused = [pair.client.open_sink() for _ in range(20)]
        for sink in refused:
            opened = await pair.server.accept()
            assert isinstance(opened, BpmuxStream)
            await sink.send(bytes(50 * KiB))
            opened.end(b"no more")
            assert await sink.wait_ended() == b"no more"
        del opened
        await eventually(lambda: held(pair.server) == 0)
        assert held(pair.client) == 0


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize("family", FAMILIES)
async def test_end_payloads_of_openings_are_granted_again(family: str, tmp_path: Path) -> None:
    """They are charged to the top level (BP-R5), whose credit would be used up by them."""
    config = replace(TIGHT, byte_stream=replace(TIGHT.byte_stream, top_credit=64 * KiB))
    async with attacked(family, tmp_path, config) as (peer, connection):
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0))
        for number in range(1, 21):
            await peer.say(chunk(Kind.OUT_SINK, number, bytes(KiB), end=bytes(9 * KiB)))
            opened = await connection.accept()
            assert isinstance(opened, BpmuxStream)
            with pytest.raises(Ended) as caught:
                await opened.receive()
            assert len(caught.value.payload) == 9 * KiB
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0) == (64 + 20 * 10) * KiB)
        assert held(connection) == 0


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize("family", FAMILIES)
async def test_payloads_without_bytes_are_bounded_over_all_streams(
    family: str, tmp_path: Path
) -> None:
    """Each stream has less of them than its window; together they are too many."""
    config = replace(BRISK, bpmux=replace(BRISK.bpmux, connection_bytes=512 * KiB))
    async with attacked(family, tmp_path, config) as (peer, connection):
        for number in range(1, 11):
            await peer.say(chunk(Kind.OUT_SINK, number, b""))
            await connection.accept()
        with suppress(ConnectionError):
            for number in range(1, 11):
                await peer.say(chunk(Kind.OUT_SINK, number, b"") * 5000)
        await within(asyncio.ensure_future(connection.wait_closed()))
        assert "each of which counts 16 bytes; Bpmux.connection_bytes" in str(connection.error)
        assert connection._link.unread <= 512 * KiB // 16 + 1


@pytest.mark.requirement("BP-R12")
@pytest.mark.parametrize("family", FAMILIES)
async def test_what_waits_to_be_sent_is_bounded(family: str, tmp_path: Path) -> None:
    """A peer that grants nothing: openings raise, all else waits for room."""
    async with attacked(family, tmp_path, TIGHT) as (peer, connection):
        sinks = [connection.open_sink(bytes(MiB)) for _ in range(4)]
        with pytest.raises(SendQueueFull, match=r"Bpmux.connection_bytes \(4194304\)"):
            connection.open_sink(b"!")
        with pytest.raises(SendQueueFull):
            connection.open_stream(b"!")
        with pytest.raises(SendQueueFull):
            connection.open_duplex(b"!")
        with pytest.raises(SendQueueFull):
            sinks[0].end(b"!")
        connection.open_sink()
        with pytest.raises(TimeoutError):
            await connection.request(b"!", timeout=0.05)
        assert connection._link.queued == LIMIT
        asking = asyncio.create_task(connection.request(b"!", timeout=30))
        await peer.say(chunk(Kind.IN_STREAM, 0, credit=4 * MiB + 1))
        await peer.until(lambda: peer.of(Kind.OUT_REQUEST, 0))
        await peer.say(chunk(Kind.IN_REQUEST, 0, b"!!"))
        assert await within(asking) == b"!!"
        await eventually(lambda: not connection._link.queued)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_payload_above_what_may_wait_is_sent_alone(family: str, tmp_path: Path) -> None:
    config = replace(TIGHT, bpmux=replace(TIGHT.bpmux, connection_bytes=MiB))
    async with joined(family, tmp_path, config) as pair:
        reading = asyncio.create_task(pair.server.receive())
        await pair.client.send(bytes(2 * MiB))
        assert await within(reading) == bytes(2 * MiB)


def test_small_payloads_that_wait_are_packed() -> None:
    queue = Payloads()
    sizes = [0, 1, 64, 65, 5, 5000, 0, 0, 3]
    for turn in range(2000):
        for size in sizes:
            queue.append(bytes([turn % 251]) * size, size if size != 5 else 2)
        if turn % 3 == 0:
            for size in sizes[:4]:
                _ = size
                queue.take()
    left = 2000 * len(sizes) - 667 * 4
    assert queue.count == left
    first, charged = queue.take()
    assert (len(first), charged) in {(size, size if size != 5 else 2) for size in sizes}
    while queue.count:
        queue.take()
    assert (queue.count, queue.size) == (0, 0)
    for number in range(10_000):
        queue.append(b"%d" % number, len(b"%d" % number))
    assert [int(queue.take()[0]) for _ in range(10_000)] == list(range(10_000))
    queue.append(os.urandom(3), 3)
    queue.clear()
    assert (queue.count, queue.size) == (0, 0)
