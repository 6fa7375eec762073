"""Channels, messages and their windows over a link that is not cut."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aqueduct import relink
from aqueduct.carriers.certificates import dev_certificate
from aqueduct.errors import (
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    Ended,
    LinkLost,
    LocalProtocolError,
)
from tests.relink.pairs import BRISK, FAMILIES, address_for, brisk, eventually, joined, within


def plain(message: relink.RelinkMessage) -> list[bytes]:
    return [bytes(part) for part in message.parts]


@pytest.mark.parametrize("family", FAMILIES)
async def test_messages_of_parts_in_both_directions(family: str, tmp_path: Path) -> None:
    large = bytes(range(256)) * 4096
    async with joined(family, tmp_path) as pair:
        out = pair.client.channel(7)
        assert await out.send(b"one", b"", b"parts") == 0
        assert await out.send(large, memoryview(b"abc")[::1], bytearray(b"xyz")) == 1
        assert await out.send() == 2
        found = await within(pair.server.accept())
        assert found is not None
        assert found.identifier == 7
        assert plain(await found.receive()) == [b"one", b"", b"parts"]
        assert plain(await found.receive()) == [large, b"abc", b"xyz"]
        assert (await found.receive()).parts == []
        await pair.server.channel(1 << 31).send(b"back")
        async for channel in pair.client.incoming():
            assert plain(await channel.receive()) == [b"back"]
            assert channel.identifier == 1 << 31
            break
        assert pair.client.state == pair.server.state == "up"
        assert pair.client.snapshot().resuming_since is None


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_channel_ends_when_it_is_closed_and_opens_again(
    family: str, tmp_path: Path
) -> None:
    async with joined(family, tmp_path) as pair:
        out = pair.client.channel(1)
        for round_ in range(2):
            for number in range(10):
                assert await out.send(b"%d" % (10 * round_ + number)) == number
            closing = asyncio.create_task(out.close())
            found = await within(pair.server.accept())
            assert found is not None
            got = [plain(message)[0] async for message in found]
            assert got == [b"%d" % (10 * round_ + number) for number in range(10)]
            await within(closing)
            with pytest.raises(Ended, match="closed channel 1"):
                await found.receive()
        await out.close()  # it is closed already
        assert pair.client.snapshot().channels == 0
        assert pair.client.snapshot().held_bytes == 0


async def test_both_sides_close_and_nothing_is_lost(tmp_path: Path) -> None:
    got: list[bytes] = []

    async def handler(connection: relink.RelinkConnection) -> None:
        async for channel in connection.incoming():
            async for message in channel:
                got.extend(plain(message))

    async with await relink.serve(handler, "aqueduct+tcp://127.0.0.1:0", config=BRISK) as server:
        async with await relink.connect(server.address, config=BRISK) as client:
            for number in range(100):
                await client.channel(number % 3).send(b"%d" % number)
        assert client.error is not None
        assert client.error.code == 0
        assert client.state == "ended"
        assert sorted(map(int, got)) == list(range(100))
        with pytest.raises(ConnectionLost):
            await client.channel(1).send(b"late")
        assert await client.accept() is None
        await eventually(lambda: not server.links)


@pytest.mark.requirement("RL-R3")
@pytest.mark.parametrize("id_size", [0, 1, 8])
async def test_numbers_of_channels_have_the_size_that_was_agreed_on(id_size: int) -> None:
    got: list[tuple[int, bytes]] = []

    async def handler(connection: relink.RelinkConnection) -> None:
        async for channel in connection.incoming():
            got.extend([(channel.identifier, plain(message)[0]) async for message in channel])

    server = await relink.serve(handler, "aqueduct+tcp://127.0.0.1:0", config=BRISK)
    async with server:
        async with await relink.connect(server.address, id_size=id_size, config=BRISK) as client:
            highest = (1 << 8 * id_size) - 1
            for number in range(3):
                await client.channel(highest).send(b"%d" % number)
            await eventually(lambda: not client.link.unresolved())
            with pytest.raises((LocalProtocolError, ConfigError), match=r"does not fit|2\^64"):
                client.channel(highest + 1)
        assert got == [(highest, b"%d" % number) for number in range(3)]


async def test_a_block_that_fails_gives_the_link_up(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path) as pair:
        with pytest.raises(KeyError):
            async with pair.client as client:
                await client.channel(1).send(b"x")
                raise KeyError
        error = pair.client.error
        assert isinstance(error, LinkLost)
        assert (error.why, error.unconsumed) == ("closed", {1: [0]})
        await eventually(lambda: pair.server.state == "resuming")  # for Relink.keep


async def test_sending_waits_for_room_and_gives_up_in_time(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path, brisk(window_bytes=1000, window_messages=5)) as pair:
        out = pair.client.channel(1)
        for _ in range(5):
            await out.send(b"x")
        with pytest.raises(TimeoutError):
            await out.send(b"y", timeout=0.05)
        waiting = [asyncio.create_task(out.send(bytes(size))) for size in (900, 500, 2000)]
        found = await within(pair.server.accept())
        assert found is not None
        sizes = [len(plain(await within(found.receive()))[0]) for _ in range(8)]
        assert sizes == [1, 1, 1, 1, 1, 900, 500, 2000]  # one alone may be above the window
        assert await asyncio.gather(*waiting) == [5, 6, 7]


async def test_a_reader_that_is_slow_holds_the_sender_back_and_is_not_given_up(
    tmp_path: Path,
) -> None:
    config = brisk(receive_bytes=100_000, ack_deadline=0.2, window_bytes=10_000_000)
    async with joined("tcp", tmp_path, config) as pair:
        payload = bytes(50_000)
        sending = asyncio.create_task(_send_all(pair.client.channel(1), payload, 200))
        found = await within(pair.server.accept())
        assert found is not None
        await eventually(lambda: pair.server.link.full)
        await asyncio.sleep(1.0)  # five times the deadline for acknowledgements
        assert pair.server.snapshot().held_bytes < 300_000
        for _ in range(200):
            assert plain(await within(found.receive())) == [payload]
        await within(sending)
        assert pair.client.snapshot().resumes == 0


async def _send_all(channel: relink.RelinkChannel, payload: bytes, count: int) -> None:
    for _ in range(count):
        await channel.send(payload)


async def test_tls_with_a_pinned_certificate(tmp_path: Path) -> None:
    async with joined("tls", tmp_path, tls=dev_certificate()) as pair:
        payload = bytes(range(256)) * 10_000
        await pair.client.channel(1).send(payload)
        found = await within(pair.server.accept())
        assert found is not None
        assert plain(await within(found.receive())) == [payload]
        wrong = str(pair.listener.address.with_port(pair.listener.address.port))
        wrong = wrong.partition("?")[0]
        with pytest.raises(ConnectFailed, match="not trusted here"):
            await relink.connect(wrong, config=BRISK)
        with pytest.raises(ConnectFailed, match="the server's certificate is sha256:"):
            await relink.connect(f"{wrong}?fingerprint=sha256:{'0' * 64}", config=BRISK)


async def test_who_wants_something_else_is_refused(tmp_path: Path) -> None:
    async def handler(connection: relink.RelinkConnection) -> None:
        assert await connection.accept() is None

    address = "aqueduct+tcp://127.0.0.1:0"
    async with await relink.serve(
        handler, address, endpoint="this", transactions="listener", id_size=2, config=BRISK
    ) as server:
        good: dict[str, Any] = {"endpoint": "this", "transactions": "listener", "id_size": 2}
        for wrong in ({"endpoint": "that"}, {"transactions": "both"}, {"id_size": 3}):
            with pytest.raises(ConnectFailed, match="closed before its handshake"):
                await relink.connect(server.address, config=BRISK, **{**good, **wrong})
        async with await relink.connect(server.address, config=BRISK, **good) as client:
            with pytest.raises(LocalProtocolError, match="does not fit an id of 2 bytes"):
                client.channel(65_536)
            with pytest.raises(LocalProtocolError, match="does not use transactions"):
                client.channel(1).transaction()
        await eventually(lambda: not server.handshakes)


async def test_addresses_that_cannot_be(tmp_path: Path) -> None:
    async def handler(connection: relink.RelinkConnection) -> None:
        raise AssertionError("nobody comes")

    with pytest.raises(ConfigError, match="links of Relink run over"):
        await relink.connect("aqueduct://127.0.0.1:1")
    with pytest.raises(ConfigError, match="needed there"):
        await relink.serve(handler, "aqueduct+tls://127.0.0.1:0")
    with pytest.raises(ConfigError, match="endpoint"):
        await relink.connect("aqueduct+tcp://127.0.0.1:1", endpoint="x" * 256)
    with pytest.raises(ConfigError, match="transactions"):
        await relink.connect("aqueduct+tcp://127.0.0.1:1", transactions="some")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectFailed, match="refused"):
            await relink.connect(f"aqueduct+tcp://127.0.0.1:{unused.getsockname()[1]}")
    with pytest.raises(ConnectFailed, match="No such file"):
        await relink.connect(address_for("unix", tmp_path))


async def test_a_handler_that_fails_loses_its_link_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(connection: relink.RelinkConnection) -> None:
        channel = await connection.accept()
        assert channel is not None
        if plain(await channel.receive()) == [b"bad"]:
            raise ValueError("a fault")
        channel.consume()
        await connection.channel(1).send(b"good")
        assert await connection.accept() is None

    async with await relink.serve(handler, "aqueduct+tcp://127.0.0.1:0", config=BRISK) as server:
        bad = await relink.connect(server.address, config=BRISK)
        async with await relink.connect(server.address, config=BRISK) as good:
            await bad.channel(1).send(b"bad")
            with pytest.raises(LinkLost, match="dropped the link") as caught:
                await within(bad.accept())
            assert caught.value.why == "dropped"
            assert caught.value.unconsumed == {1: [0]}
            await good.channel(1).send(b"fine")
            answer = await within(good.accept())
            assert answer is not None
            assert plain(await within(answer.receive())) == [b"good"]
            answer.consume()
    assert "a fault" in caplog.text


async def test_close_says_what_the_peer_has_not_consumed(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path) as pair:
        await pair.client.channel(1).send(b"never read")
        with pytest.raises(LinkLost, match="1 message that may not be consumed on channel 1") as e:
            await pair.client.close(timeout=0.1)
        assert (e.value.why, e.value.unconsumed, e.value.unconfirmed) == ("closed", {1: [0]}, {})


async def test_what_is_too_large_is_refused_at_once(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path, brisk(message_bytes=1000, parts=3)) as pair:
        out = pair.client.channel(1)
        with pytest.raises(LocalProtocolError, match="message_bytes"):
            await out.send(bytes(1001))
        with pytest.raises(LocalProtocolError, match="parts"):
            await out.send(b"", b"", b"", b"")
        with pytest.raises(LocalProtocolError, match="contiguous"):
            await out.send(memoryview(b"abcdef")[::2])
        assert await out.send(bytes(1000)) == 0


async def test_whose_link_was_ended_is_told_where_the_reason_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other side knows the reason, and the protocol has no word for it."""

    async def handler(connection: relink.RelinkConnection) -> None:
        channel = await connection.accept()
        assert channel is not None
        if plain(await channel.receive()) == [b"abandon"]:
            connection.abandon("it is not wanted")

    config = replace(BRISK, timing=replace(BRISK.timing, close_linger=0.1))
    async with await relink.serve(handler, "aqueduct+tcp://127.0.0.1:0", config=config) as server:
        reasons = {b"never consumed": "within 0.1 s of the close", b"abandon": "it is not wanted"}
        for text, reason in reasons.items():
            client = await relink.connect(server.address, config=config)
            await client.channel(1).send(text)
            with pytest.raises(LinkLost, match="Its log says why") as caught:
                await within(client.wait_closed())
                await client.channel(1).send(b"more")
            assert f"under link {client.name}. Common causes: " in str(caught.value)
            (said,) = [line for line in caplog.messages if reason in line]
            assert said.startswith(f"link {client.name} with ")
