"""Links over connections that are cut: what comes again, what does not, and when a link is lost."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduct import relink
from aqueduct.carriers.certificates import dev_certificate
from aqueduct.errors import LinkLost
from aqueduct.protocol.relink.handshake import Opening
from aqueduct.testing.stream_relay import End, Fate, StreamRelay
from tests.relink.pairs import BRISK, FAMILIES, Pair, brisk, eventually, joined, within
from tests.relink.peers import ScriptedPeer, general, message, packets
from tests.support.programs import python


async def _count_to(channel: relink.RelinkChannel, last: int, size: int = 0) -> None:
    for number in range(last):
        await channel.send(b"%d" % number, bytes(size))
    await channel.close()


async def _numbers(connection: relink.RelinkConnection) -> list[int]:
    found = await connection.accept()
    assert found is not None
    return [int(bytes(message.parts[0])) async for message in found]


async def _both(pair: Pair) -> tuple[list[int], list[int]]:
    one, other = await asyncio.gather(_numbers(pair.server), _numbers(pair.client))
    return one, other


async def cut(proxy: StreamRelay, pair: Pair, *, end: End = End.RESET) -> None:
    """Cuts the connection, and waits until both sides messages flow again."""
    before = pair.client.link.resumes, pair.server.link.resumes
    proxy.links[-1].cut(end)
    await eventually(
        lambda: (
            pair.client.link.resumes > before[0]
            and pair.server.link.resumes > before[1]
            and pair.client.state == pair.server.state == "up"
        )
    )


@pytest.mark.requirement("RL-R12")
@pytest.mark.parametrize("family", [*FAMILIES, "tls"])
@pytest.mark.parametrize("end", [End.RESET, End.FIN])
async def test_a_cut_is_not_seen_by_either_application(
    family: str, end: End, tmp_path: Path
) -> None:
    proxy = StreamRelay()
    tls = dev_certificate() if family == "tls" else None
    async with joined(family, tmp_path, proxy=proxy, tls=tls) as pair:
        sending = asyncio.create_task(_count_to(pair.client.channel(1), 200, 5000))
        back = asyncio.create_task(_count_to(pair.server.channel(1), 200, 100_000))
        got = asyncio.create_task(_both(pair))
        for _ in range(3):
            await cut(proxy, pair, end=end)
        assert await within(got) == (list(range(200)),) * 2
        await within(asyncio.gather(sending, back))
        assert pair.client.snapshot().held_bytes == pair.server.snapshot().held_bytes == 0
        assert pair.client.snapshot().resumes == 3
        assert len(pair.listener.links) == 1


@pytest.mark.requirement("RL-R12")
@pytest.mark.parametrize("seed", range(3))
async def test_every_connection_is_cut_after_some_bytes(seed: int, tmp_path: Path) -> None:
    """Each connection passes less than all that is sent: also in the middle of large parts."""
    up = Fate(limit=30_000 + 7919 * seed, end=End.RESET, chop=True)
    proxy = StreamRelay(up=up, down=replace(up, limit=20_000 + 104_729 * seed), seed=seed)
    async with joined("tcp", tmp_path, proxy=proxy) as pair:
        sending = asyncio.create_task(_count_to(pair.client.channel(1), 100, 9000))
        back = asyncio.create_task(_count_to(pair.server.channel(2), 100, 3000))
        assert await within(_both(pair)) == (list(range(100)),) * 2
        await within(asyncio.gather(sending, back))
        assert pair.client.link.resumes >= 10


async def test_states_while_there_is_no_connection(tmp_path: Path) -> None:
    proxy = StreamRelay()
    async with joined("tcp", tmp_path, proxy=proxy) as pair:
        began = time.time()
        proxy.link.up.stall()
        proxy.link.down.stall()
        proxy.up = proxy.down = Fate(limit=0)  # nothing passes any more
        proxy.link.cut()
        await eventually(lambda: pair.client.state == pair.server.state == "resuming")
        for side in (pair.client, pair.server):
            since = side.snapshot().resuming_since
            assert since is not None
            assert began - 1 <= since <= time.time()
        assert await pair.client.channel(1).send(b"waits") == 0
        assert pair.client.snapshot().unacknowledged == 0
        assert "resuming" in repr(pair.client)
        proxy.up = proxy.down = Fate()
        for link in proxy.links:
            link.close()
        await eventually(lambda: pair.client.state == pair.server.state == "up")
        found = await within(pair.server.accept())
        assert found is not None
        assert bytes((await found.receive()).parts[0]) == b"waits"
        assert pair.client.snapshot().resuming_since is None


@pytest.mark.requirement("RL-R17")
@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_connection_that_swallows_bytes_is_given_up(way: str, tmp_path: Path) -> None:
    """No reset comes: the one who waits for an acknowledgement finds out."""
    proxy = StreamRelay()
    async with joined("tcp", tmp_path, brisk(ack_deadline=0.3), proxy=proxy) as pair:
        await pair.client.channel(1).send(b"one")
        found = await within(pair.server.accept())
        assert found is not None
        await found.receive()
        getattr(proxy.link, way).stall()
        await pair.client.channel(1).send(b"two")
        await eventually(lambda: pair.client.link.resumes == 1)
        assert bytes((await within(found.receive())).parts[0]) == b"two"


@pytest.mark.requirement("RL-R17")
@pytest.mark.parametrize("family", ["tcp", "tls"])
async def test_a_large_message_over_a_slow_network_is_no_silence(
    family: str, tmp_path: Path
) -> None:
    """It takes many times as long as an acknowledgement may."""
    slow = Fate(delay=0.1, piece=32_768)
    config = brisk(ack_deadline=0.4)
    tls = dev_certificate() if family == "tls" else None
    proxy = StreamRelay(up=slow, down=slow, buffer=65_536)
    async with joined(family, tmp_path, config, proxy=proxy, tls=tls) as pair:
        payload = bytes(range(256)) * (16 << 10)
        began = time.monotonic()
        await pair.client.channel(1).send(payload)
        found = await within(pair.server.accept())
        assert found is not None
        assert bytes((await within(found.receive())).parts[0]) == payload
        assert time.monotonic() - began > 2 * config.relink.ack_deadline
        assert pair.client.snapshot().resumes == 0


@pytest.mark.requirement("RL-R16")
async def test_a_link_that_nobody_resumes_is_lost_on_both_sides_after_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = StreamRelay()
    async with joined("tcp", tmp_path, brisk(keep=0.5), proxy=proxy) as pair:
        await pair.server.channel(4).send(b"never consumed")
        waiting = asyncio.create_task(pair.client.accept())
        await within(waiting)
        sent = [await pair.client.channel(3).send(b"x") for _ in range(3)]
        proxy.up = proxy.down = Fate(limit=0)
        proxy.link.cut()
        began = time.monotonic()
        for side, unknown in ((pair.client, {3: sent}), (pair.server, {4: [0]})):
            with pytest.raises(LinkLost, match=r"Relink\.keep") as caught:
                await within(_lost(side))
            assert caught.value.why == "expired"
            assert dict(caught.value.unconsumed) == unknown
            assert caught.value.unconfirmed == {}
        assert time.monotonic() - began < 10
        assert not pair.listener.links
        assert f"link {pair.server.name} with" in caplog.text


async def _lost(side: relink.RelinkConnection) -> None:
    """Waits until the link is lost, as somebody who listens does."""
    while await side.accept() is not None:
        pass


async def test_the_time_runs_until_messages_flow_not_until_a_handshake(tmp_path: Path) -> None:
    """A listener that agrees on the old link and never resumes it."""
    proxy = StreamRelay()
    config = brisk(keep=3.0, handshake_deadline=0.2)
    async with joined("tcp", tmp_path, config, proxy=proxy) as pair:
        # Hello, and the answer with the old link: 24 bytes. The resume does not pass.
        proxy.down = Fate(limit=24)
        proxy.link.cut()
        with pytest.raises(LinkLost, match="no resume came within"):
            await within(_lost(pair.client))
        assert len(proxy.links) > 2


@pytest.mark.requirement("RL-R18")
async def test_the_newest_connection_has_the_link_and_the_older_one_is_refused(
    tmp_path: Path,
) -> None:
    got: list[bytes] = []

    async def handler(connection: relink.RelinkConnection) -> None:
        async for channel in connection.incoming():
            async for found in channel:
                got.extend(map(bytes, found.parts))

    address = "aqueduct+tcp://127.0.0.1:0"
    async with await relink.serve(handler, address, config=BRISK) as server:
        first = await ScriptedPeer.connect(server.address)
        epoch, link = await first.greet(Opening("", 4, 4))
        first.say(message(b"one"))
        await eventually(lambda: got == [b"one"])
        second = await ScriptedPeer.connect(server.address)
        old = Opening("", 4, 4, require_old_link=True, old_epoch=epoch, old_link=link)
        assert await second.greet(old) == (epoch, link)
        first.say(message(b"from the older one"))
        assert await first.is_closed()
        found = await second.packet()
        assert (found.type, found.sequence) == (packets.RECEIVED, 0)
        second.say(general(packets.RESUME), message(b"two"))
        await eventually(lambda: got == [b"one", b"two"])
        assert len(server.links) == 1
        first.close()
        second.close()
        for each in tuple(server.links):
            each.abandon("the test is over")


PROGRAM = """
import asyncio, sys
from aqueduct import relink

