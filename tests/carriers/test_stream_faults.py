"""Byte-stream peers that misbehave: each ends with a clear reason, or costs no more than stated."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import struct
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from aqueduct.address import Address
from aqueduct.carriers import stream
from aqueduct.config import DEFAULT, Bpmux, ByteStream, Config, Flow
from aqueduct.errors import LocalProtocolError
from aqueduct.protocol.channels.connection import ChannelConnection
from aqueduct.testing.stream_relay import End, Fate, StreamRelay
from tests.carriers.chunks import Chunk, Kind, RawPeer, chunk, varu64
from tests.carriers.users import (
    DEADLINE,
    OVER,
    Pair,
    Recorder,
    met,
    stream_pair,
    timing,
    transfer,
)

KiB = 1 << 10
MiB = 1 << 20
SMALL = Config(flow=Flow(streams=8))


def greeting(streams: int = 100, credit: int = MiB) -> bytes:
    """What each side says first: credit of the top-level, and how many streams it allows."""
    return chunk(Kind.IN_STREAM, 0, credit=credit) + chunk(Kind.IN_SINK, 0, b"\1" + varu64(streams))


def opening(number: int, payload: bytes = b"") -> bytes:
    """Stream ``number`` is opened."""
    return chunk(Kind.OUT_SINK, number + 1, payload, credit=9)


@contextlib.asynccontextmanager
async def against(
    config: Config = DEFAULT,
    *,
    hello: bytes | None = None,
    window: int | None = MiB,
    bidi: bool = False,
) -> AsyncIterator[tuple[RawPeer, Recorder]]:
    """A client that says what the test says, and the user of the server's carrier."""
    taken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    listener = await stream.listen(
        Address.parse("aqueduct+tcp://127.0.0.1:0"), config, None, taken.set_result, bidi=bidi
    )
    peer = await RawPeer.connect(("127.0.0.1", Address.parse(listener.addresses[0]).port))
    await peer.until(lambda: peer.of(Kind.IN_STREAM, 0))
    await peer.say(greeting() if hello is None else hello)
    carrier = await asyncio.wait_for(taken, DEADLINE)
    user = Recorder(carrier, config, window)
    await user.until(lambda: user.begun)
    try:
        yield peer, user
    finally:
        carrier.abandon(OVER)
        peer.close()
        listener.close()
        await asyncio.wait_for(listener.wait_closed(), DEADLINE)
        assert not user.failures, user.failures


async def ends(peer: RawPeer, user: Recorder, *words: str) -> None:
    """The connection ends, and both sides can read why."""
    await user.until(lambda: user.lost)
    for word in words:
        assert word in str(user.lost[0]), str(user.lost[0])
    assert user.lost[0].reason and not user.lost[0].remote
    await peer.until_over()
    (close,) = (found for found in peer.of(Kind.IN_SINK, 0) if found.end is not None)
    assert close.end is not None and close.end[0] == user.lost[0].code
    for word in words:
        assert word in close.end[1:].decode(), close.end


# What breaks a rule.


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (opening(1), "its next stream is sink 1"),
        (opening(0) + opening(2), "its next stream is sink 2"),
        (chunk(Kind.OUT_REQUEST, 1, b""), "its next stream is sink 1"),
        (chunk(Kind.OUT_STREAM, 1, b"", credit=5), "its next stream is sink 1"),
        (chunk(Kind.DUPLEX, 1, b"", credit=5), "its next stream is sink 1"),
        (chunk(Kind.IN_SINK, 0, b"\2what"), "a message of the top-level begins with b'\\x02'"),
        (chunk(Kind.IN_SINK, 0, b""), "a message of the top-level begins with b''"),
        (chunk(Kind.IN_SINK, 0, b"\1"), "the number of streams allowed"),
        (chunk(Kind.IN_SINK, 0, b"\1\5\5"), "bytes after the number of streams allowed"),
        (chunk(Kind.IN_SINK, 0, bytes(70_000)), "is above 65536 bytes"),
        (chunk(Kind.IN_SINK, 5, b""), "In-Sink 5"),
        (chunk(Kind.OUT_SINK, 1, b"", end=b"\5\5"), "bytes after the code"),
        (chunk(Kind.OUT_SINK, 1, b"", end=b"\xf8\1"), "VarU64"),
        (opening(0) + chunk(Kind.OUT_SINK, 1, ack=True), "acknowledgement"),
    ],
)
async def test_what_breaks_the_mapping(said: bytes, words: str) -> None:
    async with against() as (peer, user):
        await peer.say(said)
        await ends(peer, user, words)


