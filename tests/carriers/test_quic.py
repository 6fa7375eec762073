"""What only QUIC has: loss, garbage, the half-open, idle and moving peers, timers and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aioquic import tls
from aioquic.asyncio.client import connect as aioquic_connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration

from aqueduct.address import Address
from aqueduct.carriers import quic
from aqueduct.carriers.quic import packets as packets_module
from aqueduct.carriers.quic import udp
from aqueduct.config import DEFAULT
from aqueduct.errors import ConnectionLost
from aqueduct.testing.datagram_relay import DatagramRelay
from tests.carriers.users import DEADLINE, OVER, TLS, Pair, Recorder, linked, met, timing, transfer

MiB = 1 << 20


IMPATIENT = timing(idle_timeout=1.5, ping_interval=0.2)


# the network


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1_200, 16_000])
async def test_loss_reordering_and_duplicates(seed: int, size: int) -> None:
    relay = DatagramRelay(
        seed=seed, drop=0.02 * (seed + 1), reorder=0.1, duplicate=0.05, delay=0.003
    )
    async with linked("quic" if size == 16_000 else "quic-1200", relay=relay) as pair:
        await transfer(pair, 400_000)
        assert relay.dropped > 0


async def test_the_largest_loss_still_ends() -> None:
    relay = DatagramRelay(seed=1, drop=0.25)
    async with linked("quic-1200", relay=relay) as pair:
        await transfer(pair, 30_000)


async def test_the_round_trip_time_is_measured() -> None:
    async with linked("quic-1200", relay=DatagramRelay(latency=0.02)) as pair:
        await transfer(pair, 20_000)
        assert 0.04 <= pair.client.carrier.rtt < 1.0


async def test_garbage_disturbs_nothing() -> None:
    relay = DatagramRelay()
    chance = random.Random(3)
    heard: list[bytes] = []
    relay.heard = lambda way, data: heard.append(data)
    async with linked("quic-1200", relay=relay) as pair:
        await transfer(pair, 20_000)
        genuine = heard[:40]
        for data in genuine:
            relay.inject(b"")
            relay.inject(data[: chance.randrange(len(data))])  # cut
            relay.inject(data)  # again, and to the wrong side
            flipped = bytearray(data)
            flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            relay.inject(bytes(flipped))
            relay.inject(chance.randbytes(chance.randrange(1, 1500)))
            for first in (0x40, 0x80, 0xC0, 0xF0, 0xFF):
                relay.inject(bytes((first,)) + chance.randbytes(1300))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.connect(("127.0.0.1", Address.parse(pair.listener.addresses[0]).port))
            for data in (*genuine, b"", *(chance.randbytes(1400) for _ in range(100))):
                stranger.send(data)
        await transfer(pair, 100_000, first=2)
        assert pair.listener.connections == 1
        assert pair.listener.half_open == 0


@pytest.mark.parametrize("carrier", ["quic-auto", "quic-1200"])
async def test_a_client_behind_a_nat_that_changes_ports(carrier: str) -> None:
    relay = DatagramRelay()
    async with linked(carrier, relay=relay) as pair:
        await transfer(pair, 50_000)
        relay.move()
        await transfer(pair, 50_000, first=2)
        relay.move()
        pair.client.send(4, b"up", fin=True)
        await pair.server.until_ended(4)
        pair.server.send(4, b"down", fin=True)
        await pair.client.until_ended(4)


async def test_silence_ends_the_connection_with_a_reason() -> None:
    relay = DatagramRelay()
    async with linked("quic-1200", IMPATIENT, relay=relay) as pair:
        await transfer(pair, 1000)
        relay.cut = True
        for user in (pair.client, pair.server):
            await user.until(lambda: user.lost)  # noqa: B023
            error = user.lost[0]
            assert error.code is None and not error.remote
            assert "is gone: nothing was heard for 1.5 s" in str(error)
            assert user.carrier.peer in str(error)


async def test_a_server_that_vanished_is_noticed_before_the_idle_timeout() -> None:
    async with linked("quic-1200") as pair:
        await transfer(pair, 1000)
        pair.listener._doors[0].socket.close()  # as when its process dies
        while not pair.client.lost:
            pair.client.carrier.ping()
            pair.client.carrier.flush()
            await asyncio.sleep(0.01)
        assert "no server listens at its UDP port any more" in str(pair.client.lost[0])


# keys, segments, buffers


async def test_keys_are_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets_module, "_KEY_PACKETS", 60)
    async with linked("quic-1200") as pair:
        await transfer(pair, MiB)
        await transfer(pair, MiB, first=2)
        assert pair.client.pongs == 0  # the ping that carries an update is nobody's business
        phases = {
            user.carrier._quic._cryptos[tls.Epoch.ONE_RTT].recv.secret  # type: ignore[attr-defined]
            for user in (pair.client, pair.server)
        }
        assert len(phases) == 2


async def test_keys_are_updated_under_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets_module, "_KEY_PACKETS", 100)
    async with linked("quic-lossy") as pair:
        await transfer(pair, 300_000)


async def test_the_largest_datagram_grows_with_what_the_path_takes() -> None:
    async with linked("quic-auto") as pair:
        for user, other in ((pair.client, pair.server), (pair.server, pair.client)):
            await met(lambda: user.carrier.datagram_limit > 16_000)  # noqa: B023
            assert user.carrier.send_datagram(bytes(16_000))
            user.carrier.flush()
            await other.until(lambda: other.datagrams)  # noqa: B023
            assert other.datagrams == [bytes(16_000)]
            assert user.carrier.snapshot()["datagram_size"] == 16_368


async def test_a_fixed_size_of_datagrams_stays() -> None:
    async with linked("quic-1200") as pair:
        await transfer(pair, MiB)
        for user in (pair.client, pair.server):
            assert user.carrier.snapshot()["datagram_size"] == 1_200
            assert user.carrier.datagram_limit < 1_200


async def test_without_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems where a run of datagrams cannot cross the kernel in one call."""
    monkeypatch.setattr(udp, "_set", lambda *_: False)
    async with linked("quic") as pair:
        await transfer(pair, MiB)
        door = pair.listener._doors[0].socket
        assert not door._segmented and not door._gathered


