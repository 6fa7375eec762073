"""Plain sockets: about the most that Python gets out of TCP, a Unix socket and TLS 1.3.

IPC messages with their length in front, nothing else: no channels, no calls, no credit. ``gather``
hands the buffers of a batch to the kernel one by one, uncopied; ``copy`` serialises it into one.
What arrives is read into the same memory again and again, and decoded over it. Each side has one
thread. An echo's client never blocks, so that it sends and receives at once.
"""

from __future__ import annotations

import json
import os
import select
import socket
import ssl
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers import common

HEAD: Final = 8
"""Bytes of a length."""
LARGE: Final = 256 << 10
"""A batch from here on is read by itself; smaller ones are read several at a time."""
SMALL: Final = 4 << 10
"""A buffer below this is joined with its neighbours before TLS makes records of them."""
SLACK: Final = 8 << 10
"""What an IPC message has beside its batch."""
UNIX_BUFFER: Final = 4 << 20
"""``wide``: a Unix socket's own buffer is 208 KiB, so the processes take turns. TCP's grows by
itself."""
AGAIN: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Parts:
    """The file that the IPC writer of ``Gather`` writes to: it keeps the buffers."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.nbytes = 0

    def write(self, part: Any) -> None:
        self.parts.append(part)
        self.nbytes += len(part)

    def taken(self) -> tuple[list[Any], int]:
        parts, nbytes = self.parts, self.nbytes
        self.parts, self.nbytes = [], 0
        return parts, nbytes

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Gather:
    """IPC messages as lists of buffers: those of the columns are not copied."""

    def __init__(self) -> None:
        self.file = Parts()
        self.writer = pa.ipc.new_stream(pa.PythonFile(self.file, "w"), common.SCHEMA)
        self.writer.write_batch(pa.RecordBatch.from_pylist([], schema=common.SCHEMA))
        self.file.taken()  # the schema left with the first batch; both sides know it

    def __call__(self, batch: pa.RecordBatch) -> list[Any]:
        self.writer.write_batch(batch)
        parts, nbytes = self.file.taken()
        return [nbytes.to_bytes(HEAD, "little"), *parts]


def copied(batch: pa.RecordBatch) -> list[Any]:
    """An IPC message as one buffer."""
    body = batch.serialize()
    return [body.size.to_bytes(HEAD, "little"), body]


def decoded(view: memoryview) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(pa.py_buffer(view), common.SCHEMA)


class Outgoing:
    """What is on its way out: buffers in their order."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.parts: list[Any] = []

    def load(self, parts: list[Any]) -> None:
        self.parts = parts

    def push(self) -> None:
        """One call of the kernel; what it did not take stays."""
        self._sent(self.sock.sendmsg(self.parts))

    def push_all(self) -> None:
        while self.parts:
            self.push()

    def _sent(self, nbytes: int) -> None:
        parts, gone = self.parts, 0
        while gone < len(parts) and nbytes >= len(parts[gone]):
            nbytes -= len(parts[gone])
            gone += 1
        del parts[:gone]
        if nbytes:
            parts[0] = memoryview(parts[0])[nbytes:]


class TlsOutgoing(Outgoing):
    """The same by SSLSocket, which takes one buffer and makes records of 16 KiB of it."""

    def load(self, parts: list[Any]) -> None:
        self.parts, small = [], []
        for part in parts:
            if len(part) < SMALL:
                small.append(part)
                continue
            if small:
                self.parts.append(b"".join(small))
                small = []
            self.parts.append(part)
        if small:
            self.parts.append(b"".join(small))

    def push(self) -> None:
        self._sent(self.sock.send(self.parts[0]))


class Incoming(Protocol):
    """Reads messages; may be called again after an error of AGAIN, and then goes on."""

    def message(self) -> memoryview: ...


class Exact:
    """Reads a length, then a body: no byte is moved again."""

    def __init__(self, sock: socket.socket, capacity: int) -> None:
        self.sock = sock
        self.head = memoryview(bytearray(HEAD))
        self.memory = memoryview(bytearray(capacity))
        self.body = self.memory[:0]
        self.rest = self.head
        self.in_body = False
        # Without it each of the pieces in which the kernel gets a batch would wake this process.
        self.flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL

    def message(self) -> memoryview:
        while True:
            while self.rest:
                count = self.sock.recv_into(self.rest, len(self.rest), self.flags)
                if not count:
                    raise EOFError
                self.rest = self.rest[count:]
            if self.in_body:
                self.rest, self.in_body = self.head, False
                return self.body
            self.body = self.rest = self.memory[: int.from_bytes(self.head, "little")]
            self.in_body = True


class Ahead:
    """Reads as much as there is; what is left of a message at the end moves to the front."""

    def __init__(self, sock: socket.socket, capacity: int) -> None:
        self.sock = sock
        self.memory = memoryview(bytearray(max(2 * LARGE, 2 * capacity)))
        self.start = self.end = 0

    def message(self) -> memoryview:
        while True:
            body = self.start + HEAD
            if body <= self.end:
                after = body + int.from_bytes(self.memory[self.start : body], "little")
                if after <= self.end:
                    self.start = after
                    return self.memory[body:after]
            if self.start:
                left = self.end - self.start
                self.memory[:left] = self.memory[self.start : self.end]
                self.start, self.end = 0, left
            count = self.sock.recv_into(self.memory[self.end :])
            if not count:
                raise EOFError
            self.end += count


