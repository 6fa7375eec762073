"""ReactiveSocket beside the library ``rsocket`` and beside our own calls, over TCP.

    python -m benchmarks.reactivesocket [--repeat N] [--quick] [--json FILE] [--only TEXT] [--list]

- ``reactive-request``: 200 bytes there and back from an asynchronous handler, 64 in flight.
  ``gateway`` is a Service at ``reactivesocket+tcp://``, whose handler gets them in a batch that the
  client has written once; with ``gateway-batches`` it writes and reads one each time.
  ``face`` is ``aqueduct.reactivesocket`` by itself; ``call`` is a unary call of the same handler
  over bpmux; ``rsocket`` speaks version 1.0 of the protocol.
- ``reactive-items-64k``: a stream of items of 64 KiB, 16 asked for ahead. ``source`` is the same
  handler over bpmux.
- ``reactive-streams``: streams of one connection that are all open, each of which has an item of
  200 bytes asked for; so many items in all are read. ``at-once`` has 10,000 streams, ``few`` 100.
- ``reactive-stopped``: a peer asks for 2^63 - 1 items of 64 KiB and reads nothing for a while.

Every measurement has a server and a client process of its own; they take turns. A tenth more
requests than are counted are made first.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aqueduct._speedups.reactivesocket import reactive_frames as frames
from aqueduct.client.client import Client as AqueductClient
from aqueduct.config import Calls, Config
from aqueduct.reactivesocket import (
    ReactiveRequest,
    ReactiveSocketConnection,
    ReactiveStream,
    connect,
)
from aqueduct.reactivesocket import serve as serve_reactive
from aqueduct.service.service import Service
from benchmarks import processes, results
from benchmarks.peers import common
from benchmarks.runner import (
    ROOT,
    Benchmark,
    measure_in_turn,
    report_ratios,
    run_command,
    select_words,
)

KiB: Final = 1 << 10
MiB: Final = 1 << 20
QUICK: Final = 10
TIMEOUT: Final = 120.0
IN_FLIGHT: Final = 64
AHEAD: Final = 16
BODY: Final = pa.schema([pa.field("body", pa.binary())])
PLAIN: Final = pa.schema([pa.field("n", pa.int64())])
TABLE: Final = (
    "requests_s",
    "request_cpu_us",
    "mib_s",
    "cpu_gib",
    "item_us",
    "item_cpu_us",
    "stream_kib",
    "server_growth_mib",
    "ahead_mib",
)


@dataclass(frozen=True)
class Contestant:
    """A way to the handler."""

    name: str
    kind: str
    """``gateway``, ``face``, ``bpmux`` or ``rsocket``."""
    streams: int = 1
    batches: bool = False
    """The client of a gateway writes and reads a batch for each request."""


@dataclass(frozen=True)
class Case:
    """What is measured. ``count`` is of requests or items, ``size`` the bytes of one."""

    name: str
    mode: str
    contestants: tuple[Contestant, ...]
    count: int
    size: int = 200


@dataclass(frozen=True)
class Told:
    """What both processes know of a measurement."""

    mode: str
    kind: str
    count: int
    size: int
    streams: int
    pause: float = 5.0
    batches: bool = False


GATEWAY: Final = Contestant("aqueduct/gateway", "gateway")
FACE: Final = Contestant("aqueduct/face", "face")
RSOCKET: Final = Contestant("rsocket/tcp", "rsocket")
STREAMS: Final = tuple(
    Contestant(f"{each.name}-{name}", each.kind, streams)
    for each in (GATEWAY, FACE)
    for name, streams in (("at-once", 10_000), ("few", 100))
)
PLAN: Final = (
    Case(
        "reactive-request",
        "request",
        (
            GATEWAY,
            Contestant("aqueduct/gateway-batches", "gateway", batches=True),
            RSOCKET,
            Contestant("aqueduct/call", "bpmux"),
            FACE,
        ),
        20_000,
    ),
    Case(
        "reactive-items-64k",
        "items",
        (GATEWAY, Contestant("aqueduct/source", "bpmux"), RSOCKET, FACE),
        8192,
        64 * KiB,
    ),
    Case("reactive-streams", "streams", STREAMS, 50_000),
    Case("reactive-stopped", "stopped", (GATEWAY, FACE), 1 << 20, 64 * KiB),
)


# ----------------------------------------------------------------- the servers


class Produced:
    """Counts the bytes of items that handlers gave."""

    nbytes = 0


def service_of(told: Told) -> Service:
    """The handlers, which a gateway and bpmux have in common."""
    many = Calls(
        max_calls_process=told.streams + IN_FLIGHT, max_calls_connection=told.streams + IN_FLIGHT
    )
    service = Service("reactive", config=Config(calls=many))
    size = told.size - told.size % 8
    batch = pa.record_batch({"n": range(size // 8)}, schema=PLAIN)

    @service.handler("same", input=BODY, output=BODY)
    async def same(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    @service.handler("items", output=PLAIN, kind="source")
    async def items() -> AsyncIterator[pa.RecordBatch]:
        for _ in range(told.count):
            Produced.nbytes += size
            yield batch

    return service


async def respond(told: Told, request: ReactiveRequest) -> None:
    """What ``face`` answers with: the data, or items."""
    if request.kind == "request":
        request.complete(bytes(request.data))
        return
    data = bytes(told.size)
    for _ in range(told.count):
        Produced.nbytes += told.size
        await request.send(data)


async def serve(told: Told) -> None:
    address: Any
    if told.kind == "rsocket":
        from benchmarks.peers import rsocket_peer

        address = await rsocket_peer.serve()
    elif told.kind == "face":
        server = await serve_reactive(
            None,
            "reactivesocket+tcp://127.0.0.1:0",
            responder=lambda request: respond(told, request),
        )
        address = str(server.address)
    else:
        scheme = "reactivesocket" if told.kind == "gateway" else "aqueduct"
        serving = service_of(told).serving(f"{scheme}+tcp://127.0.0.1:0")
        running = await serving.__aenter__()
        address = str(running.addresses[0])
    usage = common.Usage()

    def report() -> None:
        sys.stdin.buffer.read()
        print(json.dumps({**usage.report(), "produced": Produced.nbytes}), flush=True)
        os._exit(0)

    threading.Thread(target=report, daemon=True).start()
    print(json.dumps({"address": address}), flush=True)
    await asyncio.Event().wait()


# ----------------------------------------------------------------- the clients


class Peer(Protocol):
    """A client: a request, or a stream of items."""

    async def ask(self, data: bytes) -> bytes: ...
    async def read(self, count: int, size: int, ahead: int) -> int: ...


class BpmuxPeer:
    """Our own client over bpmux."""

    def __init__(self, client: AqueductClient) -> None:
        self.client = client

    async def ask(self, data: bytes) -> bytes:
        batch = pa.record_batch([pa.array([data], pa.binary())], schema=BODY)
        answer: bytes = (await self.client.call("same", batch)).column(0)[0].as_py()
        return answer

    async def read(self, count: int, size: int, ahead: int) -> int:
        nbytes = 0
        async for batch in self.client.source("items"):
            nbytes += batch.nbytes
        return nbytes


class FacePeer:
    """Our own client of ReactiveSocket, with bytes."""

    def __init__(self, connection: ReactiveSocketConnection) -> None:
        self.connection = connection

    def request_data(self, handler: str, body: bytes) -> bytes:
        """What asks a handler."""
        return body

    def plain(self, data: Any, size: int) -> int:
        """Bytes of content in an item."""
        return len(data)

    async def ask(self, data: bytes) -> bytes:
        return bytes((await self.connection.request(self.request_data("same", data))).data)

    async def read(self, count: int, size: int, ahead: int) -> int:
        nbytes = 0
        async for item in self.connection.stream(self.request_data("items", b""), n=ahead):
            nbytes += self.plain(item.data, size)
        return nbytes

    def open(self) -> ReactiveStream:
        return self.connection.stream(self.request_data("items", b""), n=2)


class GatewayPeer(FacePeer):
    """The same at a gateway: header pairs and an Arrow IPC stream, of any Arrow library.

    ``batches``: each request's is written anew and each answer's read; otherwise the bytes are made
    once, and looked for in the answer.
    """

    def __init__(self, connection: ReactiveSocketConnection, *, batches: bool) -> None:
        super().__init__(connection)
        self._batches = batches
        self._made: dict[bytes, bytes] = {}

    def request_data(self, handler: str, body: bytes) -> bytes:
        if body not in self._made or self._batches:
            self._made[body] = request_data(handler, body)
        return self._made[body]

    def plain(self, data: Any, size: int) -> int:
        return size if len(data) > size else 0

    async def ask(self, data: bytes) -> bytes:
        answer = await super().ask(data)
        if not self._batches:
            return data if data in answer else answer
        batch = pa.ipc.open_stream(answer).read_next_batch()
        found: bytes = batch.column(0)[0].as_py()
        return found


def request_data(handler: str, body: bytes = b"") -> bytes:
    """What asks a handler, with a batch of ``body``, or without one."""
    head = text(text(b"handler") + text(handler.encode()))
    if not body:
        return head
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, BODY) as writer:
        writer.write_batch(pa.record_batch([pa.array([body], pa.binary())], schema=BODY))
    return head + bytes(sink.getvalue())


def text(data: bytes) -> bytes:
    """Bytes behind their length, a varint (AQ-5); these are short."""
    if len(data) > 127:
        raise ValueError(f"{len(data)} bytes are more than one byte counts")
    return bytes([len(data)]) + data


async def connected(told: Told, address: Any) -> Any:
    """A Peer."""
    if told.kind == "rsocket":
        from benchmarks.peers import rsocket_peer

        return await rsocket_peer.Client.connect(address)
    if told.kind == "bpmux":
        return BpmuxPeer(await AqueductClient.connect(address))
    connection = await connect(address)
    if told.kind == "face":
        return FacePeer(connection)
    return GatewayPeer(connection, batches=told.batches)


async def ask(told: Told, address: Any) -> dict[str, Any]:
    peer: Peer = await connected(told, address)

    async def run(count: int) -> None:
        left = itertools.repeat(common.REQUEST[: told.size], count)

        async def one() -> None:
            for data in left:
                if await peer.ask(data) != data:
                    raise RuntimeError("the answer is not what was asked")

        await asyncio.gather(*(one() for _ in range(IN_FLIGHT)))

    await run(told.count // 10)
    return await measured(lambda: run(told.count))


async def read(told: Told, address: Any) -> dict[str, Any]:
    peer: Peer = await connected(told, address)

    async def run() -> None:
        nbytes = await peer.read(told.count, told.size, AHEAD)
        if nbytes != told.count * told.size:
            raise RuntimeError(f"{nbytes} bytes came of {told.count * told.size}")

    return await measured(run)


async def read_all(told: Told, address: Any) -> dict[str, Any]:
    peer: FacePeer = await connected(told, address)
    streams = [peer.open() for _ in range(told.streams)]
    resting = resident()
    await asyncio.gather(*(stream.receive() for stream in streams))
    opened = resident() - resting
    each = told.count // told.streams

    async def one(stream: ReactiveStream) -> None:
        for _ in range(each):
            if await stream.receive() is None:
                raise RuntimeError("a stream has ended")

    found = await measured(lambda: asyncio.gather(*map(one, streams)))
    return {**found, "items": each * told.streams, "opened": opened}


async def stop(told: Told, address: str) -> dict[str, Any]:
    """A peer by a plain socket: what it asks for comes, but it does not read for a while."""
    data = request_data("items") if told.kind == "gateway" else b""
    host, port = address.rpartition("/")[2].split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(frames.encode_head(frames.SETUP, 0, 0))
        head = frames.encode_head(frames.REQUEST_STREAM, 1, len(data), n=(1 << 63) - 1)
        sock.sendall(head + data)
        took = 0
        for wanted, pause in ((16 * MiB, told.pause), (80 * MiB, 0.0)):
            while took < wanted:
                came = len(sock.recv(MiB))
                if not came:
                    raise RuntimeError("the connection has ended")
                took += came
            time.sleep(pause)  # noqa: ASYNC251 - nothing else runs here
    return {"took": took}


def resident() -> int:
    """Bytes of this process's memory now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def measured(work: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
    usage, began = common.Usage(), time.perf_counter()
    await work()
    return {"seconds": time.perf_counter() - began, "cpu": usage.spent()}