async def test_one_side_without_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    real = udp._set
    served = iter((False,) * 4)  # the options of the listener's socket, which comes first
    monkeypatch.setattr(udp, "_set", lambda *given: next(served, True) and real(*given))
    async with linked("quic") as pair:
        await transfer(pair, MiB)
        assert not pair.listener._doors[0].socket._segmented


async def test_chacha20() -> None:
    """A client without AES offers but ChaCha20, whose header protection has its own form."""
    suite = [tls.CipherSuite.CHACHA20_POLY1305_SHA256]
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    listener = await quic.listen(
        Address.parse("aqueduct://127.0.0.1:0"), DEFAULT, TLS, accepted.set_result
    )
    listener.configuration.cipher_suites = suite
    carrier = await quic.connect(Address.parse(listener.addresses[0]), DEFAULT)
    pair = Pair(Recorder(carrier, DEFAULT), Recorder(await accepted, DEFAULT))
    await transfer(pair, 300_000)
    keys = carrier._quic._cryptos[tls.Epoch.ONE_RTT]
    assert keys.send.cipher_suite == suite[0]
    carrier.abandon(OVER)
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)
    pair.check()


async def test_small_socket_buffers_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(udp, "_warned", [])
    wishes = dataclasses.replace(
        DEFAULT, quic=dataclasses.replace(DEFAULT.quic, socket_buffer=1 << 30)
    )
    with caplog.at_level(logging.WARNING, "aqueduct.carriers.quic"):
        async with linked("quic", wishes), linked("quic", wishes):
            pass
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert "sysctl -w net.core.rmem_max=1073741824 net.core.wmem_max=1073741824" in texts[0]


async def test_cubic() -> None:
    config = dataclasses.replace(
        DEFAULT, quic=dataclasses.replace(DEFAULT.quic, congestion_control="cubic")
    )
    async with linked("quic-lossy", config) as pair:
        await transfer(pair, 300_000)


