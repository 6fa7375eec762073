"""Connections that carry messages with their length in front, driven in two ways.

The loop takes every message whole, in memory of its own, as a program would.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np

KiB: Final = 1 << 10
MiB: Final = 1 << 20
HEAD: Final = 8
READ_AHEAD: Final = 64 * KiB
"""What is read where a message may begin."""
BEHIND: Final = 4 * KiB
"""What is read of the next messages behind the end of a large one."""
TURN: Final = 1 * MiB
"""Bytes that a connection may read in one turn of the loop."""
HIGH_WATER: Final = 2 * MiB
"""Queued bytes above which a sender waits."""
UNTAKEN: Final = 16
"""Messages that a thread reads ahead of the loop."""
Arrived = Callable[["Connection", memoryview], None]


class Connection:
    """A connection of one driver: ``send`` takes a message, ``room`` waits for the queue."""

    def __init__(self, sock: socket.socket, arrived: Arrived) -> None:
        self.sock = sock
        self.arrived = arrived
        self.loop = asyncio.get_running_loop()
        self.waiter: asyncio.Future[None] | None = None

    @property
    def queued(self) -> int:
        raise NotImplementedError

    def send(self, *body: Any) -> None:
        """Queues a message that may come in parts; writes at once what the kernel takes."""
        raise NotImplementedError

    async def room(self) -> None:
        """Waits until what is queued has left but for HIGH_WATER."""
        while self.queued > HIGH_WATER:
            self.waiter = self.loop.create_future()
            await self.waiter

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


def framed(body: tuple[Any, ...]) -> list[Any]:
    """The parts of a message behind its length."""
    size = sum(map(len, body)).to_bytes(HEAD, "little")
    return [size + body[0], *body[1:]] if len(body[0]) <= HEAD else [size, *body]


def gone(parts: list[Any], nbytes: int) -> None:
    """Takes from ``parts`` the bytes that the kernel took."""
    whole = 0
    while whole < len(parts) and nbytes >= len(parts[whole]):
        nbytes -= len(parts[whole])
        whole += 1
    del parts[:whole]
    if nbytes:
        parts[0] = memoryview(parts[0])[nbytes:]


def memory(nbytes: int) -> memoryview:
    """Memory that is not set to zero first."""
    return memoryview(np.empty(nbytes, np.uint8).data)


class Callbacks(Connection):
    """Non-blocking, by the loop's callbacks."""

    def __init__(self, sock: socket.socket, arrived: Arrived) -> None:
        super().__init__(sock, arrived)
        sock.setblocking(False)
        self.parts: list[Any] = []
        self.nbytes = 0
        self.scratch = memoryview(bytearray(READ_AHEAD))
        self.behind = self.scratch[:BEHIND]
        self.head = b""
        self.body = self.rest = self.scratch[:0]
        self.loop.add_reader(sock.fileno(), self._readable)

    @property
    def queued(self) -> int:
        return self.nbytes

    def send(self, *body: Any) -> None:
        idle = not self.parts
        self.parts += framed(body)
        self.nbytes += HEAD + sum(map(len, body))
        if idle and not self._write():
            self.loop.add_writer(self.sock.fileno(), self._writable)

    def _write(self) -> bool:
        try:
            while self.parts:
                sent = self.sock.sendmsg(self.parts[:64])
                self.nbytes -= sent
                gone(self.parts, sent)
        except BlockingIOError:
            return False
        return True

    def _writable(self) -> None:
        if self._write():
            self.loop.remove_writer(self.sock.fileno())
        if self.nbytes <= HIGH_WATER:
            self.wake()

    def _readable(self) -> None:
        turn = TURN
        try:
            while turn > 0:
                if self.rest:
                    count = self.sock.recvmsg_into([self.rest, self.behind])[0]
                    landed = min(count, len(self.rest))
                    self.rest = self.rest[landed:]
                    if not self.rest:
                        self.arrived(self, self.body)
                        self._parse(self.behind[: count - landed])
                else:
                    count = self.sock.recv_into(self.scratch)
                    self._parse(self.scratch[:count])
                if not count:
                    self.loop.remove_reader(self.sock.fileno())
                    return
                turn -= count
        except BlockingIOError:
            pass

    def _parse(self, data: memoryview) -> None:
        while data:
            if len(self.head) < HEAD:
                wanted = HEAD - len(self.head)
                self.head += bytes(data[:wanted])
                data = data[wanted:]
                if len(self.head) < HEAD:
                    return
            size = int.from_bytes(self.head, "little")
            self.head = b""
            self.body = memory(size)
            here = min(size, len(data))
            self.body[:here] = data[:here]
            self.rest = self.body[here:]
            data = data[here:]
            if here == size:
                self.arrived(self, self.body)


class Threads(Connection):
    """A blocking reader thread, and a writer thread for what does not leave at once."""

    def __init__(self, sock: socket.socket, arrived: Arrived) -> None:
        super().__init__(sock, arrived)
        sock.setblocking(True)
        self.inbox: deque[memoryview] = deque()
        self.untaken = threading.Semaphore(UNTAKEN)
        self.woken = False
        self.lock = threading.Condition()
        self.parts: list[Any] = []
        self.nbytes = 0
        self.writer: threading.Thread | None = None
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def queued(self) -> int:
        return self.nbytes

    def send(self, *body: Any) -> None:
        parts = framed(body)
        with self.lock:
            if not self.parts:
                try:
                    gone(parts, self.sock.sendmsg(parts, [], socket.MSG_DONTWAIT))
                except BlockingIOError:
                    pass
            if parts:
                self.parts += parts
                self.nbytes += sum(len(part) for part in parts)
                self.lock.notify()
                if self.writer is None:
                    self.writer = threading.Thread(target=self._write, daemon=True)
                    self.writer.start()

    def _write(self) -> None:
        while True:
            with self.lock:
                while not self.parts:
                    self.lock.wait()
                parts = self.parts[:64]
            try:
                sent = self.sock.sendmsg(parts)
            except OSError:
                return
            with self.lock:
                gone(self.parts, sent)
                self.nbytes -= sent
                wake = self.waiter is not None and self.nbytes <= HIGH_WATER
            if wake:
                self.loop.call_soon_threadsafe(self.wake)

    def _read(self) -> None:
        head = memoryview(bytearray(HEAD))
        try:
            while self.sock.recv_into(head, HEAD, socket.MSG_WAITALL) == HEAD:
                body = rest = memory(int.from_bytes(head, "little"))
                while rest:
                    rest = rest[self.sock.recv_into(rest, len(rest), socket.MSG_WAITALL) :]
                self.untaken.acquire()
                self.inbox.append(body)
                if not self.woken:
                    self.woken = True
                    self.loop.call_soon_threadsafe(self._take)
        except (OSError, RuntimeError):
            return  # the socket or the loop is closed

    def _take(self) -> None:
        self.woken = False
        while self.inbox:
            body = self.inbox.popleft()
            self.untaken.release()
            self.arrived(self, body)


DRIVERS: Final = {"asyncio/callbacks": Callbacks, "asyncio/threads": Threads}
