"""How long a small message waits behind a large one: counted in bytes, never in time."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from aqueduct.carriers.stream.sockets import take_of
from aqueduct.config import DEFAULT, Bpmux, ByteStream, Config, Flow
from tests.carriers.test_stream_fairness import BODY, SLACK, UNBOUNDED, scene
from tests.carriers.users import STREAMS, Recorder, met, stream_pair

KiB = 1 << 10
MiB = 1 << 20
UNLIMITED = 1 << 40
SIOCOUTQNSD = 0x894B  # linux/sockios.h


class Watcher(Recorder):
    """Notes what has left of stream 0 when the first bytes of another one have."""

    def __init__(self, *arguments: Any) -> None:
        self.passed: dict[int, int] = {}
        super().__init__(*arguments)

    def written(self, stream: int, size: int) -> bool:
        self.passed.setdefault(stream, self.written_by.get(0, 0))
        return super().written(stream, size)


@pytest.mark.parametrize("kind", STREAMS)
async def test_a_small_message_waits_for_what_was_taken_and_no_more(kind: str) -> None:
    """With 1 GiB queued on one stream, at most one chunk leaves before it."""
    config = DEFAULT
    block = memoryview(bytes(16 * MiB))
    async with stream_pair(kind, config) as (client, server, _):
        sender, reader = Watcher(client, config), Recorder(server, config, None)
        await sender.until(lambda: sender.begun)
        await reader.until(lambda: reader.begun)
        for _ in range(64):
            client.write(0, [block], False)
        client.flush()
        await reader.until(lambda: 0 in reader.data)
        reader.limits[0] = UNLIMITED
        for number in range(1, 6):
            # The reader stops until so much is on its way that the kernel takes no more.
            reader.credit(0, sender.written_by.get(0, 0) + 32 * MiB)
            server.flush()
            before = sender.written_by.get(0, 0)
            await sender.until(lambda: sender.written_by.get(0, 0) > before + MiB)  # noqa: B023
            assert client.snapshot()["in_flight"] <= config.bpmux.chunk + 4 * KiB  # type: ignore[operator]
            written = sender.written_by[0]
            client.write(number, [b"small"], True)
            client.flush()
            await sender.until(lambda: number in sender.written_by)  # noqa: B023
            assert sender.passed[number] - written <= config.bpmux.chunk
            await reader.until_ended(number)
        for end in (sender, reader):
            assert not end.failures, end.failures


def unsent(sock: socket.socket) -> int:
    """Bytes that the kernel has taken and not sent."""
    answer = fcntl.ioctl(sock.fileno(), SIOCOUTQNSD, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


async def test_the_kernel_holds_little_that_is_not_sent() -> None:
    mark = 64 * KiB
    config = Config(byte_stream=ByteStream(notsent_lowat=mark), flow=Flow(initial_window=64 * MiB))
    config = dataclasses.replace(config, bpmux=Bpmux(chunk=32 * KiB))
    async with stream_pair("tcp", config) as (client, server, _):
        sender, reader = Recorder(client, config), Recorder(server, config, None)
        await sender.until(lambda: sender.begun)
        await reader.until(lambda: reader.begun)
        client.write(0, [b"x"], False)
        client.flush()
        await met(lambda: client.streams._senders[0].credit_out > 60 * MiB)
        server.transport.pause()  # the peer's kernel fills up, then this one's
        client.write(0, [bytes(60 * MiB)], True)
        client.flush()
        await met(lambda: client.transport.writing)
        assert 0 < unsent(client._sock) <= mark + 256 * KiB
        server.transport.resume()
        await reader.until_ended(0)


async def test_what_a_unix_socket_holds_is_bounded(tmp_path: Path) -> None:
    """By the buffer that was asked for, which the kernel doubles for what a page costs itself."""
    config = dataclasses.replace(UNBOUNDED, byte_stream=DEFAULT.byte_stream)
    async with scene("unix", tmp_path, config) as found:
        bulk, ignored = await found.sender()
        found.drop_all(ignored)
        small, receiver = await found.sender()
        found.way.stall()
        for _ in range(8):
            bulk.send_nowait(BODY)
        await found.let(3 * MiB)
        got = asyncio.create_task(receiver.receive())
        await small.send(b"small")
        passed = await found.passed_until(got.done)
        assert bytes((await got).payload) == b"small"
        assert DEFAULT.byte_stream.unix_buffer / 2 < passed
        assert passed <= DEFAULT.bpmux.chunk + 2 * DEFAULT.byte_stream.unix_buffer + SLACK


async def test_what_leaves_over_tcp_is_whole_segments() -> None:
    """What is left over of a take would be a packet of its own, each time."""
    config = Config(flow=Flow(initial_window=64 * MiB))
    async with stream_pair("tcp", config) as (client, server, _):
        sender, reader = Recorder(client, config), Recorder(server, config, None)
        await sender.until(lambda: sender.begun)
        await reader.until(lambda: reader.begun)
        client.write(0, [b"x"], False)
        client.flush()
        await met(lambda: client.streams._senders[0].credit_out > 60 * MiB)
        server.transport.pause()  # the peer's kernel fills up, then this one's
        client.write(0, [bytes(60 * MiB)], True)
        client.flush()
        await met(lambda: client.transport.writing and client.transport.out.left)
        segment = client._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        assert 0 < client.transport.out.size - client.transport.take <= 16  # the head
        assert client.transport.take == take_of(client._sock, config.bpmux.chunk)
        assert (client.transport.take + 16) % segment == 0
        assert config.bpmux.chunk - segment - 16 < client.transport.take <= config.bpmux.chunk - 16
        server.transport.resume()
        await reader.until_ended(0)


def test_where_nothing_is_known_of_segments_a_take_is_what_it_may_be() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert take_of(one, 100_000) == 100_000
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        segment = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        assert take_of(sock, 3 * segment + 5) == 3 * segment - 16
        assert take_of(sock, segment - 1) == segment - 1
        sock.close()
        assert take_of(sock, 100_000) == 100_000