async def test_the_window_is_capped() -> None:
    config = dataclasses.replace(
        DEFAULT, quic=dataclasses.replace(DEFAULT.quic, transport_buffer=300_000)
    )
    async with linked("quic", config, server_window=32 * MiB) as pair:
        seen: list[int] = []
        pair.server.hooks.append(
            lambda: seen.append(int(str(pair.client.carrier.snapshot()["in_flight"])))
        )
        await pair.client.until(lambda: pair.client.begun)
        pair.client.send(0, bytes(8 * MiB), fin=True)
        await pair.server.until_ended(0)
        assert 100_000 < max(seen) <= 300_000  # and what is in flight fills it


async def test_idle_streams_are_not_visited() -> None:
    async with linked("quic-1200") as pair:
        await pair.client.until(lambda: pair.client.begun)
        for number in range(300):
            pair.client.carrier.write(number, [b"open"], False)
        pair.client.carrier.flush()
        await pair.server.until(lambda: len(pair.server.data) == 300)
        await pair.client.until(lambda: len(pair.client.written_by) == 300)
        visits = 0
        quic_connection = pair.client.carrier._quic  # type: ignore[attr-defined]
        fill = quic_connection._fill

        def counting(room: int, handlers: Any) -> bytes:
            nonlocal visits
            visits += len(quic_connection._data_queue) + len(quic_connection._streams_queue)
            plain: bytes = fill(room, handlers)
            return plain

        quic_connection._fill = counting
        pair.client.send(0, bytes(MiB))
        await pair.server.until(lambda: len(pair.server.data[0]) == MiB + 4)
        packets = MiB // 1200
        assert packets <= visits < 3 * packets  # the one busy stream, and no other
        for user in (pair.client, pair.server):
            assert user.carrier.snapshot()["streams_with_work"] == 0


# early and late


async def test_what_came_before_the_user_is_kept_for_it() -> None:
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    listener = await quic.listen(
        Address.parse("aqueduct://127.0.0.1:0"), DEFAULT, TLS, accepted.set_result
    )
    carrier = await quic.connect(Address.parse(listener.addresses[0]), DEFAULT)
    client = Recorder(carrier, DEFAULT)
    await client.until(lambda: client.begun)
    client.send(0, b"early ", b"bird", fin=True)
    await client.until(lambda: client.written_by == {0: 10})  # it has arrived
    server = Recorder(await accepted, DEFAULT)
    await server.until_ended(0)
    assert server.data == {0: b"early bird"}
    carrier.close(2, "over")
    late = await accepted
    await server.until(lambda: server.lost)
    assert late.error is server.lost[0]
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)


async def test_a_connection_lost_before_it_has_a_user() -> None:
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    listener = await quic.listen(
        Address.parse("aqueduct://127.0.0.1:0"), DEFAULT, TLS, accepted.set_result
    )
    carrier = await quic.connect(Address.parse(listener.addresses[0]), DEFAULT)
    late = await accepted
    carrier.close(9, "never mind")
    await met(lambda: late.error is not None)
    server = Recorder(late, DEFAULT)
    await server.until(lambda: server.lost)
    assert server.begun == 1
    assert server.lost[0].code == 9
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)


async def test_a_peer_that_breaks_the_rules_of_quic_is_cut_off() -> None:
    async with linked("quic", server_window=None) as pair:
        await transfer(pair, 1000)
        rogue = pair.client.carrier._quic  # type: ignore[attr-defined]
        rogue._remote_max_stream_data_uni = 1 << 40  # it takes more than it was given
        pair.client.send(2, bytes(MiB))
        await pair.server.until(lambda: pair.server.lost)
        await pair.client.until(lambda: pair.client.lost)
        assert "Over stream data limit" in str(pair.server.lost[0])
        assert not pair.server.lost[0].remote
        assert pair.client.lost[0].remote
        assert pair.client.lost[0].code is None
        assert "Over stream data limit" in str(pair.client.lost[0])


