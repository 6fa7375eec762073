"""A service of ReactiveSocket that is none of Aqueduct's: what a program of the JVM would be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from aqueduct import reactivesocket
from aqueduct.reactivesocket import ReactiveRequest


def words_of(data: bytes) -> tuple[dict[str, str], bytes]:
    """The header pairs of a request, and what follows them."""

    def size(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 0x80:
                return value, at

    words = []
    length, at = size(0)
    end = at + length
    while at < end:
        length, at = size(at)
        words.append(data[at : at + length])
        at += length
    pairs = {
        key.decode(): word.decode("latin-1") for key, word in zip(*[iter(words)] * 2, strict=True)
    }
    return pairs, data[end:]


def stream_of(table: pa.Table, *, end: bool = True) -> bytes:
    """An Arrow IPC stream, as any library writes it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data = bytes(sink.getvalue())
    return data if end else data[:-8]


class Stranger:
    """Squares numbers. It describes nothing, and has words of its own for errors."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.at_work = self.most_at_work = 0
        self.connections = 0
        self.gate: Any = None
        """Each request waits for ``gate.wait()`` first, if there is one."""
        self.answer: Callable[[pa.Table], bytes] = stream_of

    async def respond(self, request: ReactiveRequest) -> None:
        pairs, body = words_of(bytes(request.data))
        if request.kind != "request" or pairs.get("handler") != "square":
            request.fail("only squares here")
            return
        self.asked.append(pairs)
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            if self.gate is not None:
                await self.gate.wait()
            with pa.ipc.open_stream(body) as reader:
                table = reader.read_all()
            if pc.min(table["id"]).as_py() < 0:
                request.fail("no root of -1 here")
                return
            squares = pc.multiply(table["id"], table["id"])
            await request.send(self.answer(pa.table({"id": squares}, schema=table.schema)))
        finally:
            self.at_work -= 1


@contextmanager
def stranger(address: str = "reactivesocket+tcp://127.0.0.1:0") -> Iterator[tuple[Stranger, Any]]:
    """The service on an event loop of its own, its server, whose ``address`` is what to call."""
    service = Stranger()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def end(server: Any) -> None:
        await server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:  # they have what was accepted as the server closed
            await asyncio.wait(others, timeout=10)
        for _ in range(4):
            await asyncio.sleep(0)  # sockets that were given up are closed in turns to come

    async def begin() -> Any:
        return await reactivesocket.serve(None, address, responder=service.respond)

    try:
        server = asyncio.run_coroutine_threadsafe(begin(), loop).result(20)
        server.loop = loop
        try:
            yield service, server
        finally:
            asyncio.run_coroutine_threadsafe(end(server), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
