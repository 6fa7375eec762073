"""``Connection.snapshot``: real traffic, and what is said of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from urllib.parse import urlsplit

import pytest

from aqueduct.config import DEFAULT
from aqueduct.endpoint import Connection, ConnectionSnapshot, Mode, channel, connect, serve
from aqueduct.endpoint.snapshot import ReceiverView, SenderView
from aqueduct.testing.datagram_relay import DatagramRelay
from tests.support.endpoints import TLS, eventually, place

NETWORKS = ("memory", "quic")


def sender_of(connection: Connection, channel_id: int) -> SenderView:
    found = connection.snapshot().channels
    (view,) = (v for v in found if v.id == channel_id)
    assert isinstance(view, SenderView)
    return view


def receiver_of(connection: Connection, channel_id: int) -> ReceiverView:
    found = connection.snapshot().channels
    (view,) = (v for v in found if v.id == channel_id)
    assert isinstance(view, ReceiverView)
    return view


@pytest.mark.parametrize("kind", NETWORKS)
async def test_a_quiet_connection(kind: str) -> None:
    async with place(kind) as world:
        await world.client.ping()
        for each in (world.client, world.server):  # queued until the peer has acknowledged it
            await eventually(lambda each=each: not each.snapshot().queued_bytes)
        for connection, peer in ((world.client, world.server), (world.server, world.client)):
            shot = connection.snapshot()
            assert isinstance(shot, ConnectionSnapshot)
            assert (shot.state, shot.error) == ("open", "")
            assert shot.side == ("client" if connection.is_client else "server")
            assert (shot.peer, shot.local) == (connection.peer, connection.local)
            assert shot.carrier == kind
            assert shot.age > 0
            assert shot.channel_count == len(shot.channels) == 1
            assert shot.channels[0].half == ("sender" if connection.is_client else "receiver")
            assert shot.streams_openable > 100
            assert shot.queued_bytes == shot.receive_budget_used == shot.packets_lost == 0
            assert shot.receive_budget == DEFAULT.flow.receive_budget
            if kind == "quic":
                assert shot.rtt > 0
                assert shot.congestion_window > 1000
            assert peer.peer
        await world.client.close(7, "enough")
        shot = world.client.snapshot()
        assert (shot.state, shot.channels) == ("closed", ())
        assert "enough" not in shot.error  # the reason is the peer's to read
        assert shot.error == str(world.client.error)


@pytest.mark.requirement("AQ-R31")
@pytest.mark.parametrize("kind", NETWORKS)
async def test_queues_and_budgets_in_bytes(kind: str) -> None:
    async with place(kind) as world:
        sender, receiver = await world.pair()
        size, number = 1 << 20, sender._half.channel

        async def fill() -> None:
            while True:
                await sender.send(bytes(size))

        task = asyncio.create_task(fill())
        await eventually(lambda: sender_of(world.client, number).standing == "accessible")
        await eventually(
            lambda: (
                not sender.writable
                and world.server.snapshot().receive_budget_used > 4 * size
                and receiver_of(world.server, number).queued_messages > 0
            )
        )
        mine, shot = sender_of(world.client, number), world.client.snapshot()
        assert mine.queued_bytes == sender.queued
        assert 0 < mine.queued_bytes <= shot.queued_bytes
        assert mine.room_bytes == max(0, DEFAULT.flow.channel_high_water - mine.queued_bytes)
        assert mine.sent >= mine.unsettled > 0
        assert (mine.state, mine.standing, mine.held) == ("open", "accessible", True)
        theirs = receiver_of(world.server, number)
        assert theirs.queued_messages >= 1
        assert theirs.queued_bytes >= theirs.queued_messages * size
        assert theirs.queued_bytes <= world.server.snapshot().receive_budget_used
        assert theirs.streams == 1
        assert theirs.credit_bytes >= 0
        task.cancel()
        await asyncio.sleep(0)
        sent = sender_of(world.client, number).sent
        sender.finish()
        total = sum([message.size async for message in receiver])
        assert total == sent * size
        await eventually(lambda: world.client.snapshot().channel_count == 1)
        for connection in (world.client, world.server):
            # Over QUIC the last frames are queued until the peer has acknowledged them.
            await eventually(lambda side=connection: side.snapshot().queued_bytes == 0)
            assert connection.snapshot().receive_budget_used == 0


@pytest.mark.requirement("AQ-R27")
@pytest.mark.parametrize("kind", NETWORKS)
async def test_what_is_pending_and_what_hangs_on_it(kind: str) -> None:
    async with place(kind) as world:
        outer, _kept = await world.pair()
        way = outer._half.channel
        assert sender_of(world.client, way).standing == "pending"
        await eventually(lambda: sender_of(world.client, way).standing == "accessible")
        inner, away = channel(oneshot=True)
        outer.send_nowait(b"", attachments=[away])
        first = sender_of(world.client, outer._half.channel)
        assert (first.links, first.standing, first.unsettled) == (1, "accessible", 1)
        assert inner._half is not None
        number = inner._half.channel
        pending = sender_of(world.client, number)
        assert (pending.standing, pending.oneshot, pending.creator) == ("pending", True, "client")
        await eventually(lambda: sender_of(world.client, number).standing == "accessible")
        assert sender_of(world.client, outer._half.channel).links == 0
        ids = [view.id for view in world.client.snapshot().channels]
        assert ids == sorted(ids)


@pytest.mark.requirement("AQ-38")
@pytest.mark.parametrize("kind", NETWORKS)
async def test_datagrams_dropped_and_nacked_are_counted(kind: str) -> None:
    async with place(kind) as world:
        sender, receiver = await world.pair(mode=Mode.UNRELIABLE)
        number, room = sender._half.channel, world.client.snapshot().datagram_room
        for index in range(room + 50):
            sender.send_nowait(b"%d" % index)
        assert world.client.snapshot().datagrams_dropped == 50
        assert world.client.snapshot().datagram_room >= 0
        await eventually(lambda: sender_of(world.client, number).nacked == 50)
        assert world.client.snapshot().datagrams_nacked == 50
        assert world.server.snapshot().datagrams_missed == 50
        theirs = receiver_of(world.server, number)
        assert (theirs.nacked, theirs.announced) == (50, room + 50)
        assert theirs.queued_messages == room
        receiver.close()


@pytest.mark.requirement("AQ-R31")
async def test_evictions_are_counted() -> None:
    flow = dataclasses.replace(DEFAULT.flow, channel_receive_bytes=20_000, read_ahead=20_000)
    async with place("memory", dataclasses.replace(DEFAULT, flow=flow)) as world:
        sender, receiver = await world.pair(mode=Mode.UNRELIABLE)
        for _ in range(100):
            await sender.send(bytes(1000))
        await eventually(lambda: world.server.snapshot().datagrams_evicted > 50)
        view = receiver_of(world.server, sender._half.channel)
        assert (
            view.evicted == world.server.snapshot().datagrams_evicted == 100 - view.queued_messages
        )
        assert view.queued_bytes <= 20_000
        receiver.close()


async def test_lost_packets_are_counted() -> None:
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    listen = "aqueduct://127.0.0.1:0?datagram_size=1200"
    async with await serve(arrived.set_result, listen, tls=TLS) as server:
        relay = DatagramRelay(seed=3, drop=0.1)
        address = server.addresses[0]
        port = urlsplit(address).port
        assert port is not None
        outer = await relay.start(port)
        try:
            client = await connect(address.replace(f":{port}", f":{outer}"))
            sender, receiver = channel()
            await client.entrypoint.send(b"", attachments=[receiver])
            (attachment,) = (await (await arrived).entrypoint.receive()).attachments
            for _ in range(20):
                await sender.send(bytes(50_000))
            sender.finish()
            async with asyncio.timeout(60):
                got = [message.size async for message in attachment.handle]
            assert got == [50_000] * 20
            shot = client.snapshot()
            assert relay.dropped > 10
            assert 10 < shot.packets_lost <= relay.dropped + relay.passed
            assert shot.rtt > 0
            assert str(shot.packets_lost) in str(shot)
            await client.close()
        finally:
            relay.close()


@pytest.mark.parametrize("kind", NETWORKS)
async def test_it_is_bounded_and_made_of_plain_values(kind: str) -> None:
    async with place(kind) as world:
        kept = [await world.pair() for _ in range(30)]
        whole, few, none = (world.client.snapshot(channels=count) for count in (100, 10, 0))
        assert whole.channel_count == few.channel_count == none.channel_count == 31
        assert (len(whole.channels), len(few.channels), len(none.channels)) == (31, 10, 0)
        assert few.channels == whole.channels[:10]
        document = json.loads(whole.to_json())
        assert document == json.loads(json.dumps(whole.to_dict()))
        assert len(document["channels"]) == 31
        with pytest.raises(dataclasses.FrozenInstanceError):
            whole.peer = "nobody"  # type: ignore[misc]
        line = str(whole)
        assert "\n" not in line
        assert "31 channels" in line
        assert world.client.peer in line
        assert len(kept) == 30
