"""Much goes over a Unix socket by memory that both ends share; the socket wakes and ends it."""

from __future__ import annotations

import array
import asyncio
import dataclasses
import mmap
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from aqueduct.address import Address
from aqueduct.carriers import stream
from aqueduct.carriers.stream import memory_upgrade
from aqueduct.config import DEFAULT
from tests.carriers.chunks import Kind, chunk, varu64
from tests.carriers.streams import Leaves, eventually, nothing_left
from tests.carriers.users import Pair, Recorder, by_memory, linked

KiB = 1 << 10
MiB = 1 << 20
LITTLE = by_memory(DEFAULT)
NONE = by_memory(DEFAULT, 0)


def shared(pair: Pair) -> tuple[object, object]:
    """Which of the two write to memory: the client, the server."""
    client, server = (end.carrier.snapshot()["by_memory"] for end in (pair.client, pair.server))
    return client, server


async def both_ways(pair: Pair, count: int = 8, seed: int = 3) -> None:
    """Streams of random bytes in both directions at once, checked byte for byte."""
    await pair.client.until(lambda: pair.client.begun)
    await pair.server.until(lambda: pair.server.begun)
    chance = random.Random(seed)
    up = {k: chance.randbytes(chance.randrange(1, 600 * KiB)) for k in range(count)}
    down = {k: chance.randbytes(chance.randrange(1, 600 * KiB)) for k in range(count)}
    for number in range(count):
        pair.client.send(number, up[number], fin=True)
        pair.server.send(number, down[number], fin=True)
        await asyncio.sleep(0)
    await pair.server.until(lambda: len(pair.server.ended) == count, "all up")
    await pair.client.until(lambda: len(pair.client.ended) == count, "all down")
    assert pair.server.data == up
    assert pair.client.data == down


@pytest.mark.parametrize("size", [64 * KiB, 1 * MiB])
async def test_streams_both_ways_go_by_memory(size: int) -> None:
    async with nothing_left(), linked("unix", by_memory(DEFAULT, size), window=8 * MiB) as pair:
        assert shared(pair) == (False, False)
        await both_ways(pair, 12)
        assert shared(pair) == (True, True)
        del pair


@pytest.mark.parametrize("after", [0, 300 * KiB, 64 * MiB])
async def test_it_begins_once_so_much_was_moved(after: int) -> None:
    later = dataclasses.replace(LITTLE.byte_stream, shared_memory_after=after)
    config = dataclasses.replace(LITTLE, byte_stream=later)
    async with linked("unix", config, window=8 * MiB, server_window=8 * MiB) as pair:
        await both_ways(pair)
        begun = after < 8 * MiB
        assert shared(pair) == (begun, begun)


@pytest.mark.parametrize(("client", "server"), [(NONE, LITTLE), (LITTLE, NONE), (NONE, NONE)])
async def test_a_side_that_does_without(client, server) -> None:
    async with linked("unix", client, server) as pair:
        await both_ways(pair)
        assert shared(pair) == (False, False)


async def test_neither_over_tcp_nor_where_the_system_has_none(monkeypatch) -> None:
    async with linked("tcp", LITTLE) as pair:
        await both_ways(pair)
        assert "by_memory" not in pair.client.carrier.snapshot()
    monkeypatch.setattr(memory_upgrade, "supported", lambda: False)
    async with linked("unix", LITTLE) as pair:
        await both_ways(pair)
        assert shared(pair) == (False, False)


async def test_the_system_gives_no_memory(monkeypatch, caplog) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with caplog.at_level("INFO", "aqueduct.carriers.stream"):
        async with linked("unix", LITTLE) as pair:
            await both_ways(pair)
            assert shared(pair) == (False, False)
    assert "no memory is shared over a Unix socket: [Errno 24]" in caplog.text


async def test_what_is_in_memory_is_read_before_the_close() -> None:
    async with linked("unix", by_memory(DEFAULT, 4 * MiB), window=8 * MiB) as pair:
        await both_ways(pair)
        body = random.Random(5).randbytes(900 * KiB)
        pair.client.send(8, body, fin=True)
        pair.client.carrier.close(7, "enough", linger=10)
        await pair.server.until(lambda: pair.server.lost or 8 in pair.server.ended)
        assert pair.server.data[8] == body
        await eventually(lambda: pair.server.lost)
        assert "(code 7): enough" in str(pair.server.lost[0])


async def test_a_writer_that_waits_for_room_goes_on_when_there_is_some() -> None:
    """The reader gives no credit but for the next bytes, and far more waits than memory holds."""
    body = random.Random(6).randbytes(3 * MiB)
    async with linked("unix", LITTLE, server_window=16 * MiB) as pair:
        await both_ways(pair, 2)
        for number in range(2, 6):
            pair.client.send(number, body, fin=True)
        await pair.server.until(lambda: len(pair.server.ended) == 6)
        assert all(pair.server.data[number] == body for number in range(2, 6))
        assert pair.client.carrier.snapshot()["in_flight"] == 0


PEER = """
import asyncio, sys
from aqueduct.config import DEFAULT
from aqueduct.address import Address
from aqueduct.carriers import stream
from tests.carriers.users import Recorder, by_memory

async def main():
    config = by_memory(DEFAULT, 1 << 20)
    carrier = await stream.connect(Address.parse(sys.argv[1]), config)
    client = Recorder(carrier, config, 1 << 20)
    await client.until(lambda: client.begun)
    number = 0
    while True:
        client.send(number, bytes([number % 251]) * 700_000, fin=True)
        number += 1
        await client.until(lambda: client.carrier.openable > 0)
        await asyncio.sleep(0)

asyncio.run(main())
"""