# ----------------------------------------------------------------- the benchmark


def measure(told: Told) -> dict[str, Any]:
    """One measurement, in two fresh processes. Raises Failed."""
    command = [sys.executable, str(ROOT / "benchmarks" / "reactivesocket.py")]
    text = json.dumps(asdict(told))
    server, client = processes.run_pair(
        [*command, "--server", text], [*command, "--client", text], TIMEOUT
    )
    row: dict[str, Any] = {"server_growth_mib": server["growth"] / MiB}
    if told.mode == "stopped":
        row["ahead_mib"] = (server["produced"] - client["took"]) / MiB
        return row
    cpu, seconds = server["cpu"] + client["cpu"], client["seconds"]
    if told.mode == "request":
        row["requests_s"] = told.count / seconds
        row["request_cpu_us"] = cpu / (told.count * 1.1) * 1e6
    elif told.mode == "items":
        nbytes = told.count * told.size
        row["mib_s"] = nbytes / MiB / seconds
        row["cpu_gib"] = cpu / (nbytes / (1 << 30))
    else:
        row["item_us"] = seconds / client["items"] * 1e6
        # The server's has the opening of all streams in it, each with an item.
        row["item_cpu_us"] = cpu / (client["items"] + told.streams) * 1e6
        grown = server["growth"] + client["opened"]
        row["stream_kib"] = grown / told.streams / KiB
    return row