async def test_a_stop_that_crosses_the_end_of_a_stream_is_reported() -> None:
    """The peer had not read all of it: what it has thrown away will not be acknowledged."""
    async with against() as (peer, user):
        user.send(0, b"all of it", fin=True)
        await peer.until(lambda: any(said.end is not None for said in peer.of(Kind.OUT_SINK, 1)))
        await peer.say(chunk(Kind.IN_STREAM, 1, end=varu64(7)))
        await user.until(lambda: user.stops)
        assert user.stops == {0: 7}
        with pytest.raises(LocalProtocolError, match="stream 0 ended"):
            user.carrier.write(0, [b"more"], False)


async def test_more_bytes_than_the_window() -> None:
    async with against(window=None) as (peer, user):
        window = DEFAULT.flow.initial_window
        await peer.say(opening(0, b"12345"))
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 1))
        assert peer.credit(Kind.IN_STREAM, 1) == window - 5 + 9
        await peer.say(chunk(Kind.OUT_SINK, 1, bytes(window - 5)))
        await user.until(lambda: user.total == window)
        await peer.say(chunk(Kind.OUT_SINK, 1, bytes(10)))
        await ends(peer, user, "has credit for 9")


async def test_more_opening_bytes_than_the_top_level_has() -> None:
    async with against(SMALL, window=None) as (peer, user):
        top = SMALL.byte_stream.top_credit
        user.limits = {0: top, 1: top}  # the recorder is not to mind them
        await peer.say(opening(0, bytes(top // 2)), opening(1, bytes(top // 2 + 1)))
        await ends(peer, user, "credit for")
        assert user.total <= top


async def test_large_opening_payloads_are_given_back_as_they_are_covered() -> None:
    """Opening bytes above the window hold top-level credit until ``credit`` covers them."""
    async with against(SMALL, window=None) as (peer, user):
        user.limits[0] = MiB  # the recorder is not to mind them
        window, top = SMALL.flow.initial_window, SMALL.byte_stream.top_credit
        before = peer.credit(Kind.IN_STREAM, 0)
        await peer.say(opening(0, bytes(8 * window)))
        await user.until(lambda: user.total == 8 * window)
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 1) == 9)
        assert peer.credit(Kind.IN_STREAM, 0) == before == top
        user.carrier.credit(0, 8 * window + 100)
        user.carrier.flush()
        said = len(b"\1" + varu64(100))  # the message of the greeting is given back too
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0) == top + 8 * window + said)
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 1) == 109)


async def test_streams_without_end() -> None:
    async with against(SMALL) as (peer, user):
        user.window = None
        await peer.say(*(opening(number, b"x") for number in range(9)))
        await ends(peer, user, "the peer opens stream 8; 8 are allowed so far")
        assert set(user.data) == set(range(8))


async def test_the_slots_of_streams_come_back_no_faster_than_they_end() -> None:
    async with against(SMALL) as (peer, user):
        said = b"".join(
            opening(number, b"x") + chunk(Kind.OUT_SINK, number + 1, end=b"") for number in range(8)
        )
        await peer.say(said)
        await user.until(lambda: len(user.ended) == 8)
        await peer.until(lambda: Chunk(Kind.IN_SINK, 0, b"\1" + varu64(16)) in peer.chunks)
        await peer.say(*(opening(number) for number in range(8, 17)))
        await ends(peer, user, "the peer opens stream 16; 16 are allowed so far")


async def test_pings_without_end_from_a_peer_that_does_not_read() -> None:
    config = dataclasses.replace(DEFAULT, bpmux=Bpmux(unanswered_pings=50))
    async with against(config) as (peer, user):
        ping = chunk(Kind.IN_STREAM, 0, ping=True)
        for asked in range(1, 11):  # who reads the answers may ask on
            await peer.say(ping * 20)
            await peer.until(lambda: len(peer.of(Kind.IN_SINK, 0)) >= 20 * asked)  # noqa: B023
        peer.read(False)
        user.carrier.write(0, [bytes(64 * MiB)], True)  # fills what the kernel holds
        user.carrier.flush()
        sent = 0
        while not user.lost and sent < 64 * MiB:
            sent += peer.say_now(ping * 1000)
            await asyncio.sleep(0.001)
        await user.until(lambda: user.lost)
        assert "pings" in str(user.lost[0]) or "Bpmux.unanswered_pings" in str(user.lost[0])