async def test_a_peer_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    """What it wrote whole is read; the rest ends with a reason, and nothing hangs."""
    async with nothing_left():
        assert await ended_when_killed(tmp_path / "socket") > 12


async def ended_when_killed(path: Path) -> int:
    """How many streams came whole from a process that writes until it is killed."""
    config = by_memory(DEFAULT, 1 * MiB)
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    address = f"aqueduct+unix://{path}"
    listener = await stream.listen(Address.parse(address), config, None, accepted.set_result)
    peer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PEER, address, cwd=Path(__file__).parents[2]
    )
    try:
        server = Recorder(await asyncio.wait_for(accepted, 30), config, 4 * MiB)
        await server.until(lambda: len(server.ended) > 12)
        assert server.carrier.snapshot()["by_memory"]
    finally:
        peer.kill()
        await peer.wait()
    await eventually(lambda: server.lost)
    told = str(server.lost[0])
    reasons = "without saying why", "inside a chunk", "reset the connection"
    assert any(reason in told for reason in reasons), told
    for number in server.ended:
        assert server.data[number] == bytes([number % 251]) * 700_000
    listener.close()
    await listener.wait_closed()
    return len(server.ended)


class Meddler:
    """A peer that writes to the positions in memory what it likes."""

    def __init__(self, monkeypatch) -> None:
        self.memory: mmap.mmap | None = None
        take = memory_upgrade.MemoryUpgrade.take

        def taken(upgrade: memory_upgrade.MemoryUpgrade, fd: int) -> None:
            self.memory = mmap.mmap(fd, 0)
            take(upgrade, fd)

        monkeypatch.setattr(memory_upgrade.MemoryUpgrade, "take", taken)

    def set(self, direction: int, name: str, value: int) -> None:
        """``direction``: 0 from who made the memory, 1 to it."""
        assert self.memory is not None
        place = 128 + direction * 640 + {"since": 0, "tail": 128, "head": 256}[name]
        self.memory[place : place + 8] = value.to_bytes(8, sys.byteorder)


@pytest.mark.parametrize("value", [0, 1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize("name", ["tail", "head"])
@pytest.mark.parametrize("direction", [0, 1])
async def test_positions_that_cannot_be(monkeypatch, direction, name, value) -> None:
    """Whoever meets them ends the connection with a reason; nothing else happens."""
    meddler = Meddler(monkeypatch)
    async with linked("unix", LITTLE) as pair:
        await both_ways(pair, 3)
        meddler.set(direction, name, value)
        ends = pair.client, pair.server
        if name == "tail":
            writer = ends[direction].carrier
            assert isinstance(writer, stream.StreamCarrier)
            writer._sock.send(b"\0")  # a wake-up byte: the reader looks
        else:
            ends[direction].send(3, bytes(9000), fin=True)
        await eventually(lambda: all(end.lost for end in ends))
        told = " ".join(str(end.lost[0]) for end in ends)
        assert "shared memory" in told or "memory that is shared" in told


async def test_a_beginning_before_what_was_sent(monkeypatch) -> None:
    take = memory_upgrade.MemoryUpgrade.take

    def taken(upgrade: memory_upgrade.MemoryUpgrade, fd: int) -> None:
        with mmap.mmap(fd, 0) as memory:
            take(upgrade, fd)
            memory[128 + 640 : 128 + 648] = (1).to_bytes(8, sys.byteorder)

    monkeypatch.setattr(memory_upgrade.MemoryUpgrade, "take", taken)
    async with linked("unix", LITTLE) as pair:
        await pair.client.until(lambda: pair.client.begun)
        for number in range(8):
            if pair.client.lost:
                break
            pair.client.send(number, bytes(90_000), fin=True)
            await asyncio.sleep(0.01)
        await eventually(lambda: pair.client.lost)
        assert "begins before what it has sent" in str(pair.client.lost[0])


@pytest.mark.parametrize("what", ["pipes", "a file", "memory that may shrink", "memory"])
async def test_descriptors_that_are_no_memory_to_share(what: str, tmp_path: Path, caplog) -> None:
    """Whoever connects may pass what it likes: it is closed, and the socket goes on."""
    made: list[int] = []
    if what == "pipes":
        for _ in range(10):
            made += os.pipe()
    elif what == "a file":
        made.append(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))
    else:
        sealing = os.MFD_ALLOW_SEALING if what == "memory" else 0
        made.append(os.memfd_create("test", sealing))
        os.ftruncate(made[0], 200 * KiB)
    accepted: list[Any] = []
    address = Address.parse(f"aqueduct+unix://{tmp_path}/socket")
    listener = await stream.listen(address, LITTLE, None, accepted.append)
    with socket.socket(socket.AF_UNIX) as sock, caplog.at_level("INFO", "aqueduct.carriers.stream"):
        sock.connect(str(tmp_path / "socket"))
        sock.sendall(
            chunk(Kind.IN_STREAM, 0, credit=MiB) + chunk(Kind.IN_SINK, 0, b"\1" + varu64(100))
        )
        await eventually(lambda: accepted)
        server = Recorder(accepted[0], LITTLE)
        await server.until(lambda: server.begun)
        before = Leaves().descriptors
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", made))
        for number in range(3):  # more of them are not even looked at
            data = chunk(Kind.OUT_SINK, 1 + number, b"words", credit=9, end=b"")
            sock.sendmsg([data], [rights])
            await server.until_ended(number)
        assert server.data == {0: b"words", 1: b"words", 2: b"words"}
        await eventually(lambda: Leaves().descriptors <= before)
        assert "what was passed over a Unix socket is not shared: it" in caplog.text
        assert not accepted[0].snapshot()["by_memory"]
    listener.close()
    await listener.wait_closed()
    for fd in made:
        os.close(fd)
