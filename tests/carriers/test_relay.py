"""A relay between a connection over TLS and a Unix socket: order, back pressure, and its end."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import ModuleType
from typing import Any

import pytest

from aqueduct.carriers import tls_openssl, tls_stdlib
from aqueduct.carriers.certificates import dev_certificate
from aqueduct.carriers.stream.relay import Relay
from aqueduct.carriers.stream.sockets import readable, scratch
from aqueduct.carriers.stream.tls import LINK_ALPN

PATIENCE = 30.0
MiB = 1 << 20
CERTIFICATE = dev_certificate()
HELD = 70_000
"""A read of 64 KiB, with what TLS puts around it."""


class Ends:
    """Both ends of a relay, as asyncio has them."""

    def __init__(self) -> None:
        self.relay: Relay
        self.client: tuple[asyncio.StreamReader, asyncio.StreamWriter]
        self.other: tuple[asyncio.StreamReader, asyncio.StreamWriter]
        self.over = asyncio.Event()

    def held(self) -> list[int]:
        """Bytes that the relay has read and not written, inward and outward."""
        ways = (self.relay._inward, self.relay._outward)
        return [sum(map(len, way._waiting)) for way in ways]


def small(sock: socket.socket) -> socket.socket:
    """Has the kernel hold little."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    sock.setblocking(False)
    return sock


@asynccontextmanager
async def relaying(
    library: ModuleType = tls_openssl,
    *,
    first: bytes = b"",
    early: bytes = b"",
    linger: float = PATIENCE,
) -> AsyncIterator[Ends]:
    """``early`` has come with the end of the handshake, and lies within TLS."""
    ends = Ends()
    theirs, ours = map(small, socket.socketpair())
    there, here = map(small, socket.socketpair())
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([LINK_ALPN])
    connecting = asyncio.ensure_future(
        asyncio.open_connection(sock=theirs, ssl=context, server_hostname="localhost")
    )
    kind = library.Tls if library is tls_openssl else library.PlainTls
    server = library.server_context(CERTIFICATE, LINK_ALPN)
    tls = kind(ours, server, None, server=True, scratch=scratch("sealed"))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE):
        while True:
            await loop.sock_sendall(ours, tls.handshake())
            if tls.complete:
                break
            await readable(ours)
        ends.client = await connecting
        ends.other = await asyncio.open_connection(sock=there)
    if early:
        ends.client[1].write(early)
        await until(lambda: not ends.client[1].transport.get_write_buffer_size())
        got = bytearray(1)
        assert tls.records.recv_into(got) == 1
        first += got
    ends.relay = Relay(
        ours, tls, here, first, linger=linger, turn=MiB, over=lambda _: ends.over.set()
    )
    try:
        yield ends
    finally:
        ends.relay.close()
        for _, writer in (ends.client, ends.other):
            writer.close()
            with suppress(OSError, ssl.SSLError):
                await writer.wait_closed()
        assert ours.fileno() == here.fileno() == -1


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110  # of what no event tells
            await asyncio.sleep(0.001)


def data_of(seed: int, size: int) -> bytes:
    return hashlib.shake_128(bytes([seed])).digest(size)


def unsent(writer: asyncio.StreamWriter) -> int:
    """Bytes that the kernel has not taken."""
    transport: Any = writer.transport
    secure = getattr(transport, "_ssl_protocol", None)
    below: asyncio.WriteTransport = transport if secure is None else secure._transport
    return below.get_write_buffer_size()