async def test_credit_without_end() -> None:
    async with against() as (peer, user):
        user.carrier.write(0, [b"hello"], False)
        user.carrier.flush()
        await peer.until(lambda: peer.payload(Kind.OUT_SINK, 1) == b"hello")
        await peer.say(chunk(Kind.IN_STREAM, 1, credit=(1 << 64) - 1))
        user.carrier.write(0, [b" you"], False)
        user.carrier.flush()
        await peer.until(lambda: peer.payload(Kind.OUT_SINK, 1) == b"hello you")
        await peer.say(chunk(Kind.IN_STREAM, 1, credit=(1 << 64) - 1))
        await ends(peer, user, "credit above 2^64 - 1")


# Who grants nothing, or does not read.


async def test_a_peer_that_allows_no_streams_is_none(caplog: pytest.LogCaptureFixture) -> None:
    listener = await stream.listen(
        Address.parse("aqueduct+tcp://127.0.0.1:0"),
        timing(connect_timeout=0.3),
        None,
        lambda carrier: pytest.fail("it was taken"),
    )
    place = "127.0.0.1", Address.parse(listener.addresses[0]).port
    for hello in (greeting(streams=0), greeting()[:4], b""):
        peer = await RawPeer.connect(place)
        await peer.say(hello)
        await peer.until_over()
        peer.close()
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)


async def test_a_peer_that_grants_no_credit() -> None:
    async with against(hello=greeting(credit=70_000)) as (peer, user):
        top = 70_000
        data = random.Random(1).randbytes(MiB)
        for number in range(3):
            user.carrier.write(number, [data], True)
        user.carrier.flush()
        await peer.until(lambda: peer.of(Kind.OUT_SINK, 3))
        user.carrier.ping()
        user.carrier.flush()
        await peer.until(lambda: any(found.ping for found in peer.chunks))
        got = sum(len(peer.payload(Kind.OUT_SINK, number)) for number in (1, 2, 3))
        assert got + len(peer.payload(Kind.IN_SINK, 0)) <= top
        # A close does not wait for credit: some is kept for it.
        user.carrier.close(7, "no credit", linger=0.1)
        await peer.until_over()
        assert peer.of(Kind.IN_SINK, 0)[-1].end == b"\7no credit"


async def test_a_reset_waits_for_no_credit_but_the_first() -> None:
    async with against() as (peer, user):
        data = bytes(200_000)
        user.carrier.write(0, [data], False)
        user.carrier.flush()
        await peer.until(lambda: peer.of(Kind.OUT_SINK, 1))
        await peer.say(chunk(Kind.IN_STREAM, 1, credit=100))
        opened = len(peer.of(Kind.OUT_SINK, 1)[0].payload or b"")
        await peer.until(lambda: len(peer.payload(Kind.OUT_SINK, 1)) == opened + 91)
        user.carrier.reset(0, 1 << 40)
        user.carrier.flush()
        await peer.until(lambda: peer.of(Kind.OUT_SINK, 1)[-1].end == varu64(1 << 40))


async def test_a_peer_that_stops_reading_is_bounded_and_lost_at_last() -> None:
    config = dataclasses.replace(
        timing(idle_timeout=1.0, ping_interval=0.5), byte_stream=ByteStream(notsent_lowat=64 * KiB)
    )
    async with against(config) as (peer, user):
        peer.read(False)
        await peer.say(chunk(Kind.IN_STREAM, 0, ping=True))
        user.carrier.write(0, [bytes(32 * MiB)], True)
        user.carrier.flush()
        await peer.say(chunk(Kind.IN_STREAM, 1, credit=64 * MiB))
        carrier: Any = user.carrier
        await met(lambda: carrier.transport.writing)
        assert carrier.snapshot()["in_flight"] <= 2 * config.bpmux.chunk
        await user.until(lambda: user.lost)
        assert "is gone: nothing was heard for 1 s" in str(user.lost[0])


async def test_a_close_to_a_peer_that_does_not_read_takes_its_time_and_no_more() -> None:
    async with against() as (peer, user):
        peer.read(False)
        user.carrier.write(0, [bytes(64 * MiB)], True)
        user.carrier.flush()
        await peer.say(chunk(Kind.IN_STREAM, 1, credit=64 * MiB))
        carrier: Any = user.carrier
        await met(lambda: carrier.transport.writing)
        carrier.close(3, "enough", linger=0.1)
        await user.until(lambda: user.lost)
        assert user.lost[0].code == 3
        assert carrier.transport.released