async def handler(connection):
    async for channel in connection.incoming():
        async for message in channel:
            print(bytes(message.parts[0]).decode(), flush=True)

async def main():
    server = await relink.serve(handler, sys.argv[1])
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.requirement("RL-R19")
async def test_a_service_that_was_restarted_has_lost_the_link(tmp_path: Path) -> None:
    async def start() -> asyncio.subprocess.Process:
        found = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, address), stdout=asyncio.subprocess.PIPE
        )
        assert found.stdout is not None
        assert await within(found.stdout.readline()) == b"ready\n"
        return found

    address = f"aqueduct+unix://{tmp_path / 'socket'}"
    service = await start()
    try:
        client = await relink.connect(address, config=BRISK)
        await client.channel(1).send(b"seen")
        assert service.stdout is not None
        assert await within(service.stdout.readline()) == b"seen\n"
        await eventually(lambda: client.snapshot().unacknowledged == 0)
        service.kill()
        await service.wait()
        await eventually(lambda: client.state == "resuming")
        await client.channel(2).send(b"waits")
        service = await start()
        with pytest.raises(LinkLost, match="another instance") as caught:
            await within(_lost(client))
        assert caught.value.why == "restarted"
        assert f"The process that had link {client.name} has ended" in str(caught.value)
        assert 2 in caught.value.unconsumed
        with pytest.raises(LinkLost):
            await client.channel(1).send(b"late")
    finally:
        service.kill()
        await service.wait()


