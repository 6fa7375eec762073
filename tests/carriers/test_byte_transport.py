"""Buffers of any size leave a transport whole and in order, however little the kernel takes."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
from collections.abc import Iterable
from typing import Any

import pytest

from aqueduct.carriers.transports.byte_transport import ByteTransport
from aqueduct.config import Config

KiB = 1 << 10
LIMIT = 30.0


class Sender(ByteTransport):
    """Sends buffers."""

    def __init__(self, buffers: list[Any]) -> None:
        super().__init__(Config(), "test", "the peer")
        self.buffers = buffers
        self.ended = asyncio.get_running_loop().create_future()

    def take(self, limit: int) -> tuple[Iterable[Any], int]:
        """As many as ``limit`` bytes want, and one more."""
        taken, size = [], 0
        while self.buffers and size < limit:
            buffer = self.buffers.pop(0)
            taken.append(buffer)
            size += len(buffer)
        return taken, size

    def drained(self) -> None:
        """More may leave."""
        self.flush()

    def lost(self, error: Exception | None) -> None:
        """It is over."""
        self.ended.set_result(error)


async def connected(buffers: list[Any]) -> tuple[Sender, socket.socket]:
    """A sender, and the socket of its peer, through which little goes at once."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * KiB)
    theirs.setblocking(False)
    _, sender = await asyncio.get_running_loop().create_connection(
        lambda: Sender(buffers), sock=ours
    )
    return sender, theirs


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two sockets that TCP connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


async def everything(sock: socket.socket, size: int) -> bytes:
    """So many bytes of a peer that reads a little at a time."""
    loop, found = asyncio.get_running_loop(), bytearray()
    while len(found) < size:
        data = await loop.sock_recv(sock, 3000)
        assert data
        found += data
    return bytes(found)


async def still(sender: Sender) -> int:
    """What the peer has not taken, once the kernels have done what they can."""
    found = -1
    for _ in range(1000):
        before, found = found, sender.untaken
        if found == before:
            break
        await asyncio.sleep(0.02)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_buffers_leave_whole_and_in_order(seed: int) -> None:
    async def run() -> None:
        choose = random.Random(seed)
        sizes = [choose.choice((0, 1, 40, 5 * KiB, 64 * KiB, 300 * KiB)) for _ in range(20)]
        buffers: list[Any] = [os.urandom(size) for size in sizes]
        buffers[::3] = [memoryview(buffer) for buffer in buffers[::3]]
        wanted = b"".join(buffers)
        sender, peer = await connected(buffers)
        with peer:
            sender.flush()
            assert sender.unsent + sum(map(len, buffers)) < len(wanted), "nothing has left"
            assert await asyncio.wait_for(everything(peer, len(wanted)), LIMIT) == wanted
            assert sender.unsent == 0
            sender.cut()
            await asyncio.wait_for(sender.ended, LIMIT)

    asyncio.run(run())


def test_large_buffers_are_given_to_the_kernel_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        sizes: list[int] = []
        write = os.writev

        def writev(fd: int, buffers: list[Any]) -> int:
            sizes.extend(map(len, buffers))
            return write(fd, buffers)

        monkeypatch.setattr(os, "writev", writev)
        sender, peer = await connected([b"head", bytes(64 * KiB), b"h", b"t"])
        with peer:
            sender.flush()
            await asyncio.wait_for(everything(peer, 64 * KiB + 6), LIMIT)
            assert sizes == [4, 64 * KiB, 1, 1]
            sender.buffers = [b"small", b"ones"]
            sender.flush()
            assert await asyncio.wait_for(everything(peer, 9), LIMIT) == b"smallones"
            assert len(sizes) == 4, "small buffers are cheaper in one piece"
            sender.cut()
            await asyncio.wait_for(sender.ended, LIMIT)

    asyncio.run(run())


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_what_the_peer_has_not_taken_is_known(family: socket.AddressFamily) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        if family == socket.AF_UNIX:
            ours, theirs = socket.socketpair()
        else:
            ours, theirs = tcp_pair()
        theirs.setblocking(False)
        _, sender = await loop.create_connection(lambda: Sender([bytes(16 << 20)]), sock=ours)
        with theirs:
            assert sender.untaken == 0
            sender.flush()
            before = await still(sender)
            assert before > 0
            assert not sender.free
            taken = 0
            while sender.untaken == before:
                taken += len(await asyncio.wait_for(loop.sock_recv(theirs, 4096), LIMIT))
            assert sender.untaken < before
            await asyncio.wait_for(everything(theirs, (16 << 20) - taken), LIMIT)
            assert await still(sender) == 0
            sender.cut()
            await asyncio.wait_for(sender.ended, LIMIT)
            assert sender.untaken == 0

    asyncio.run(run())


def test_a_finish_right_after_a_reset_ends_the_connection() -> None:
    async def run() -> None:
        ours, theirs = tcp_pair()
        _, sender = await asyncio.get_running_loop().create_connection(
            lambda: Sender([]), sock=ours
        )
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        with pytest.raises(OSError, match="not connected"):  # the event loop does not know it yet
            ours.getpeername()
        sender.finish(drain=True)
        await asyncio.wait_for(sender.ended, LIMIT)
        assert not sender.free

    asyncio.run(run())


def test_a_peer_that_is_gone_is_told_once() -> None:
    async def run() -> None:
        sender, peer = await connected([bytes(64 * KiB) for _ in range(20)])
        peer.close()
        sender.flush()
        error = await asyncio.wait_for(sender.ended, LIMIT)
        assert error is None or isinstance(error, OSError)

    asyncio.run(run())
