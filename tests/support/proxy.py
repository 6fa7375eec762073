"""Proxies that do what networks do: cut connections, forget them, and lose packets."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Literal

from aqueduct.address import Address
from aqueduct.client.loop_thread import LoopThread

__all__ = ["CuttingProxy", "DatagramProxy", "Way", "cutting_each"]

Way = Literal["up", "down"]
"""From client to service, and back."""
_UdpPlace = tuple[str, int]


class _Pair:
    """One connection through the proxy."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.ends = (client, server)
        self.forgotten: set[Way] = set()
        """Ways of which bytes were dropped: what follows them can be of no use."""
        self.passed = 0
        """Bytes of both ways."""

    def abort(self) -> None:
        for end in self.ends:
            end.transport.abort()


class CuttingProxy:
    """Stands before ``address``; ``address_for`` gives the one to dial.

    ``passed`` counts bytes of each way, over all connections. ``cut_at`` cuts every connection
    when a way has passed so many; ``cut`` does it now. While ``silent`` has a way, its bytes are
    dropped, and no connection is closed; a connection that has lost some stays silent that way, as
    one that a NAT has forgotten. ``refuse`` closes each new connection, ``refusals`` says how many
    of the next ones. ``source`` is the address
    that the service sees new connections come from. Also for Unix sockets.
    """

    def __init__(self, address: str) -> None:
        self._address = Address.parse(address)
        self.passed: dict[Way, int] = {"up": 0, "down": 0}
        self.silent: set[Way] = set()
        self.refuse = False
        self.refusals = 0
        self.source: str | None = None
        self.connections = 0
        self._limits: dict[Way, int] = {}
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    async def __aenter__(self) -> CuttingProxy:
        if self._address.path:
            self._server = await asyncio.start_unix_server(self._accept, self._path)
        else:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Ends it with all connections; it may be entered again, at the same port."""
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._address.path:
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    @property
    def address(self) -> str:
        """What to dial."""
        if self._address.path:
            return str(replace(self._address, path=self._path))
        return str(self._address.with_port(self._port))

    @property
    def _path(self) -> str:
        return self._address.path + ".proxy"

    def cut(self, least: int = 0) -> int:
        """Cuts all connections that have passed ``least`` bytes or more; returns how many."""
        return self._abort(frozenset(pair for pair in self._pairs if pair.passed >= least))

    def cut_at(self, way: Way, more: int) -> None:
        """Cuts them once ``more`` bytes have passed from now on."""
        self._limits[way] = self.passed[way] + more

    def forget_cuts(self) -> None:
        """What ``cut_at`` has asked for is forgotten."""
        self._limits.clear()

    def lead_to(self, address: str) -> None:
        """New connections go to another address."""
        self._address = Address.parse(address)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse or self.refusals:
            self.refusals -= not self.refuse
            writer.transport.abort()
            return
        try:
            there, back = await self._reach()
        except OSError:
            writer.transport.abort()
            return
        self.connections += 1
        pair = _Pair(writer, back)
        self._pairs.add(pair)
        for task in (
            asyncio.ensure_future(self._pump("up", reader, back, pair)),
            asyncio.ensure_future(self._pump("down", there, writer, pair)),
        ):
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address, source = self._address, self.source
        if address.path:
            return await asyncio.open_unix_connection(address.path)
        own = None if source is None else (source, 0)
        return await asyncio.open_connection(address.host, address.port, local_addr=own)

    async def _pump(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pair: _Pair
    ) -> None:
        try:
            while pair in self._pairs and (data := await reader.read(1 << 16)):
                left = self._limits.get(way, self.passed[way] + len(data)) - self.passed[way]
                cut = left <= len(data) and way in self._limits
                data = data[: max(left, 0)]
                self.passed[way] += len(data)
                pair.passed += len(data)
                if data and way in self.silent:
                    pair.forgotten.add(way)
                if way not in pair.forgotten:
                    writer.write(data)
                    await writer.drain()
                if cut:
                    del self._limits[way]
                    doomed = frozenset(self._pairs)  # and none that comes meanwhile
                    await self._flushed(writer)
                    self._abort(doomed)
        except (ConnectionError, OSError):
            pass
        finally:
            if pair in self._pairs:
                self._pairs.discard(pair)
                pair.abort()

    def _abort(self, pairs: frozenset[_Pair]) -> int:
        found = self._pairs & pairs
        self._pairs -= found
        for pair in found:
            pair.abort()
        return len(found)

    async def _flushed(self, writer: asyncio.StreamWriter) -> None:
        """What was written before a cut is delivered: an abort would drop it."""
        while writer.transport.get_write_buffer_size():  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0.002)


class DatagramProxy:
    """Stands before a service over UDP. While ``silent`` it loses all packets.

    ``forget``: packets of clients leave from another port from now on, as behind a NAT that has
    forgotten them, and from the address ``source``. What still comes to the old port is lost.
    """

    def __init__(self, address: str) -> None:
        self._address = Address.parse(address)
        self.silent = False
        self._source = "127.0.0.1"
        self._loop = asyncio.get_running_loop()
        self._door = self._bound("127.0.0.1")
        self._port = self._door.getsockname()[1]
        self._ways: dict[_UdpPlace, socket.socket] = {}
        """The socket towards the service, by the client's address."""

    async def __aenter__(self) -> DatagramProxy:
        self._loop.add_reader(self._door, self._up)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.forget()
        self._loop.remove_reader(self._door)
        self._door.close()

    @property
    def address(self) -> str:
        """What to dial."""
        return str(self._address.with_port(self._port))

    def forget(self, source: str = "127.0.0.1") -> None:
        """See the class."""
        self._source = source
        for sock in self._ways.values():
            self._loop.remove_reader(sock)
            sock.close()
        self._ways.clear()

    def restart(self) -> None:
        """It ends, and is there again at once, at the same port."""
        self.forget()
        self._loop.remove_reader(self._door)
        self._door.close()
        self._door = self._bound("127.0.0.1", self._port)
        self._loop.add_reader(self._door, self._up)

    def _bound(self, host: str, port: int = 0) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setblocking(False)
        sock.bind((host, port))
        return sock

    def _up(self) -> None:
        while (found := _packet(self._door)) is not None:
            data, client = found
            way = self._ways.get(client)
            if way is None:
                way = self._ways[client] = self._bound(self._source)
                self._loop.add_reader(way, self._down, way, client)
            if not self.silent:
                with suppress(OSError):
                    way.sendto(data, (self._address.host, self._address.port))

    def _down(self, way: socket.socket, client: _UdpPlace) -> None:
        while (found := _packet(way)) is not None:
            if not self.silent:
                with suppress(OSError):
                    self._door.sendto(found[0], client)


def _packet(sock: socket.socket) -> tuple[bytes, _UdpPlace] | None:
    try:
        return sock.recvfrom(65_536)
    except OSError:  # there is none, or an earlier one has reached nobody
        return None


@contextmanager
def cutting_each(address: str, seconds: float) -> Iterator[CuttingProxy]:
    """A proxy on a loop of its own thread, which cuts all connections so often.

    Not those that are being made: without a first handshake there is nothing to resume.
    """
    thread = LoopThread("test-proxy")
    proxy = CuttingProxy(address)
    tasks: list[asyncio.Task[None]] = []

    async def cut() -> None:
        while True:
            await asyncio.sleep(seconds)
            proxy.cut(least=4096)

    async def start() -> None:
        await proxy.__aenter__()
        tasks.append(asyncio.ensure_future(cut()))

    async def stop() -> None:
        tasks[0].cancel()
        with suppress(asyncio.CancelledError):
            await tasks[0]
        await proxy.stop()

    thread.run(start())
    try:
        yield proxy
    finally:
        thread.run(stop())
        thread.stop()
