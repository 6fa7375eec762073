"""UDP sockets: runs of datagrams, a kernel that takes no more, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from aqueduct.address import Address
from aqueduct.carriers.quic import udp
from aqueduct.carriers.quic.path_mtu import LARGEST
from aqueduct.carriers.quic.udp import (
    BURST_FRAMES,
    RUN_BYTES,
    RUN_PACKETS,
    UdpSocket,
    datagram_size,
    host_port,
)
from aqueduct.config import DEFAULT, Config, Quic
from tests.carriers.users import DEADLINE


class End:
    """One UdpSocket and what it hears."""

    def __init__(self, sock: socket.socket, connected: bool, size: int = 1 << 20) -> None:
        self.heard: list[bytes] = []
        self.calls: list[int] = []
        self.most = 0
        """So many datagrams it takes in one turn of the loop; 0: all."""
        self.bursts = 0
        self.errors: list[OSError] = []
        self.drained = 0
        self.changed = asyncio.Event()
        self.socket = UdpSocket(
            sock,
            buffer_size=size,
            on_datagrams=self._datagrams,
            on_burst=self._burst,
            on_error=self.errors.append,
            on_writable=self._writable,
            connected=connected,
        )

    def _datagrams(self, buffer: memoryview, size: int, address: Any) -> tuple[int, int]:
        self.calls.append(len(buffer))
        found = [bytes(buffer[at : at + size]) for at in range(0, len(buffer), size)]
        if self.most:
            del found[self.most :]
        self.heard += found
        self.address = address
        return len(found), BURST_FRAMES if self.most else 0

    def _burst(self) -> None:
        self.bursts += 1
        self.changed.set()

    def _writable(self) -> None:
        self.drained += 1
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE):
            while len(self.heard) < count:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[End, End]]:
    first = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    second = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    first.bind(("127.0.0.1", 0))
    second.bind(("127.0.0.1", 0))
    first.connect(second.getsockname())
    made = End(first, True), End(second, False)
    yield made
    for end in made:
        end.socket.close()
        end.socket.close()
        assert end.socket.closed


def run(count: int, size: int, last: int) -> tuple[list[bytes], list[bytes]]:
    """Parts, and the datagrams they make."""
    datagrams = [bytes([n]) * size for n in range(count - 1)] + [b"z" * last]
    return [part for data in datagrams for part in (data[:11], data[11:])], datagrams


@pytest.mark.parametrize("segments", [True, False])
async def test_a_run_of_datagrams(ends: tuple[End, End], segments: bool) -> None:
    client, server = ends
    client.socket._segmented = client.socket._segmented and segments
    parts, datagrams = run(40, 1200, 500)
    client.socket.send_run(parts, 1200, None)
    await server.until(40)
    assert server.heard == datagrams
    assert server.address == client.socket.address
    assert client.socket.datagrams_sent == server.socket.datagrams_received == 40
    if sys.platform == "linux" and segments:
        assert len(server.calls) < 40  # several crossed the kernel in one call, and came so
    server.socket.send([(b"answer", server.address), (b"", server.address)])
    await client.until(1)
    assert client.heard == [b"answer"]


async def test_a_run_of_many_frames_is_read_in_turns(ends: tuple[End, End]) -> None:
    client, server = ends
    server.most = 3
    turns: list[int] = []

    async def count() -> None:
        while True:
            turns.append(len(server.heard))
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    parts, datagrams = run(40, 1200, 500)
    client.socket.send_run(parts, 1200, None)
    client.socket.send([(b"behind it", None)])
    await server.until(41)
    counting.cancel()
    assert server.heard == [*datagrams, b"behind it"]
    assert server.socket.datagrams_received == 41
    assert max(after - before for before, after in pairwise(turns)) <= server.most


async def test_what_was_left_of_a_run_is_not_read_after_the_close(ends: tuple[End, End]) -> None:
    client, server = ends
    server.most = 1
    parts, _ = run(10, 1200, 500)
    client.socket.send_run(parts, 1200, None)
    await server.until(1)
    server.socket.close()
    heard = len(server.heard)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(server.heard) == heard


async def test_a_datagram_that_is_too_large_is_not_read(ends: tuple[End, End]) -> None:
    client, server = ends
    client.socket.send([(bytes(LARGEST + 1), None), (bytes(LARGEST), None)])
    await server.until(1)
    assert server.heard == [bytes(LARGEST)]


async def test_a_run_that_the_device_cannot_cut_goes_one_by_one_and_the_log_says_so_once(
    ends: tuple[End, End], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aqueduct.carriers.quic")
    client, server = ends
    client.socket._segmented = True
    parts, datagrams = run(40, 16_000, 500)  # together too long for one call
    assert client.socket.send_run(parts, 16_000, None)
    await server.until(40)
    assert client.socket.send_run(parts, 16_000, None)
    await server.until(80)
    assert server.heard == datagrams * 2
    assert not client.socket._segmented
    assert not client.errors
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "the device cannot cut a run of datagrams" in said[0]


@pytest.mark.skipif(sys.platform != "linux", reason="UDP_SEGMENT is Linux's")
@pytest.mark.parametrize(("count", "size"), [(54, 1200), (45, 1452), (7, 8900), (4, 16_368)])
async def test_as_many_datagrams_cross_in_one_call_as_the_kernel_takes(
    ends: tuple[End, End], count: int, size: int
) -> None:
    client, server = ends
    assert min(RUN_PACKETS, RUN_BYTES // size) == count
    parts, datagrams = run(count, size, size)
    assert client.socket.send_run(parts, size, None)
    await server.until(count)
    assert server.heard == datagrams
    assert client.socket._segmented
    assert len(server.calls) == 1


async def test_a_run_of_datagrams_that_are_too_large_is_refused_and_segments_stay(
    ends: tuple[End, End],
) -> None:
    client, _ = ends
    parts, _ = run(2, 65_520, 65_520)
    before = client.socket._segmented
    assert not client.socket.send_run(parts, 65_520, None)
    assert client.socket._segmented is before


async def test_a_datagram_that_is_refused_is_reported(ends: tuple[End, End]) -> None:
    client, server = ends
    client.socket.send([(bytes(70_000), None), (b"next", None)])
    await server.until(1)
    assert server.heard == [b"next"]
    assert [error.errno for error in client.errors] == [90 if sys.platform == "linux" else 40]


async def test_a_socket_that_nobody_hears(ends: tuple[End, End]) -> None:
    client, server = ends
    server.socket.close()
    async with asyncio.timeout(DEADLINE):
        while not client.errors:
            client.socket.send([(b"anybody?", None)])
            await asyncio.sleep(0.01)
    assert isinstance(client.errors[0], ConnectionRefusedError)


@pytest.fixture
async def narrow() -> AsyncIterator[tuple[End, socket.socket]]:
    """A socket whose kernel queue is short: UDP on loopback drops instead, so a Unix one."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    far.setblocking(False)
    end = End(near, True, size=1)  # the kernel makes of it the least it has
    yield end, far
    end.socket.close()
    far.close()


