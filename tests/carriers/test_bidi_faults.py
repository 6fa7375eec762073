"""Who has bidirectional streams, and peers that open what they may not."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import tempfile
from typing import Any

import pytest

from aqueduct.address import Address
from aqueduct.carriers import memory, quic, stream
from aqueduct.carriers.quic.flow_control import BidiSlots
from aqueduct.carriers.quic.packets import FastConnection
from aqueduct.carriers.quic.tls import BIDI_ALPN
from aqueduct.config import DEFAULT, Config
from aqueduct.errors import ConnectFailed
from aqueduct.testing.datagram_relay import DatagramRelay
from tests.carriers.chunks import Kind, chunk, varu64
from tests.carriers.test_bidi import begun, mine, slots, theirs
from tests.carriers.test_bidi import ends as both
from tests.carriers.test_stream_faults import against, ends, greeting
from tests.carriers.users import DEADLINE, OVER, TLS, Pair, Recorder, linked, met
from tests.carriers.wire import Wire, fast

NETWORKS = ("quic", "tcp", "tls", "unix")
MiB = 1 << 20


def asking(streams: int = 100, bidi: int = 100) -> bytes:
    """What a client says first that wants bidirectional streams."""
    allowed = b"\2" + varu64(streams) + varu64(bidi)
    return chunk(Kind.IN_STREAM, 0, credit=MiB) + chunk(Kind.IN_SINK, 0, allowed)


def opening(number: int, payload: bytes = b"") -> bytes:
    """The duplex of this identifier is opened, with credit for what the other side writes."""
    return chunk(Kind.DUPLEX, number, payload, credit=1000) + chunk(Kind.OUT_SINK, number, credit=9)


# Who has them.


@pytest.mark.parametrize("client", [False, True])
@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("kind", NETWORKS)
async def test_both_sides_decide(kind: str, client: bool, server: bool) -> None:
    taken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    with tempfile.TemporaryDirectory() as directory:
        place = f"{directory}/socket" if kind == "unix" else "127.0.0.1:0"
        scheme = "aqueduct" if kind == "quic" else f"aqueduct+{kind}"
        address = Address.parse(f"{scheme}://{place}")
        net: Any = quic if kind == "quic" else stream
        listener = await net.listen(address, DEFAULT, TLS, taken.set_result, bidi=server)
        target = Address.parse(listener.addresses[0])
        try:
            if client and not server:
                with pytest.raises(ConnectFailed, match="bidirectional streams"):
                    await net.connect(target, DEFAULT, bidi=True)
                return
            carrier = await net.connect(target, DEFAULT, bidi=client)
            other = await asyncio.wait_for(taken, DEADLINE)
            assert carrier.bidi is other.bidi is client
            assert (carrier.bidi_openable > 0) is (other.bidi_openable > 0) is client
            for end in (carrier, other):
                end.abandon(OVER)
        finally:
            listener.close()
            await asyncio.wait_for(listener.wait_closed(), DEADLINE)


@pytest.mark.parametrize("client", [False, True])
@pytest.mark.parametrize("server", [False, True])
async def test_both_sides_decide_in_a_process(client: bool, server: bool) -> None:
    taken: list[Any] = []
    address = Address.parse("memory://bidi")
    listener = await memory.listen(address, DEFAULT, taken.append, bidi=server)
    try:
        if client and not server:
            with pytest.raises(ConnectFailed, match="allows no bidirectional streams"):
                await memory.connect(address, DEFAULT, bidi=True)
            return
        carrier = await memory.connect(address, DEFAULT, bidi=client)
        assert carrier.bidi is taken[0].bidi is client
        assert (carrier.bidi_openable > 0) is (taken[0].bidi_openable > 0) is client
    finally:
        listener.close()


# bpmux by hand.


async def test_a_byte_stream_as_it_stands_in_the_text() -> None:
    async with against(slots(3), hello=asking(bidi=5), bidi=True) as (peer, user):
        streams = varu64(DEFAULT.flow.streams)
        assert peer.of(Kind.IN_SINK, 0)[0].payload == b"\2" + streams + varu64(3)
        assert user.carrier.bidi_openable == 5
        await peer.say(opening(1, b"first"))
        await user.until(lambda: user.data == {theirs(0): b"first"})
        window = DEFAULT.flow.initial_window
        # What this side writes to the opener's stream, and what it lets the opener write.
        await peer.until(lambda: peer.credit(Kind.IN_SINK, 1) == 9)
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 1) >= window + 9 - len(b"first"))
        user.send(theirs(0), b"answer", fin=True)
        await peer.until(lambda: peer.payload(Kind.IN_SINK, 1) == b"answer")
        await peer.until(lambda: peer.of(Kind.IN_SINK, 1)[-1].end == b"")
        user.carrier.stop(theirs(0), 5)
        user.carrier.flush()
        await peer.until(lambda: peer.of(Kind.IN_STREAM, 1)[-1].end == b"\5")
        await peer.say(chunk(Kind.OUT_STREAM, 1, ack=True), chunk(Kind.OUT_SINK, 1, ack=True))
        await user.until(lambda: user.resets == {theirs(0): 5})
        # Of this side's, the opener writes to the sink. Sinks and duplexes count together.
        user.send(0, b"one way")
        user.send(mine(0), b"question")
        await peer.until(lambda: peer.of(Kind.DUPLEX, 2))
        (found,) = peer.of(Kind.DUPLEX, 2)
        assert (found.payload, found.credit) == (b"question", window + 9)
        await peer.until(lambda: peer.credit(Kind.OUT_SINK, 2) == 9)
        user.send(mine(0), fin=True)
        await peer.until(lambda: peer.of(Kind.OUT_SINK, 2)[-1].end == b"")
        await peer.say(chunk(Kind.IN_SINK, 2, b"reply", end=b"\7"))
        await user.until(lambda: user.resets.get(mine(0)) == 7)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (opening(2), "its next stream is sink 1"),
        (opening(1) + opening(3), "its next stream is sink 2"),
        (opening(1) + chunk(Kind.OUT_SINK, 1, b"", credit=9) + opening(1), "Duplex"),
        (chunk(Kind.OUT_STREAM, 1, b"", credit=5), "its next stream is sink 1"),
        (chunk(Kind.OUT_REQUEST, 1, b""), "its next stream is sink 1"),
        (opening(1) + opening(2) + opening(3) + opening(4), "bidirectional stream 3; 3 are"),
        (chunk(Kind.IN_SINK, 0, b"\1\5"), "begins with b'\\x01'"),
        (chunk(Kind.IN_SINK, 0, b"\2\5"), "the number of streams allowed"),
        (chunk(Kind.IN_SINK, 0, b"\2\5\5\5"), "bytes after the number of streams allowed"),
    ],
)
async def test_what_breaks_the_mapping(said: bytes, words: str) -> None:
    async with against(slots(3), hello=asking(), bidi=True) as (peer, user):
        await peer.say(said)
        await ends(peer, user, words)


async def test_a_client_that_wants_none_may_not_open_any() -> None:
    async with against(hello=greeting(), bidi=True) as (peer, user):
        assert user.carrier.bidi is False
        await peer.say(opening(1))
        await ends(peer, user, "its next stream is sink 1")


async def test_the_top_level_gets_back_what_an_end_with_an_opening_took() -> None:
    top, code = 64 << 10, varu64(1 << 60)
    little = dataclasses.replace(DEFAULT.byte_stream, top_credit=top)
    config = dataclasses.replace(DEFAULT, byte_stream=little)
    count = top // 4 // len(code) + 1  # as many as a new grant takes
    async with against(config) as (peer, user):
        for index in range(1, count + 1):
            await peer.say(chunk(Kind.OUT_SINK, index, b"", credit=9, end=code))
            if index % 500 == 0 or index == count:
                await user.until(lambda: len(user.resets) == index)  # noqa: B023
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0) > top)
        assert set(user.resets.values()) == {1 << 60}


async def test_a_link_that_goes_on_keeps_them() -> None:
    taken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    address = Address.parse("aqueduct+tcp://127.0.0.1:0?resume=60s")
    listener = await stream.listen(address, DEFAULT, None, taken.set_result, bidi=True)
    carrier = await stream.connect(Address.parse(listener.addresses[0]), DEFAULT, bidi=True)
    client = Recorder(carrier, DEFAULT)
    server = Recorder(await asyncio.wait_for(taken, DEADLINE), DEFAULT)
    await begun(Pair(client, server))
    client.send(mine(0), b"before ")
    server.send(mine(0), b"there ")
    await server.until(lambda: server.data == {theirs(0): b"before "})
    carrier._sock.shutdown(socket.SHUT_RDWR)
    await met(lambda: carrier.resumes == 1)
    for user in (client, server):
        user.send(mine(0), b"behind", fin=True)
    for user, text in ((client, b"there behind"), (server, b"before behind")):
        await user.until_ended(theirs(0))
        assert user.data == {theirs(0): text}
    for user in (client, server):
        user.carrier.abandon(OVER)
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)


# QUIC.


async def refused(pair: Pair) -> None:
    """The server ends the connection over a stream that may not be there."""
    await pair.server.until(lambda: pair.server.lost)
    assert "Too many streams open" in str(pair.server.lost[0])
    await pair.client.until(lambda: pair.client.lost)
    assert "Too many streams open" in str(pair.client.lost[0])


async def test_a_peer_that_opens_too_many_over_quic() -> None:
    async with linked("quic", slots(3), bidi=True) as pair:
        await begun(pair)
        connection: Any = pair.client.carrier._quic  # type: ignore[attr-defined]
        connection._remote_max_streams_bidi = 100
        for index in range(4):
            pair.client.send(mine(index), b"x")
        await refused(pair)
        assert set(pair.server.data) <= {theirs(0), theirs(1), theirs(2)}


async def test_without_the_keyword_a_bidirectional_stream_is_refused_over_quic() -> None:
    async with linked("quic") as pair:
        await begun(pair)
        connection: Any = pair.client.carrier._quic  # type: ignore[attr-defined]
        connection.bidi_streams = BidiSlots(connection, 10)
        connection.bidi_streams.agreed = True
        connection._remote_max_streams_bidi = 100
        connection._remote_max_stream_data_bidi_remote = 1000
        pair.client.send(mine(0), b"x")
        await refused(pair)
        assert not pair.server.data


async def test_what_comes_before_the_user_is_there() -> None:
    taken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    address = Address.parse("aqueduct://127.0.0.1:0")
    listener = await quic.listen(address, DEFAULT, TLS, taken.set_result, bidi=True)
    carrier = await quic.connect(Address.parse(listener.addresses[0]), DEFAULT, bidi=True)
    client = Recorder(carrier, DEFAULT)
    await client.until(lambda: client.begun)
    carrier.write(mine(0), [b"question"], True)
    carrier.stop(mine(0), 8)
    carrier.flush()
    accepted = await asyncio.wait_for(taken, DEADLINE)
    await met(lambda: len(accepted._before_user) >= 2)
    server = Recorder(accepted, DEFAULT)
    await server.until(lambda: server.stops == {theirs(0): 8} and server.ended == {theirs(0)})
    assert server.data == {theirs(0): b"question"}
    await client.until(lambda: client.resets == {mine(0): 8})
    for end in (carrier, accepted):
        end.abandon(OVER)
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)


@pytest.mark.parametrize("kind", ["quic", "quic-lossy"])
async def test_no_window_is_lost_over_quic(kind: str) -> None:
    """At rest a side has promised what came, and a window for each stream that may be opened."""
    async with linked(kind, slots(10), bidi=True) as pair:
        await begun(pair)
        for index in range(60):
            for user, other in both(pair):
                await user.until(lambda: user.carrier.bidi_openable)  # noqa: B023
                user.send(mine(index), bytes(index * 37), fin=index % 3 == 0)
                if index % 3 == 1:
                    user.carrier.reset(mine(index), 5)
                    user.carrier.flush()
                name = theirs(index)
                await other.until(
                    lambda: name in other.data or name in other.resets  # noqa: B023
                )
                if index % 3 == 2:
                    other.carrier.stop(name, 6)
                other.send(name, bytes(index * 11), fin=index % 2 == 0)
                if index % 2:
                    other.carrier.reset(name, 7)
                    other.carrier.flush()
                name = mine(index)
                await user.until(
                    lambda: name in user.ended or name in user.resets  # noqa: B023
                )
        window = DEFAULT.flow.initial_window
        for user, _ in both(pair):
            connection: Any = user.carrier._quic  # type: ignore[attr-defined]
            await met(lambda: not connection._streams)  # noqa: B023
            assert not connection.bidi_streams.taken
            uni = connection._slots_given - connection._local_max_streams_uni.used
            bidi = connection.bidi_streams._given - connection.bidi_streams.opened_by_peer
            promised = connection._local_max_data.used + (uni + bidi) * window
            assert connection._promised == promised


async def test_a_stop_that_is_said_again_is_reported_once() -> None:
    async with linked("quic", bidi=True) as pair:
        client, server = pair.client, pair.server
        await begun(pair)
        client.send(mine(0), b"question")
        await server.until(lambda: theirs(0) in server.data)
        connection: Any = server.carrier._quic  # type: ignore[attr-defined]
        server.carrier.stop(theirs(0), 8)
        server.carrier.flush()
        await server.until(lambda: server.resets == {theirs(0): 8})
        receiver = connection._streams[0].receiver
        receiver.is_finished = False  # as if the answer to the stop were on its way
        connection.stop(0, 8)
        server.carrier.flush()
        await met(lambda: not receiver.stop_pending)
        receiver.is_finished = True
        server.send(0, b"behind it", fin=True)
        await client.until_ended(0)
        assert client.stops == {mine(0): 8}


def with_bidi(configuration: Any, config: Config, **options: Any) -> FastConnection:
    """One end of a wire, with bidirectional streams."""
    configuration.alpn_protocols = [BIDI_ALPN]
    return fast(configuration, config, bidi=10, **options)


def test_a_stream_is_kept_until_the_user_has_heard_its_end() -> None:
    wire = Wire(with_bidi)
    client, server = wire.client, wire.server
    promised = server._promised
    client.bidi_streams.open().append([b"question"], True)
    wire.run()
    server.bidi_streams.sender(0).append([b"answer"], True)
    wire.run()
    for end in (client, server):
        assert end._streams[0].is_finished
        end.ended(0)
        assert 0 not in end._streams
    assert server.bidi_streams.opened_by_peer == 1
    assert server._promised == promised + len(b"question") - server._window
    assert client._promised == client._local_max_data.value - client._window + len(b"answer")


async def test_a_network_that_is_gone() -> None:
    timing = dataclasses.replace(DEFAULT.timing, idle_timeout=1.0, ping_interval=0.3)
    config = dataclasses.replace(DEFAULT, timing=timing)
    relay = DatagramRelay(seed=3, drop=0.05)
    async with linked("quic-1200", config, relay=relay, bidi=True) as pair:
        await begun(pair)
        for user, other in both(pair):
            user.send(mine(0), b"begun")
            await other.until(lambda: theirs(0) in other.data)  # noqa: B023
        relay.cut = True
        for user, _ in both(pair):
            user.send(mine(1), bytes(MiB), fin=True)
        for user, _ in both(pair):
            await user.until(lambda: user.lost)  # noqa: B023
            assert "nothing was heard" in str(user.lost[0])
            assert user.carrier.bidi_openable == 0
            assert not user.ended