async def test_links_without_a_connection_are_bounded_and_the_oldest_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []

    async def handler(connection: relink.RelinkConnection) -> None:
        try:
            while await connection.accept() is not None:
                pass
        except LinkLost as error:
            ended.append(error.why)

    caplog.set_level(logging.WARNING)
    address = "aqueduct+tcp://127.0.0.1:0"
    async with await relink.serve(handler, address, config=brisk(kept_links=3)) as server:
        peers = []
        for _ in range(6):
            peer = await ScriptedPeer.connect(server.address)
            await peer.greet(Opening("", 4, 4))
            peers.append(peer)
        await eventually(lambda: len(server.links) == 6)
        for peer in peers:
            peer.close()
        await eventually(lambda: len(server.links) == 3)
        await eventually(lambda: ended == ["expired"] * 3)
        assert caplog.text.count("Relink.kept_links is the limit") == 3
        assert all(str(peer.link) not in caplog.text for peer in peers)
        for each in tuple(server.links):
            each.abandon("the test is over")


FORKED = """
import asyncio, os
from aqueduct import relink

async def handler(connection):
    async for channel in connection.incoming():
        async for message in channel:
            await connection.channel(1).send(*message.parts)

async def main():
    async with await relink.serve(handler, "aqueduct+tcp://127.0.0.1:0") as server:
        async with await relink.connect(server.address) as client:
            await client.channel(1).send(b"before")
            back = await client.accept()
            print(bytes((await back.receive()).parts[0]).decode(), flush=True)
            child = os.fork()
            if not child:
                try:
                    asyncio.run(client.channel(1).send(b"child"))
                except BaseException as error:
                    print(type(error).__name__, "connect after the fork" in str(error), flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            await client.channel(1).send(b"after")
            print(bytes((await back.receive()).parts[0]).decode(), flush=True)
            back.consume()
            print(client.snapshot().resumes)

asyncio.run(main())
"""


def test_a_link_in_a_forked_child_is_an_error_and_the_parent_s_goes_on() -> None:
    done = python(FORKED)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n")[:4] == ["before", "ConnectionLost True", "after", "0"]