def run(cases: list[Case], repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measures ``cases`` in turn and yields rows."""

    def numbers(case: Case, contestant: Contestant) -> dict[str, Any]:
        count = case.count
        if quick and case.mode != "stopped":
            count //= QUICK
        told = Told(case.mode, contestant.kind, count, case.size, contestant.streams)
        if quick:
            told = replace(told, streams=max(1, told.streams // QUICK), pause=1.0)
        return measure(replace(told, batches=contestant.batches))

    yield from measure_in_turn(cases, repeats, TABLE, numbers)


def report(found: results.Run) -> str:
    """A line for each contestant and number."""
    return report_ratios(found, TABLE, upside_down=True)


def select(only: str) -> list[Case]:
    """The cases that ``only`` names."""
    return select_words(PLAN, only)


CLIENTS: Final[dict[str, Callable[[Told, Any], Any]]] = {
    "request": ask,
    "items": read,
    "streams": read_all,
    "stopped": stop,
}


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["--server"], ["--client"]):
        common.end_with_parent()
        role, text, *address = arguments
        told = Told(**json.loads(text))
        if role == "--server":
            asyncio.run(serve(told))
        print(json.dumps(asyncio.run(CLIENTS[told.mode](told, json.loads(*address)))), flush=True)
        os._exit(0)
    benchmark = Benchmark(select, run, report, QUICK)
    return run_command(
        benchmark, arguments, summary=__doc__ or "", only="words in cases and peers", repeat=7
    )


if __name__ == "__main__":
    sys.exit(main())