async def test_who_closes_is_told_when_the_socket_is_closed() -> None:
    """Or a program that ends its loop then would leave it behind, and with it the close."""
    async with against() as (peer, user):
        carrier: Any = user.carrier
        carrier.close(3, "enough")
        await peer.until(lambda: peer.of(Kind.IN_SINK, 0)[-1].end is not None)
        assert not user.lost
        assert not carrier.transport.released
        carrier.close(4, "again")
        peer.sock.shutdown(socket.SHUT_WR)
        await user.until(lambda: user.lost)
        assert carrier.transport.released
        assert [error.code for error in user.lost] == [3]


# How a connection ends.


async def test_a_half_closed_connection_is_over() -> None:
    async with against() as (peer, user):
        await peer.say(opening(0, b"all"))
        peer.sock.shutdown(socket.SHUT_WR)
        await user.until(lambda: user.lost)
        assert user.data == {0: b"all"}
        assert "the client closed the connection without saying why" in str(user.lost[0])
        await peer.until_over()


@pytest.mark.parametrize("cut", [1, 3, 100])
async def test_an_end_inside_a_chunk(cut: int) -> None:
    async with against() as (peer, user):
        await peer.say(opening(0, bytes(200))[:cut])
        peer.sock.shutdown(socket.SHUT_WR)
        await user.until(lambda: user.lost)
        assert "closed the connection inside a chunk" in str(user.lost[0])


async def test_a_reset_inside_a_chunk() -> None:
    async with against() as (peer, user):
        await peer.say(opening(0, bytes(200))[:100])
        await user.until(lambda: user.total)
        peer.read(False)
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.sock.close()
        await user.until(lambda: user.lost)
        assert "reset the connection" in str(user.lost[0])


async def test_a_close_is_read_though_the_reader_was_writing() -> None:
    """What the peer still sends must not reset the connection before it has read why it ends."""
    async with stream_pair("tcp") as (client, server, _):
        pair = Pair(Recorder(client, DEFAULT, None), Recorder(server, DEFAULT, 1 << 30))
        await pair.client.until(lambda: pair.client.begun)
        await pair.server.until(lambda: pair.server.begun)
        for number in range(20):
            client.write(number, [bytes(4 * MiB)], True)
        client.flush()
        await pair.server.until(lambda: pair.server.total > 2 * MiB)
        server.close(9, "stop it")
        await pair.client.until(lambda: pair.client.lost)
        assert (pair.client.lost[0].code, pair.client.lost[0].reason) == (9, "stop it")


async def test_a_close_by_the_peer_tells_code_and_reason() -> None:
    async with against() as (peer, user):
        await peer.say(opening(0, b"x"), chunk(Kind.IN_SINK, 0, end=varu64(300) + b"so be it"))
        await user.until(lambda: user.lost)
        lost = user.lost[0]
        assert (lost.code, lost.reason, lost.remote) == (300, "so be it", True)
        assert user.data == {0: b"x"}
        await peer.until_over()


async def test_silence() -> None:
    async with against(timing(idle_timeout=0.3, ping_interval=0.1)) as (peer, user):
        await user.until(lambda: user.lost)
        assert "is gone: nothing was heard for 0.3 s" in str(user.lost[0])
        await peer.until_over()


# Networks between them.


@contextlib.asynccontextmanager
async def through(proxy: StreamRelay, config: Config = DEFAULT) -> AsyncIterator[Pair]:
    taken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    listener = await stream.listen(
        Address.parse("aqueduct+tcp://127.0.0.1:0"), config, None, taken.set_result
    )
    address = Address.parse(listener.addresses[0])
    place = proxy.start(("127.0.0.1", address.port))
    carrier = await stream.connect(address.with_port(int(place[1])), config)
    server = await asyncio.wait_for(taken, DEADLINE)
    pair = Pair(Recorder(carrier, config), Recorder(server, config))
    try:
        yield pair
    finally:
        for end in (carrier, server):
            end.abandon(OVER)
        listener.close()
        await asyncio.wait_for(listener.wait_closed(), DEADLINE)
        proxy.close()
        pair.check()


async def test_a_network_that_trickles() -> None:
    for fate in (Fate(piece=1), Fate(piece=700, chop=True)):
        async with through(StreamRelay(up=fate, down=fate, seed=3)) as pair:
            await transfer(pair, 3_000 if fate.piece == 1 else 200_000)


