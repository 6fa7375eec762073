"""Peers that lie, guess, hoard or hurry: a clear reason, bounded work, and other links go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from aqueduct import relink
from aqueduct.config import Config
from aqueduct.errors import ConnectFailed, LinkLost
from aqueduct.protocol.relink import handshake
from aqueduct.protocol.relink.cost import CHANNEL_COST, message_cost
from aqueduct.protocol.relink.handshake import Opening
from tests.relink.pairs import BRISK, brisk, eventually, within
from tests.relink.peers import (
    ScriptedListener,
    ScriptedPeer,
    ack,
    general,
    message,
    operation,
    packets,
)

NEW = Opening("", 4, 4)
RESUME = general(packets.RESUME)


def old(peer: ScriptedPeer) -> Opening:
    """What resumes the link of a peer."""
    return replace(NEW, require_old_link=True, old_epoch=peer.epoch, old_link=peer.link)


@asynccontextmanager
async def echoing(config: Config = BRISK) -> AsyncIterator[relink.RelinkServer]:
    """A server that sends back what comes, on the same channel."""

    async def handler(connection: relink.RelinkConnection) -> None:
        async for channel in connection.incoming():
            async for found in channel:
                await connection.channel(channel.identifier).send(*found.parts)

    server = await relink.serve(handler, "aqueduct+tcp://127.0.0.1:0", config=config)
    async with server:
        yield server
        for each in tuple(server.links):
            each.abandon("the test is over")


async def goes_on(server: relink.RelinkServer, config: Config = BRISK) -> None:
    """An honest client is served."""
    async with await relink.connect(server.address, config=config) as client:
        await client.channel(1).send(b"hello")
        found = await within(client.accept())
        assert found is not None
        assert bytes((await within(found.receive())).parts[0]) == b"hello"
        found.consume()


async def lost(connection: relink.RelinkConnection) -> LinkLost:
    """The error of a link that is lost."""
    with pytest.raises(LinkLost) as caught:
        async with asyncio.timeout(20):
            while await connection.accept() is not None:
                pass
    return caught.value


# ------------------------------------------------------------ handshakes


@pytest.mark.requirement("RL-R4")
async def test_a_connector_of_a_later_version_is_answered_with_ours() -> None:
    async with echoing() as server:
        peer = await ScriptedPeer.connect(server.address)
        peer.say(bytes([7]) + bytes(7))
        assert await peer.exactly(8) == bytes(8)
        peer.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (bytes([1]) + bytes(7), "version 1"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "version 72"),
        (bytes(8) + handshake.encode_reply(5, 0), "refuses a link"),
        (bytes(8) + bytes(8) + b"\xff" * 8, "2\\^63"),
        (b"", "closed before its handshake"),
    ],
    ids=["version", "http", "refusal", "id", "nothing"],
)
async def test_listeners_that_are_none(answer: bytes, reason: str) -> None:
    async with ScriptedListener() as listener:
        connecting = asyncio.create_task(relink.connect(listener.address, config=BRISK))
        peer = await listener.accept()
        await peer.exactly(8)
        peer.say(answer)
        await asyncio.sleep(0.05)
        peer.close()
        with pytest.raises(ConnectFailed, match=reason):
            await within(connecting)


async def test_a_listener_that_says_nothing_is_given_up_in_time() -> None:
    config = replace(BRISK, timing=replace(BRISK.timing, connect_timeout=0.2))
    async with ScriptedListener() as listener:
        with pytest.raises(ConnectFailed, match=r"no answer within 0\.2 s \(Timing"):
            await relink.connect(listener.address, config=config)
        config = brisk(handshake_deadline=0.1)
        with pytest.raises(ConnectFailed, match=r"no answer within 0\.1 s \(Relink"):
            await relink.connect(listener.address, config=config)


async def test_an_answer_that_comes_with_the_deadline_is_an_answer() -> None:
    """The loop was busy, and finds both at once."""
    async with ScriptedListener() as listener:
        config = brisk(handshake_deadline=0.3)
        connecting = asyncio.create_task(relink.connect(listener.address, config=config))
        peer = await listener.accept()
        answered = asyncio.get_running_loop().time()
        await peer.welcome(7, 1)
        _be_busy_until(answered + 0.4)
        client = await within(connecting)
        assert client.state == "up"
        peer.close()
        again = await listener.accept()
        await again.welcome(7)
        _be_busy_until(asyncio.get_running_loop().time() + 0.4)
        await eventually(lambda: client.attached)
        again.say(RESUME)
        await eventually(lambda: client.state == "up")
        assert client.link.resumes == 1
        client.abandon("the test is over")


def _be_busy_until(when: float) -> None:
    """Keeps the event loop from running."""
    time.sleep(max(0.0, when - asyncio.get_running_loop().time()))


async def test_a_listener_that_cuts_after_each_resume_is_not_dialled_without_a_pause() -> None:
    async with ScriptedListener() as listener:
        connecting = asyncio.create_task(relink.connect(listener.address, config=brisk(resumes=20)))
        peer = await listener.accept()
        await peer.welcome(7, 1)
        client = await within(connecting)
        peer.close()
        began = time.monotonic()
        for _ in range(10):
            peer = await listener.accept()
            await peer.welcome(7)
            peer.say(RESUME)
            assert (await peer.packet()).type == packets.RESUME
            peer.close()
        assert time.monotonic() - began >= 9 / 20 - 0.05
        client.abandon("the test is over")


@pytest.mark.requirement("RL-5")
@pytest.mark.parametrize(
    "wrong",
    [
        handshake.encode_opening(replace(NEW, endpoint="other")),
        handshake.encode_opening(replace(NEW, listener_transactions=True)),
        b"\x02\xff\xfe\x04\x04" + bytes(40),
        b"\x00\x09\x04" + bytes(40),
    ],
    ids=["endpoint", "transactions", "utf-8", "id size"],
)
async def test_openings_that_cannot_be(wrong: bytes) -> None:
    async with echoing() as server:
        peer = await ScriptedPeer.connect(server.address)
        peer.say(handshake.encode_hello(), wrong)
        assert await peer.exactly(8) == bytes(8)
        assert await peer.is_closed()
        peer.close()
        assert not server.links
        await goes_on(server)


@pytest.mark.requirement("RL-R18")
async def test_guessed_ids_and_epochs_are_unknown_and_slowed_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with echoing(brisk(unknown_links=20)) as server:
        real = await ScriptedPeer.connect(server.address)
        await real.greet(NEW)
        answered = 0
        guesses = [
            replace(old(real), old_epoch=real.epoch + 10**15),
            replace(old(real), old_epoch=1),
            *(replace(old(real), old_link=guess) for guess in range(1, 60)),
        ]
        for guess in guesses:
            peer = await ScriptedPeer.connect(server.address)
            peer.say(handshake.encode_hello(), handshake.encode_opening(guess))
            assert await peer.exactly(8) == bytes(8)
            try:
                assert await peer.exactly(16) == handshake.encode_reply(real.epoch, 0)
                answered += 1
            except asyncio.IncompleteReadError:
                pass
            assert await peer.is_closed()
            peer.close()
        assert 20 <= answered < 61
        assert len(server.links) == 1
        real.say(message(b"x"))
        assert (await real.packet()).channel == 1
        real.close()
        assert str(real.link) not in caplog.text


async def test_ten_thousand_half_handshakes() -> None:
    """They hold no more places than there are, and an honest client gets one in time."""
    config = replace(
        BRISK,
        timing=replace(BRISK.timing, handshake_silence=0.01),
        byte_stream=replace(BRISK.byte_stream, half_open=64),
    )
    async with echoing(config) as server:
        most = 0
        writers: list[ScriptedPeer] = []
        for number in range(10_000):
            peer = await ScriptedPeer.connect(server.address)
            if number % 2:
                peer.say(bytes(number % 12))
            writers.append(peer)
            if len(writers) > 200:
                writers.pop(0).close()
            most = max(most, server.handshakes)
            if number % 2500 == 2000:
                await goes_on(server, config)
        assert most <= 64
        await goes_on(server, config)
        for peer in writers:
            peer.close()
        assert not server.links


async def test_a_half_handshake_ends_in_time() -> None:
    async with echoing(brisk(handshake_deadline=0.2)) as server:
        peer = await ScriptedPeer.connect(server.address)
        peer.say(bytes(8), b"\x05abc")
        began = time.monotonic()
        assert await peer.is_closed()
        assert time.monotonic() - began < 10
        peer.close()
        assert server.handshakes == 0


# ------------------------------------------------------------ resumes


async def test_a_peer_that_resumes_all_the_time_costs_bounded_work() -> None:
    async with echoing(brisk(resumes=10, handshake_deadline=2.0)) as server:
        hasty = await ScriptedPeer.connect(server.address)
        await hasty.greet(NEW)
        hasty.say(message(b"x"))
        await hasty.packet()
        (link,) = server.links
        began = time.monotonic()
        peers = []
        for _ in range(500):
            peer = await ScriptedPeer.connect(server.address)
            peer.say(handshake.encode_hello(), handshake.encode_opening(old(hasty)), RESUME)
            peers.append(peer)
            await asyncio.sleep(0.001)
        await goes_on(server)
        took = time.monotonic() - began
        assert link.link.resumes <= 10 + 10 * took + 1
        for peer in (hasty, *peers):
            peer.close()
        await eventually(lambda: not server.handshakes)


@pytest.mark.requirement("RL-R11")
@pytest.mark.parametrize(
    ("resumed", "reason"),
    [
        ([ack(packets.RECEIVED, 0), RESUME], "has received message 0"),
        ([ack(packets.RECEIVED, 9), RESUME], "3 were sent"),
        ([RESUME], "says nothing of it"),
        ([ack(packets.RECEIVED, 2), RESUME, RESUME], "RESUME on a link that is UP"),
        ([ack(packets.RECEIVED, 2), message(b"early"), RESUME], "before the resume"),
        ([operation(packets.CLOSE), RESUME], "before the resume"),
        ([ack(packets.COMMITTED, 2), RESUME], "no transactions"),
        ([ack(packets.RECEIVED, 2, channel=9), RESUME], "channel 9, which is not open"),
    ],
    ids=["backwards", "too much", "nothing", "twice", "message", "close", "results", "channel"],
)
async def test_listeners_that_lie_in_a_resume(resumed: list[bytes], reason: str) -> None:
    async with ScriptedListener() as listener:
        connecting = asyncio.create_task(relink.connect(listener.address, config=BRISK))
        peer = await listener.accept()
        await peer.welcome(7, 1)
        client = await within(connecting)
        for text in (b"a", b"b", b"c"):
            await client.channel(1).send(text)
        await peer.packets(3)
        peer.say(ack(packets.RECEIVED, 1))
        await eventually(lambda: client.link.unacknowledged == 1)
        peer.close()
        again = await listener.accept()
        opening = await again.welcome(7)
        assert (opening.old_epoch, opening.old_link, opening.require_old_link) == (7, 1, True)
        again.say(*resumed)
        error = await lost(client)
        assert error.why == "violation"
        assert reason in str(error)
        assert error.unconsumed == {1: [0, 1, 2]}


async def test_a_resume_on_a_new_link() -> None:
    async with echoing() as server:
        peer = await ScriptedPeer.connect(server.address)
        await peer.greet(NEW)
        peer.say(RESUME)
        assert await peer.is_closed()
        peer.close()
        await eventually(lambda: not server.links)
        await goes_on(server)


@pytest.mark.parametrize(
    "bad",
    [
        ack(packets.RECEIVED, 5),
        ack(packets.CONSUMED, channel=3),
        operation(packets.COMMIT),
        bytes([0xFF]) * 64,
        packets.encode_message_head((1,), 4, [1 << 40]),
        message(*[b""] * 70_000),
    ],
    ids=["ack", "channel", "commit", "garbage", "large", "parts"],
)
async def test_packets_that_may_not_be_end_that_link_alone(
    bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with echoing() as server:
        peer = await ScriptedPeer.connect(server.address)
        await peer.greet(NEW)
        peer.say(bad)
        assert await peer.is_closed()
        peer.close()
        assert "broke Relink" in caplog.text
        again = await ScriptedPeer.connect(server.address)
        again.say(handshake.encode_hello(), handshake.encode_opening(old(peer)))
        assert await again.exactly(24) == bytes(8) + handshake.encode_reply(peer.epoch, 0)
        again.close()
        await goes_on(server)


async def test_a_peer_that_never_acknowledges_fills_a_window_and_no_more() -> None:
    async with ScriptedListener() as listener:
        config = brisk(window_messages=10, ack_deadline=0.2, keep=2.0)
        connecting = asyncio.create_task(relink.connect(listener.address, config=config))
        peer = await listener.accept()
        await peer.welcome(7, 1)
        client = await within(connecting)
        for _ in range(10):
            await client.channel(1).send(bytes(100))
        with pytest.raises(TimeoutError):
            await client.channel(1).send(bytes(100), timeout=0.1)
        assert client.snapshot().held_bytes == CHANNEL_COST + 10 * message_cost(100, 1)
        again = await listener.accept()  # it has given the first connection up
        await again.welcome(7)
        again.say(RESUME)
        assert [len((await again.packet()).data) for _ in range(11)] == [0, *[100] * 10]
        client.abandon("the test is over")


@pytest.mark.requirement("RL-R17")
async def test_a_peer_that_answers_pings_and_never_acknowledges_is_given_up() -> None:
    async with ScriptedListener() as listener:
        config = brisk(ack_deadline=0.2)
        connecting = asyncio.create_task(relink.connect(listener.address, config=config))
        peer = await listener.accept()
        await peer.welcome(7, 1)
        client = await within(connecting)
        await client.channel(1).send(b"x")
        assert (await peer.packet()).data == b"x"
        with pytest.raises(EOFError):
            await within(peer.packet())
        assert "the peer has read messages and acknowledged none for" in client.cut_by
        again = await listener.accept()
        await again.welcome(7)
        again.say(RESUME)
        assert [(await again.packet()).data for _ in range(2)] == [b"", b"x"]
        client.abandon("the test is over")


async def test_a_redial_goes_on_through_listeners_that_fail(tmp_path: Path) -> None:
    async with ScriptedListener() as listener:
        connecting = asyncio.create_task(relink.connect(listener.address, config=BRISK))
        first = await listener.accept()
        await first.welcome(7, 1)
        client = await within(connecting)
        first.close()
        for answer in (b"", b"HTTP/1.1 502 Bad Gateway\r\n\r\n", bytes(8)):
            peer = await listener.accept()
            await peer.exactly(8)
            peer.say(answer)
            await asyncio.sleep(0.02)
            peer.close()
        good = await listener.accept()
        await good.welcome(7)
        good.say(RESUME)
        await eventually(lambda: client.state == "up")
        client.abandon("the test is over")