async def test_what_the_kernel_does_not_take_waits(narrow: tuple[End, socket.socket]) -> None:
    end, far = narrow
    sent = [b"%d" % number for number in range(200)]
    for data in sent:
        end.socket.send([(data, None)])
    assert end.socket.blocked
    got: list[bytes] = []
    async with asyncio.timeout(DEADLINE):
        while len(got) < 200:
            try:
                got.append(far.recv(100))
            except BlockingIOError:
                end.changed.clear()
                await asyncio.sleep(0)
    assert got == sent
    assert not end.socket.blocked
    assert end.drained == 1


async def test_what_waits_is_bounded(narrow: tuple[End, socket.socket]) -> None:
    end, _ = narrow
    for number in range(5 * udp._PENDING):
        end.socket.send([(b"%d" % number, None)])
    assert len(end.socket._pending) == udp._PENDING


async def test_a_closed_socket_sends_nothing(narrow: tuple[End, socket.socket]) -> None:
    end, far = narrow
    for _ in range(1000):
        end.socket.send([(b"x", None)])
    end.socket.close()
    end.socket.send([(b"late", None)])
    assert not end.socket.blocked
    got: list[bytes] = []
    with contextlib.suppress(BlockingIOError, ConnectionError):
        while data := far.recv(10):
            got.append(data)
    assert set(got) == {b"x"}
    await asyncio.sleep(0)
    assert end.drained == 0


def test_the_size_of_datagrams() -> None:
    auto = Address.parse("aqueduct://h")
    fixed = Address.parse("aqueduct://h?datagram_size=4000")
    asked = Address.parse("aqueduct://h?datagram_size=auto")
    config = Config(quic=Quic(datagram_size=1500))
    assert datagram_size(DEFAULT, auto) is None
    assert datagram_size(config, auto) == 1500
    assert datagram_size(config, asked) == 1500
    assert datagram_size(config, fixed) == 4000


def test_addresses_as_people_write_them() -> None:
    assert host_port(("10.0.0.1", 5)) == "10.0.0.1:5"
    assert host_port(("::ffff:10.0.0.1", 5, 0, 0)) == "10.0.0.1:5"
    assert host_port(("2001:db8::1", 5, 0, 0)) == "[2001:db8::1]:5"