async def received(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(PATIENCE):
        return await reader.read()


@pytest.mark.parametrize("library", [tls_openssl, tls_stdlib])
async def test_all_bytes_pass_both_ways_at_once_and_in_order(library: ModuleType) -> None:
    up, down = data_of(1, 5 * MiB + 3), data_of(2, 3 * MiB + 1)
    async with relaying(library, first=b"before") as ends:
        ends.client[1].write(up)
        ends.other[1].write(down)
        assert await ends.client[0].readexactly(len(down)) == down
        assert await ends.other[0].readexactly(6 + len(up)) == b"before" + up
        assert not ends.over.is_set()


async def test_what_tls_holds_already_makes_no_socket_readable_and_passes() -> None:
    async with relaying(early=data_of(3, 10_000)) as ends:
        async with asyncio.timeout(PATIENCE):
            assert await ends.other[0].readexactly(10_000) == data_of(3, 10_000)


@pytest.mark.parametrize("way", ["inward", "outward"])
async def test_little_is_held_for_a_side_that_does_not_read(way: str) -> None:
    """The other side cannot write more, and the way back goes on."""
    data = data_of(4, 4 * MiB)
    async with relaying() as ends:
        source, target = (ends.client, ends.other) if way == "inward" else (ends.other, ends.client)
        target[0]._transport.pause_reading()  # type: ignore[attr-defined]
        source[1].write(data)
        await until(lambda: any(ends.held()))
        before = -1
        while before != (before := unsent(source[1])):
            assert sum(ends.held()) <= HELD
            await asyncio.sleep(0.05)
        assert before > 2 * MiB
        target[1].write(b"back")
        async with asyncio.timeout(PATIENCE):
            assert await source[0].readexactly(4) == b"back"
        assert unsent(source[1]) == before
        target[0]._transport.resume_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(PATIENCE):
            assert await target[0].readexactly(len(data)) == data
        assert ends.held() == [0, 0]


@pytest.mark.parametrize("side", ["client", "other"])
async def test_what_was_written_before_an_end_comes_before_it(side: str) -> None:
    data = data_of(5, 2 * MiB)
    async with relaying() as ends:
        ended, left = (ends.client, ends.other) if side == "client" else (ends.other, ends.client)
        ended[1].write(data)
        ended[1].close()
        assert await received(left[0]) == data
        left[1].close()
        async with asyncio.timeout(PATIENCE):
            await ends.over.wait()


@pytest.mark.parametrize("side", ["client", "other"])
async def test_a_side_that_goes_away_takes_the_other_one_with_it(side: str) -> None:
    async with relaying() as ends:
        gone, left = (ends.client, ends.other) if side == "client" else (ends.other, ends.client)
        gone[1].transport.abort()
        assert await received(left[0]) == b""
        left[1].close()
        async with asyncio.timeout(PATIENCE):
            await ends.over.wait()


@pytest.mark.parametrize("side", ["client", "other"])
async def test_a_side_that_does_not_end_has_some_time_after_the_other_has(side: str) -> None:
    async with relaying(linger=0.1) as ends:
        ended = ends.client if side == "client" else ends.other
        if side == "client":
            sock = ended[1].transport.get_extra_info("socket")
            sock.shutdown(socket.SHUT_WR)
        else:
            ended[1].write_eof()
        async with asyncio.timeout(PATIENCE):
            await ends.over.wait()


async def test_bytes_that_are_no_tls_end_it() -> None:
    async with relaying() as ends:
        sock = ends.client[1].transport.get_extra_info("socket")
        with socket.socket(fileno=socket.dup(sock.fileno())) as raw:
            raw.send(bytes(100))
        assert await received(ends.other[0]) == b""
        async with asyncio.timeout(PATIENCE):
            await ends.over.wait()


async def test_a_relay_whose_client_takes_nothing_ends_when_its_link_has_left_it() -> None:
    async with relaying(linger=0.1) as ends:
        ends.client[0]._transport.pause_reading()  # type: ignore[attr-defined]
        ends.other[1].write(data_of(6, 4 * MiB))
        await until(lambda: any(ends.held()))
        ends.other[1].transport.abort()
        async with asyncio.timeout(PATIENCE):
            await ends.over.wait()


async def test_a_fault_ends_a_relay_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def short_of_memory(room: memoryview) -> int:
        raise MemoryError

    async with relaying() as ends:
        ends.relay._inward._read = short_of_memory
        ends.client[1].write(b"something")
        assert await received(ends.other[0]) == b""
        async with asyncio.timeout(PATIENCE):
            await ends.over.wait()
    assert caplog.text.count("was cut by a fault") == 1