class Link:
    """Messages in both directions of a connection."""

    def __init__(self, setup: common.Setup, sock: socket.socket) -> None:
        self.sock = sock
        tls, large = setup.carrier == "tls", setup.batch >= LARGE
        self.outgoing = (TlsOutgoing if tls else Outgoing)(sock)
        incoming: Callable[[socket.socket, int], Incoming] = Exact if large else Ahead
        self.incoming = incoming(sock, setup.batch + SLACK)
        # Short buffers would make short records of TLS.
        gather = setup.gather and (large or not tls)
        self.encode: Callable[[pa.RecordBatch], list[Any]] = Gather() if gather else copied

    def send(self, body: bytes) -> None:
        self.sock.sendall(len(body).to_bytes(HEAD, "little") + body)

    def send_batches(self, batches: Iterable[pa.RecordBatch]) -> None:
        for batch in batches:
            self.outgoing.load(self.encode(batch))
            self.outgoing.push_all()

    def receive(self) -> bytes:
        return bytes(self.incoming.message())

    def receive_batch(self) -> pa.RecordBatch:
        return decoded(self.incoming.message())

    def echo(self, work: common.Work) -> None:
        """Sends and receives at once, in one thread."""
        self.sock.setblocking(False)
        poll, descriptor = select.poll(), self.sock.fileno()
        poll.register(descriptor, select.POLLIN)
        watched = select.POLLIN
        batches = iter(work)
        while work.received.batches < work.total:
            if moved := not self.outgoing.parts:
                batch = next(batches, None)
                if moved := batch is not None:
                    self.outgoing.load(self.encode(batch))
            try:
                while self.outgoing.parts:
                    self.outgoing.push()
                    moved = True
            except AGAIN:
                pass
            try:
                while work.received.batches < work.total:
                    work.arrived(self.receive_batch())
                    moved = True
            except AGAIN:
                pass
            if not moved:
                wanted = select.POLLIN | (select.POLLOUT if self.outgoing.parts else 0)
                if wanted != watched:
                    poll.modify(descriptor, wanted)
                    watched = wanted
                poll.poll()
        self.sock.setblocking(True)


class Client:
    """A blocking client of one connection."""

    def __init__(self, setup: common.Setup, address: Any) -> None:
        self.link = Link(setup, _connected(setup, address))

    def sink(self, work: common.Work) -> None:
        self.link.send_batches(work)
        if self.link.receive() != b"ok":
            raise AssertionError("the sink was not confirmed")

    def source(self, work: common.Work) -> None:
        self.link.send(b"go")
        for _ in range(work.total):
            work.arrived(self.link.receive_batch())

    def echo(self, work: common.Work) -> None:
        self.link.echo(work)

    def requests(self, laps: common.Laps) -> None:
        raise NotImplementedError("plain sockets have no calls")

    def open_requests(self, laps: common.Laps) -> None:
        for request in laps:
            self.link.send(request)
            laps.answered(self.link.incoming.message())

    def compare(self, totals: dict[str, int]) -> dict[str, int]:
        self.link.send(json.dumps(totals).encode())
        answer: dict[str, int] = json.loads(self.link.receive())
        return answer


def _connected(setup: common.Setup, address: Any) -> socket.socket:
    if setup.carrier == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
    else:
        sock = socket.create_connection(tuple(address))
    tune(sock, setup)
    if setup.carrier == "tls":
        context = ssl.create_default_context(cafile=setup.certificate)
        sock = context.wrap_socket(sock, server_hostname="localhost")
        cipher = (sock.cipher() or ("none",))[0]
        if ("AES_128" in cipher) != setup.aes128:
            raise AssertionError(f"the cipher is {cipher}")
    return sock


def tune(sock: socket.socket, setup: common.Setup) -> None:
    if sock.family == socket.AF_UNIX:
        if setup.wide:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_CONGESTION"):
            # As ours: a system's BBR would pace them, at half of what a socket can do.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def handle(setup: common.Setup, work: common.Work, link: Link) -> None:
    """The server's side of the one connection."""
    while setup.mode not in common.BULK:
        link.send(link.receive())
    if setup.mode == "source":
        link.receive()
        link.send_batches(work)
    else:
        for _ in range(work.total):
            batch = link.receive_batch()
            work.arrived(batch)
            if setup.mode == "echo":
                link.send_batches([batch])
        if setup.mode == "sink":
            link.send(b"ok")
    ours = work.compare(setup.mode, False, json.loads(link.receive()))
    link.send(json.dumps(ours).encode())


def serve(setup: common.Setup, ready: common.Ready) -> None:
    work = common.Work(setup)
    if setup.carrier == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(setup.folder, "sockets.sock"))
        listener.listen()
    else:
        listener = socket.create_server(("127.0.0.1", 0))
    ready(listener.getsockname())
    sock, _ = listener.accept()
    tune(sock, setup)
    if setup.carrier == "tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(setup.certificate, setup.key)
        sock = context.wrap_socket(sock, server_side=True)
    try:
        handle(setup, work, Link(setup, sock))
    except EOFError:
        pass  # the client has what it wanted


def connect(setup: common.Setup, address: Any) -> Client:
    return Client(setup, address)


if __name__ == "__main__":
    common.main(serve, connect)