@pytest.mark.parametrize("end", [End.FIN, End.RESET])
async def test_a_network_that_cuts_at_any_byte(end: End) -> None:
    for limit in (60, 61, 64, 100, 5_000, 70_000, 400_000):
        async with through(StreamRelay(up=Fate(limit=limit, end=end))) as pair:
            await pair.client.until(lambda: pair.client.begun)
            pair.client.send(0, bytes(MiB), fin=True)
            for user in (pair.client, pair.server):
                await user.until(lambda: user.lost)  # noqa: B023
                assert user.lost[0].reason
            assert 0 not in pair.server.ended


async def test_a_network_that_stalls() -> None:
    config = timing(idle_timeout=0.5, ping_interval=0.2)
    proxy = StreamRelay(up=Fate(limit=50_000))
    async with through(proxy, config) as pair:
        await pair.client.until(lambda: pair.client.begun)
        # Nor does the close of whoever is the first to notice pass.
        proxy.link.down.stall()
        pair.client.send(0, bytes(MiB), fin=True)
        for user in (pair.client, pair.server):
            await user.until(lambda: user.lost)  # noqa: B023
            assert "is gone: nothing was heard" in str(user.lost[0])


@pytest.mark.parametrize("what", ["streams", "payloads", "credit", "pongs"])
async def test_tiny_chunks_of_one_connection_do_not_hold_up_the_loop(what: str) -> None:
    """Counted in chunks for a turn of the event loop: each costs as much as a large one."""
    config = dataclasses.replace(DEFAULT, flow=Flow(streams=30_000))
    many = 12_000
    async with against(config) as (peer, user):
        if what == "streams":
            said = b"".join(
                chunk(Kind.OUT_SINK, number, b"x", end=b"", credit=9)
                for number in range(1, many + 1)
            )
        elif what == "payloads":
            await peer.say(opening(0))
            await peer.until(lambda: peer.credit(Kind.IN_STREAM, 1))
            said = chunk(Kind.OUT_SINK, 1, b"x") * many
        elif what == "credit":
            said = chunk(Kind.IN_STREAM, 0, credit=1) * many
        else:
            said = chunk(Kind.IN_SINK, 0) * many
        carrier: Any = user.carrier
        decoder = carrier.streams.mux.receiver.decoder
        turns: list[int] = []

        async def watch() -> None:
            while True:
                turns.append(decoder.chunks)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        before = decoder.chunks
        await peer.say(said)
        async with asyncio.timeout(DEADLINE):
            while decoder.chunks - before < many:  # noqa: ASYNC110 - each turn is looked at
                await asyncio.sleep(0)
        watching.cancel()
        steps = [after - earlier for earlier, after in pairwise(turns)]
        assert max(steps) <= 2 * DEFAULT.bpmux.wake_up + 2


async def test_a_peer_that_allows_more_streams_than_the_core_has_room_for() -> None:
    """It acknowledges none of their ends; once it does, more may be opened."""
    most = 20
    config = dataclasses.replace(DEFAULT, bpmux=Bpmux(entities=most + 1))  # the top level is one
    async with against(config, hello=greeting(streams=1000)) as (peer, user):
        assert user.carrier.openable == most
        for stream in range(most):
            user.send(stream, b"x", fin=True)
        await peer.until(lambda: peer.payload(Kind.OUT_SINK, most))
        assert user.carrier.openable == 0
        await peer.say(chunk(Kind.IN_STREAM, 1, ack=True))
        await user.until(lambda: user.carrier.openable == 1)
        user.send(most, b"y", fin=True)
        await peer.until(lambda: peer.payload(Kind.OUT_SINK, most + 1) == b"y")
        assert not user.lost


@pytest.mark.parametrize("allowed", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1])
async def test_a_peer_may_allow_any_number_of_streams(allowed: int) -> None:
    """No more than Bpmux.entities are open at once; the top level is one of them."""
    said = chunk(Kind.IN_SINK, 0, b"\1" + varu64(allowed))
    async with against() as (peer, user):
        await peer.say(said)
        await user.until(lambda: user.carrier.openable == DEFAULT.bpmux.entities - 1)
        core = ChannelConnection(is_client=False, config=DEFAULT)
        core.start(0.0, 1200)
        core.openable_changed(user.carrier.openable, 0.0)
        user.send(0, b"payload", fin=True)
        await peer.until(lambda: peer.payload(Kind.OUT_SINK, 1) == b"payload")
