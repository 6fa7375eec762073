"""aioquic by itself: length-prefixed Arrow IPC messages on one bidirectional stream.

The fastest plain use of aioquic that we know: events instead of its stream adapter, a send
buffer kept at 2 MiB, one copy per batch on each side (`serialize`, and the reassembly into one
buffer that the batch is then read from without another copy). ``wide`` gives it 64 MiB windows
and 4 MiB socket buffers, ``aes128`` the cheaper cipher.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from aioquic import tls
from aioquic.asyncio.client import connect as quic_connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import serve as quic_serve
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers import common

HIGH_WATER = 2 << 20
WINDOW = 64 << 20
SOCKET_BUFFER = 4 << 20
OPEN, BATCH, REQUEST, OK, COMPARE = range(5)  # the last byte of a message's 8-byte prefix
Parts = tuple[bytes, Any]


def frame(kind: int, body: Any) -> Parts:
    return (len(body) << 8 | kind).to_bytes(8, "little"), body


def frame_batch(batch: pa.RecordBatch) -> Parts:
    body = batch.serialize()
    return (body.size << 8 | BATCH).to_bytes(8, "little"), memoryview(body)


def read_batch(body: memoryview) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(pa.py_buffer(body), common.SCHEMA)


class Reassembly:
    """Messages from chunks, in one buffer that every message of a stream lands in."""

    def __init__(self, capacity: int, on_message: Callable[[int, memoryview], None]) -> None:
        self._buffer = memoryview(bytearray(capacity + 8192))
        self._head = bytearray()
        self._kind = self._need = self._have = 0
        self._on_message = on_message

    def feed(self, data: bytes) -> None:
        chunk = memoryview(data)
        while chunk:
            if len(self._head) < 8:
                n = 8 - len(self._head)
                self._head += chunk[:n]
                if len(self._head) == 8:
                    prefix = int.from_bytes(self._head, "little")
                    self._kind, self._need, self._have = prefix & 0xFF, prefix >> 8, 0
            else:
                n = min(len(chunk), self._need - self._have)
                self._buffer[self._have : self._have + n] = chunk[:n]
                self._have += n
            chunk = chunk[n:]
            if len(self._head) == 8 and self._have == self._need:
                self._head.clear()
                self._on_message(self._kind, self._buffer[: self._need])


class Side(Protocol):
    """One end of one stream."""

    def pull(self) -> Parts | None: ...
    def on_message(self, kind: int, body: memoryview) -> None: ...


class ServerSide:
    """Answers on one stream."""

    def __init__(self, setup: common.Setup, work: common.Work) -> None:
        self.setup, self.work = setup, work
        self.queue: deque[Parts] = deque()
        self.source: Iterator[pa.RecordBatch] = iter(())

    def pull(self) -> Parts | None:
        if self.queue:
            return self.queue.popleft()
        batch = next(self.source, None)
        return None if batch is None else frame_batch(batch)

    def on_message(self, kind: int, body: memoryview) -> None:
        if kind == REQUEST:
            self.queue.append(frame(REQUEST, bytes(body)))
            return
        if kind == OPEN:
            self.source = iter(self.work)
        elif kind == COMPARE:
            ours = self.work.compare(self.setup.mode, False, json.loads(bytes(body)))
            self.queue.append(frame(COMPARE, json.dumps(ours).encode()))
        else:
            batch = read_batch(body)
            self.work.arrived(batch)
            if self.setup.mode == "echo":
                self.queue.append(frame_batch(batch))
            elif self.work.received.batches == self.work.total:
                self.queue.append(frame(OK, b""))


class ClientSide:
    """Sends ``first`` and then what ``source`` yields; ``done`` gets the answer that ends it."""

    def __init__(
        self,
        done: asyncio.Future[bytes],
        work: common.Work | None = None,
        source: Iterator[pa.RecordBatch] | None = None,
        first: Parts | None = None,
    ) -> None:
        self.done, self.work, self.first = done, work, first
        self.source = iter(()) if source is None else source

    def pull(self) -> Parts | None:
        if self.first is not None:
            first, self.first = self.first, None
            return first
        batch = next(self.source, None)
        return None if batch is None else frame_batch(batch)

    def on_message(self, kind: int, body: memoryview) -> None:
        if kind != BATCH:
            self.done.set_result(bytes(body))
            return
        assert self.work is not None
        self.work.arrived(read_batch(body))
        if self.work.received.batches == self.work.total:
            self.done.set_result(b"")


class Peer(QuicConnectionProtocol):
    """Keeps the send buffer of every stream filled up to HIGH_WATER."""

    setup: common.Setup
    work: common.Work
    is_client = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streams: dict[int, tuple[Side, Reassembly]] = {}

    def attach(self, stream_id: int, side: Side) -> None:
        self.streams[stream_id] = (side, Reassembly(self.setup.batch, side.on_message))

    def backlog(self, stream_id: int) -> int:
        stream = self._quic._streams.get(stream_id)
        return len(stream.sender._buffer) if stream else 0

    def transmit(self) -> None:
        for stream_id, (side, _) in list(self.streams.items()):
            while self.backlog(stream_id) < HIGH_WATER:
                parts = side.pull()
                if parts is None:
                    break
                last = self.setup.mode == "request"  # a stream for each, ended at once
                self._quic.send_stream_data(stream_id, parts[0], False)
                self._quic.send_stream_data(stream_id, parts[1], last)
        super().transmit()

    def quic_event_received(self, event: Any) -> None:
        if isinstance(event, events.StreamDataReceived):
            if event.stream_id not in self.streams:
                if self.is_client:
                    return
                self.attach(event.stream_id, ServerSide(self.setup, self.work))
            self.streams[event.stream_id][1].feed(event.data)
            if self.setup.mode == "request" and event.end_stream and not self.is_client:
                self.transmit()
                del self.streams[event.stream_id]
        elif isinstance(event, events.ConnectionTerminated) and self.is_client:
            print(f"connection ended: {event}", file=sys.stderr, flush=True)
            os._exit(1)


class Client:
    """Runs the event loop for as long as one measurement asks."""

    def __init__(self, setup: common.Setup, port: int) -> None:
        self.setup, self.loop = setup, asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.context: Any = None
        self.peer: Any = self.loop.run_until_complete(self._connect(port))
        self.stream_id: int = self.peer._quic.get_next_available_stream_id()

    async def _connect(self, port: int) -> Any:
        self.context = quic_connect(
            "127.0.0.1",
            port,
            configuration=configuration(self.setup, client=True),
            create_protocol=protocol(self.setup, common.Work(self.setup), client=True),
        )
        peer = await self.context.__aenter__()
        enlarge(peer._transport, self.setup)
        return peer

    async def _run(self, stream_id: int, **source: Any) -> bytes:
        done = self.loop.create_future()
        self.peer.attach(stream_id, ClientSide(done, **source))
        self.peer.transmit()
        answer: bytes = await done
        return answer

    def sink(self, work: common.Work) -> None:
        self.loop.run_until_complete(self._run(self.stream_id, work=work, source=iter(work)))

    echo = sink

    def source(self, work: common.Work) -> None:
        first = frame(OPEN, b"")
        self.loop.run_until_complete(self._run(self.stream_id, work=work, first=first))

    def requests(self, laps: common.Laps) -> None:
        async def run() -> None:
            for request in laps:
                stream_id = self.peer._quic.get_next_available_stream_id()
                laps.answered(await self._run(stream_id, first=frame(REQUEST, request)))
                del self.peer.streams[stream_id]

        self.loop.run_until_complete(run())

    def open_requests(self, laps: common.Laps) -> None:
        async def run() -> None:
            for request in laps:
                laps.answered(await self._run(self.stream_id, first=frame(REQUEST, request)))

        self.loop.run_until_complete(run())

    def compare(self, totals: dict[str, int]) -> dict[str, int]:
        first = frame(COMPARE, json.dumps(totals).encode())
        body = self.loop.run_until_complete(self._run(self.stream_id, first=first))
        answer: dict[str, int] = json.loads(body)
        return answer


def configuration(setup: common.Setup, *, client: bool) -> QuicConfiguration:
    settings = QuicConfiguration(is_client=client, alpn_protocols=["bench"])
    settings.max_datagram_size = setup.datagram
    if setup.wide:
        settings.max_data = settings.max_stream_data = WINDOW
    if setup.aes128:
        settings.cipher_suites = [tls.CipherSuite.AES_128_GCM_SHA256]
    if client:
        settings.verify_mode = ssl.CERT_REQUIRED
        settings.load_verify_locations(setup.certificate)
        settings.server_name = "localhost"
    else:
        settings.load_cert_chain(setup.certificate, setup.key)
    return settings


def protocol(setup: common.Setup, work: common.Work, *, client: bool) -> type[Peer]:
    return type("Peer", (Peer,), {"setup": setup, "work": work, "is_client": client})


def enlarge(transport: Any, setup: common.Setup) -> None:
    if setup.wide:
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)


def serve(setup: common.Setup, ready: common.Ready) -> None:
    work = common.Work(setup)

    async def run() -> None:
        server: Any = await quic_serve(
            "::",
            0,
            configuration=configuration(setup, client=False),
            create_protocol=protocol(setup, work, client=False),
        )
        enlarge(server._transport, setup)
        ready(server._transport.get_extra_info("sockname")[1])
        await asyncio.Event().wait()

    asyncio.run(run())


def connect(setup: common.Setup, address: int) -> Client:
    return Client(setup, address)


if __name__ == "__main__":
    common.main(serve, connect)
