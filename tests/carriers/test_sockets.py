"""UDP sockets: runs of datagrams, a kernel that takes no more, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aqueduct.address import Address
from aqueduct.carriers.quic import udp
from aqueduct.carriers.quic.udp import UdpSocket, datagram_size, host_port, is_loopback
from aqueduct.config import DEFAULT, Config, Quic
from tests.carriers.users import DEADLINE


class End:
    """One UdpSocket and what it hears."""

    def __init__(self, sock: socket.socket, connected: bool, size: int = 1 << 20) -> None:
        self.heard: list[bytes] = []
        self.calls: list[int] = []
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

    def _datagrams(self, buffer: memoryview, size: int, address: Any) -> None:
        self.calls.append(len(buffer))
        self.heard += [bytes(buffer[at : at + size]) for at in range(0, len(buffer), size)]
        self.address = address

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


async def test_what_the_kernel_will_not_cut_goes_one_by_one(ends: tuple[End, End]) -> None:
    client, server = ends
    client.socket._segmented = True
    parts, datagrams = run(40, 16_000, 500)  # together too long for one call
    client.socket.send_run(parts, 16_000, None)
    await server.until(40)
    assert server.heard == datagrams
    assert not client.socket._segmented
    assert not client.errors


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


@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("2001:db8::1", False),
        ("::ffff:10.0.0.1", False),
    ],
)
def test_the_size_of_datagrams(host: str, near: bool) -> None:
    auto = Address.parse("aqueduct://h")
    fixed = Address.parse("aqueduct://h?datagram_size=4000")
    asked = Address.parse("aqueduct://h?datagram_size=auto")
    config = Config(quic=Quic(datagram_size=1500))
    assert is_loopback((host, 1)) is near
    assert datagram_size(DEFAULT, auto, (host, 1)) == (16_000 if near else 1_200)
    assert datagram_size(config, auto, (host, 1)) == 1500
    assert datagram_size(config, asked, (host, 1)) == 1500
    assert datagram_size(config, fixed, (host, 1)) == 4000


def test_addresses_as_people_write_them() -> None:
    assert host_port(("10.0.0.1", 5)) == "10.0.0.1:5"
    assert host_port(("::ffff:10.0.0.1", 5, 0, 0)) == "10.0.0.1:5"
    assert host_port(("2001:db8::1", 5, 0, 0)) == "[2001:db8::1]:5"