class Other(QuicConnectionProtocol):
    """aioquic as it is: another implementation, for all that the carrier knows."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.data: dict[int, bytes] = {}
        self.ended: asyncio.Queue[int] = asyncio.Queue()
        self.over: asyncio.Future[events.ConnectionTerminated] = self._loop.create_future()

    def quic_event_received(self, event: events.QuicEvent) -> None:
        if isinstance(event, events.StreamDataReceived):
            self.data[event.stream_id] = self.data.get(event.stream_id, b"") + event.data
            if event.end_stream:
                self.ended.put_nowait(event.stream_id)
        elif isinstance(event, events.ConnectionTerminated):
            self.over.set_result(event)


@contextlib.asynccontextmanager
async def other_client() -> AsyncIterator[tuple[Any, Recorder]]:
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    listener = await quic.listen(
        Address.parse("aqueduct://[::]:0"), DEFAULT, TLS, accepted.set_result
    )
    port = Address.parse(listener.addresses[0]).port
    configuration = QuicConfiguration(
        alpn_protocols=["aqueduct"], verify_mode=ssl.CERT_NONE, max_datagram_frame_size=1200
    )
    async with aioquic_connect(
        "localhost", port, configuration=configuration, create_protocol=Other
    ) as protocol:
        server = Recorder(await accepted, DEFAULT)
        await server.until(lambda: server.begun)
        yield protocol, server
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)
    assert not server.failures


async def test_with_another_implementation() -> None:
    async with other_client() as (client, server):
        data = random.Random(1).randbytes(500_000)
        for number in range(3):
            client._quic.send_stream_data(2 + 4 * number, data[number:], True)
        client.transmit()
        for number in range(3):
            server.send(number, data[number * 2 :], fin=True)
        await server.until_ended(0, 1, 2)
        assert all(server.data[number] == data[number:] for number in range(3))
        ended = [await asyncio.wait_for(client.ended.get(), DEADLINE) for _ in range(3)]
        assert sorted(ended) == [3, 7, 11]
        assert client.data == {3 + 4 * number: data[number * 2 :] for number in range(3)}
        assert 1000 < server.carrier.datagram_limit < 1200
        server.carrier.close(77, "bye")
        end = await asyncio.wait_for(client.over, DEADLINE)
        assert (end.error_code, end.frame_type, end.reason_phrase) == (77, None, "bye")


@pytest.mark.requirement("AQ-8")
async def test_bidirectional_streams_are_not_taken() -> None:
    async with other_client() as (client, server):
        assert client._quic._remote_max_streams_bidi == 0
        client._quic._remote_max_streams_bidi = 5
        client._quic._remote_max_stream_data_bidi_remote = 1000
        client._quic.send_stream_data(0, b"hello")
        client.transmit()
        await server.until(lambda: server.lost)
        assert "Too many streams open" in str(server.lost[0])


async def test_a_fault_in_the_library_ends_one_connection_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked("quic") as pair, linked("quic") as other:
        await transfer(pair, 1000)

        def broken(*_: Any) -> None:
            raise AssertionError("not even wrong")

        pair.server.carrier._quic.receive = broken  # type: ignore[attr-defined]
        pair.client.send(2, b"hello")
        await pair.server.until(lambda: pair.server.lost)
        await pair.client.until(lambda: pair.client.lost)
        assert "internal error" in str(pair.client.lost[0])
        await transfer(other, 1000)
    assert "not even wrong" in caplog.text


async def test_the_loop_is_shared_with_others() -> None:
    """A long transfer leaves turns to other work: counted in bytes a turn."""
    async with linked("quic", server_window=64 * MiB) as pair:
        await pair.client.until(lambda: pair.client.begun)
        pair.client.send(0, bytes(32 * MiB), fin=True)
        turns = 0
        most = before = 0
        while 0 not in pair.server.ended:
            await asyncio.sleep(0)
            turns += 1
            most, before = max(most, pair.server.total - before), pair.server.total
        assert most <= 4 * MiB
        assert turns > 10


def test_the_error_of_a_connection_is_a_connection_error() -> None:
    assert issubclass(ConnectionLost, ConnectionError)
