"""How long a careless or hostile client keeps the event loop of a service from everybody else.

    python benchmarks/floods.py [--seconds 6] [FLOOD ...]

A service, a client that asks a small question each 20 ms, and a client that floods are three
processes. For each flood the table has, in milliseconds: the longest step of the service's event
loop (processor time), the longest pause between two turns of it, and how long the small calls
took. A step that is long keeps everybody waiting; what a thread does may too, by Python's lock.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa

import aqueduct
from aqueduct import bpmux, endpoint
from aqueduct._speedups import channels as codec
from aqueduct.config import DEFAULT, Bpmux, Config
from aqueduct.errors import AqueductError, ConnectionLost, LocalProtocolError
from aqueduct.protocol.channels import ids
from aqueduct.rpc import describe, request, table_scan
from aqueduct.rpc.sink_commit import COMMIT, DOCUMENT_SCHEMA

HANDLERS: Final = 5_000
"""Of the service for the floods in CROWDED; they make each collection of garbage long."""
CROWDED: Final = ("describe", "unknown-handlers")
MiB: Final = 1 << 20
EVERY: Final = 0.02  # seconds between two small calls
ROWS: Final = 25
BEAT: Final = 0.001  # seconds
TIME_LIMIT: Final = 120.0  # seconds, for each flood
COLUMNS: Final = pa.schema([("id", pa.int64()), ("name", pa.string()), ("price", pa.float64())])


# The service


class Probe:
    """The longest step of the event loop, and the longest pause between two of its turns."""

    def __init__(self) -> None:
        self.step = self.gap = 0.0
        """Seconds of processor time; seconds."""
        self.what = ""
        """What the longest step was."""
        self.collection = self._began = 0.0
        """Seconds of the longest garbage collection, in whatever thread: it stops all."""
        gc.callbacks.append(self._collects)
        self.last = time.perf_counter()
        kind: Any = asyncio.Handle
        run = kind._run

        def timed(handle: Any) -> None:
            began, callback = time.thread_time(), handle._callback
            run(handle)
            took = time.thread_time() - began
            if took > self.step:
                self.step, self.what = took, repr(callback)

        kind._run = timed

    def _collects(self, phase: str, _: Any) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self.collection = max(self.collection, now - self._began)

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(BEAT)
            now = time.perf_counter()
            self.gap, self.last = max(self.gap, now - self.last), now

    def reset(self) -> dict[str, Any]:
        """What was seen since the last reset."""
        found = {
            "step": 1e3 * self.step,
            "gap": 1e3 * self.gap,
            "collection": 1e3 * self.collection,
            "what": self.what[:300],
        }
        self.step = self.gap = self.collection = 0.0
        return found


class Rows:
    """A table whose methods run in threads."""

    schema = COLUMNS

    def takes(self, filter: Any) -> bool:
        return True

    def splits(self, request: Any) -> list[Any]:
        return [0]

    def read(self, split: Any, request: Any) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([[1], ["a"], [1.0]], schema=COLUMNS)


class LoopRows:
    """A table whose methods run on the event loop."""

    schema = COLUMNS

    async def takes(self, filter: Any) -> bool:
        return True

    async def splits(self, request: Any) -> list[Any]:
        return [0]

    async def read(self, split: Any, request: Any) -> AsyncIterator[pa.RecordBatch]:
        yield pa.record_batch([[1], ["a"], [1.0]], schema=COLUMNS)


class Nowhere:
    """A sink whose methods run on the event loop, and keep nothing."""

    async def open(self, attempt: Any, call: Any) -> Any:
        raise aqueduct.CallError("no flood begins an attempt")

    async def commit(self, write_key: Any, prepared: Any) -> None:
        pass

    async def abort(self, write_key: Any, prepared: Any) -> None:
        pass


def make_service(probe: Probe, handlers: int) -> aqueduct.Service:
    """One small handler, and what the floods use."""
    service = aqueduct.Service("floods")

    @service.handler("echo")
    async def echo(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    @service.handler("wait")
    async def wait(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            yield batch

    @service.handler("probe", output=table_scan.ANSWER, kind="source")
    async def told() -> AsyncIterator[pa.RecordBatch]:
        text = json.dumps(probe.reset())
        yield pa.RecordBatch.from_arrays([pa.array([text])], schema=table_scan.ANSWER)

    for number in range(handlers):
        service.handler(f"handler_{number:05}_of_very_many", input=COLUMNS, output=COLUMNS)(_echo)
    service.table("rows", Rows(), filters=lambda filter: True)
    service.table("applied", Rows(), filters="applied")
    service.table("loop_rows", LoopRows())
    service.sink("nowhere", Nowhere())
    return service


def _echo(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


async def _answer(connection: bpmux.BpmuxConnection) -> None:
    async for opened in connection:
        if isinstance(opened, bpmux.BpmuxRequest):
            await opened.respond(opened.payload)


async def serve(folder: str, handlers: int, *, collects: bool) -> None:
    """Listens until the standard input ends; says where."""
    if not collects:
        gc.disable()
    probe = Probe()
    task = asyncio.create_task(probe.watch())
    addresses = (
        f"aqueduct+unix://{folder}/floods.sock",
        "aqueduct+tcp://127.0.0.1:0",
        "aqueduct://127.0.0.1:0",
    )
    async with (
        await bpmux.serve(_answer, f"{folder}/bpmux.sock"),
        make_service(probe, handlers).serving(*addresses, dev_certificate=True) as running,
    ):
        print(json.dumps([*running.addresses, f"{folder}/bpmux.sock"]), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    task.cancel()


# The client that is served


async def call(address: str) -> None:
    """Asks a small question each 20 ms until the standard input has a line; says how it went."""
    batch = pa.record_batch([list(range(ROWS))], ["x"])
    async with await aqueduct.Client.connect(address) as client:
        await client.call("echo", batch)
        for _ in range(3):  # the first one has much to import
            await _probe(client)
        print("begun", flush=True)
        ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
        times: list[float] = []
        refused = 0
        while not ended.done():
            began = time.perf_counter()
            try:
                await client.call("echo", batch)
            except AqueductError:
                refused += 1
            took = time.perf_counter() - began
            times.append(took)
            await asyncio.sleep(max(0.0, EVERY - took))
        found = await _probe(client)
    times.sort()
    found |= {
        "calls": len(times),
        "refused": refused,
        "p50": 1e3 * times[len(times) // 2],
        "p99": 1e3 * times[len(times) * 99 // 100],
        "worst": 1e3 * times[-1],
    }
    print(json.dumps(found), flush=True)


async def _probe(client: aqueduct.Client) -> dict[str, Any]:
    (batch,) = [each async for each in client.source("probe")]
    found: dict[str, Any] = json.loads(batch.column(0)[0].as_py())
    return found


# The floods. Each goes on until it is cancelled.


class Places:
    """Where the service listens."""

    def __init__(self, places: list[str]) -> None:
        self.unix, self.tcp, self.quic, self.bpmux = places


async def bpmux_requests(places: Places) -> None:
    """20,000 tiny requests at once, over and over."""
    loop = asyncio.get_running_loop()
    number = 0
    while True:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, places.bpmux)
            data = b"".join(bytes([0x10]) + _varu64(n) + b"\x00" for n in range(20_000))
            with suppress(OSError):
                await loop.sock_sendall(sock, data)
                while await loop.sock_recv(sock, MiB):
                    number += 1
                    if number % 64 == 0:
                        break


def _varu64(value: int) -> bytes:
    if value < 248:
        return bytes([value])
    size = (value.bit_length() + 7) // 8
    return bytes([247 + size]) + value.to_bytes(size, "big")


async def _ask(places: Places, handler: str, *texts: str, at_once: int = 8) -> None:
    """The same documents again and again, a few at once."""
    schema = table_scan.QUESTION if handler.startswith(table_scan.PLAN) else DOCUMENT_SCHEMA
    batches = [pa.RecordBatch.from_arrays([pa.array([text])], schema=schema) for text in texts]

    async def again() -> None:
        while True:
            for batch in batches:
                await _quietly(client.call_table(handler, batch))

    async with await aqueduct.Client.connect(places.tcp) as client:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(again())


async def _quietly(awaitable: Awaitable[Any]) -> None:
    try:
        await awaitable
    except AqueductError as error:
        said[f"{type(error).__name__}: {error!s:.150}"] = None
        await asyncio.sleep(0)


said: dict[str, None] = {}
"""Errors that came."""


def _question(**members: Any) -> str:
    return json.dumps({"version": table_scan.VERSION, "ask": "plan", **members})


def _filters(kind: str) -> list[Any]:
    part: Any = {"op": "equal", "column": ["id"], "value": ["int", "1"]}
    if kind == "parts":
        return [{"op": "and", "of": [part] * 14_000}]
    if kind == "deep":
        parts = [part]
        for _ in range(30):
            parts = [{"op": "or", "of": parts}, *[part] * 450]
        return [{"op": "and", "of": parts}]
    if kind == "decimals":
        value = ["decimal", "1.5"]
        return [{"op": "in", "column": ["price"], "values": [value] * 50_000}]
    value = ["timestamp", "2024-01-01T00:00:00+00:00"]
    return [{"op": "in", "column": ["id"], "values": [value] * 22_000}]


def _table(name: str, kind: str) -> Callable[[Places], Awaitable[None]]:
    def flood(places: Places) -> Awaitable[None]:
        if kind == "columns":
            text = _question(columns=[f"column {n}" for n in range(60_000)])
        elif kind == "long":
            text = _question(columns=["x" * (MiB - 200)])
        elif kind == "nested":
            depth = 100_000
            text = _question(columns=[])[:-1] + ', "x": ' + "[" * depth + "]" * depth + "}"
        elif kind == "keys":
            text = _question(start={f"key {n}": n for n in range(50_000)})
        else:
            text = _question(filters=_filters(kind))
        assert len(text) <= MiB, len(text)
        return _ask(places, table_scan.PLAN + name, text)

    flood.__doc__ = f"Questions of 1 MiB to a table ({name}), of {kind}."
    return flood


def _metadata(kind: str) -> Callable[[Places], Awaitable[None]]:
    async def flood(places: Places) -> None:
        if kind == "keys":
            text = json.dumps({f"{n:x}": "" for n in range(2_800)}, separators=(",", ":"))
        else:
            text = '{"x": ' + "[" * 16_000 + "]" * 16_000 + "}"
        request._metadata_value = lambda metadata: text.encode()
        batch = pa.record_batch([[1]], ["x"])
        async with await aqueduct.Client.connect(places.tcp) as client:
            while True:
                calls = (
                    _quietly(client.call("echo", batch, headers={"x": "x"})) for _ in range(200)
                )
                await asyncio.gather(*calls)

    flood.__doc__ = f"Calls, 200 at once, whose metadata is JSON of 32 KiB ({kind})."
    return flood


def _commit(kind: str) -> Callable[[Places], Awaitable[None]]:
    def flood(places: Places) -> Awaitable[None]:
        head: dict[str, Any] = {"version": 1, "run": "r", "overwrite": False}
        if kind == "attempts":
            head["attempts"] = [
                {"execution": "e", "stage": 1, "partition": n, "task": n, "receipt": None}
                for n in range(200_000)
            ]
        elif kind == "receipt":
            receipt = {f"key {n}": [n] for n in range(1_500_000)}
            head["attempts"] = [
                {"execution": "e", "stage": 1, "partition": 0, "task": 0, "receipt": receipt}
            ]
        else:
            head |= {f"key {n}": n for n in range(1_500_000)}
        return _ask(places, COMMIT + "nowhere", json.dumps(head), at_once=1)

    flood.__doc__ = f"Commits of a sink with very many {kind}."
    return flood


async def describes(places: Places) -> None:
    """`describe` of a service with 5,000 handlers, 200 at once."""
    async with await aqueduct.Client.connect(places.tcp) as client:

        async def once() -> None:
            async for _ in client.source(describe.DESCRIBE):
                pass

        while True:
            await asyncio.gather(*(_quietly(once()) for _ in range(200)))


async def unknown_handlers(places: Places) -> None:
    """Calls of handlers that are not there, 200 at once, with names nearly as those that are."""
    batch = pa.record_batch([[1]], ["x"])
    async with await aqueduct.Client.connect(places.tcp) as client:
        while True:
            names = (f"handle_{n:05}_of_vary_many" for n in range(200))
            await asyncio.gather(*(_quietly(client.call(name, batch)) for name in names))


async def cancelled_calls(places: Places) -> None:
    """200 calls that are opened, and cancelled at once."""
    schema = pa.schema([("x", pa.int64())])

    async def some() -> AsyncIterator[pa.RecordBatch]:
        yield pa.record_batch([[1]], ["x"])
        await asyncio.sleep(60)

    async with await aqueduct.Client.connect(places.tcp) as client:

        async def one() -> None:
            async for _ in client.exchange("wait", some(), schema=schema):
                pass

        while True:
            tasks = [asyncio.ensure_future(_quietly(one())) for _ in range(200)]
            await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _connected(address: str, config: Config = DEFAULT) -> endpoint.Connection:
    return await endpoint.connect(address, config=config)


def _say(connection: endpoint.Connection, data: bytes, *, fin: bool = False) -> int:
    """Writes on the next stream, past the core; its number."""
    for number in range(1000):
        try:
            connection.carrier.write(number, [data], fin)
        except LocalProtocolError:  # it was there before
            continue
        return number
    raise AssertionError("no stream is to be had")


async def _pour(
    places: Places, begin: bytes, data: bytes, address: str, config: Config = DEFAULT
) -> None:
    """``data`` on one stream again and again, as fast as it leaves."""
    while True:
        connection = await _connected(address, config)
        number = _say(connection, begin)
        while not connection.closed:
            connection.carrier.write(number, [data], False)
            connection.carrier.flush()
            for _ in range(1000):
                left = getattr(connection.carrier, "_mux", None)
                await asyncio.sleep(0.001)
                if left is None or connection.closed or not _waits(connection):
                    break
        said[str(connection.error)[:200]] = None
        await asyncio.sleep(0.01)


def _waits(connection: endpoint.Connection) -> bool:
    told = connection.carrier.snapshot()
    return int(str(told.get("queued", 0))) > 16 * MiB


def _entry(*parts: bytes) -> bytes:
    return codec.VERSION + codec.encode_route_to(0) + b"".join(parts)


def _message(number: int, payload: bytes = b"", attached: Any = (), headers: Any = ()) -> bytes:
    pairs = [(channel, ()) for channel in attached]
    return b"".join(map(bytes, codec.encode_message(number, payload, headers, pairs)))


async def acks(places: Places) -> None:
    """ACK_RELIABLE of 4 MiB of ranges, on the entrypoint's sender, over and over."""
    block = codec.encode_ack_reliable([1] * (4 * MiB - 16))
    channel = ids.make(0, 1, False, 1)
    while True:
        connection = await _connected(places.tcp)
        # A call that is refused: its status is one message on this channel.
        _say(connection, _entry(_message(0, attached=[channel])), fin=True)
        connection.carrier.flush()
        await asyncio.sleep(0.01)
        number = _say(connection, codec.VERSION + codec.encode_route_to(channel))
        while not connection.closed:
            connection.carrier.write(number, [block], False)
            connection.carrier.flush()
            await asyncio.sleep(0.01)
        said[str(connection.error)[:200]] = None


async def tiny_frames(places: Places) -> None:
    """SENT_UNRELIABLE, two bytes each."""
    await _pour(places, _entry(), codec.encode_sent_unreliable(1) * MiB, places.tcp)


async def tiny_messages(places: Places) -> None:
    """Empty messages, each a call that is refused."""
    connection = await _connected(places.tcp)
    number, sent = _say(connection, _entry()), 0
    while not connection.closed:
        data = b"".join(_message(n) for n in range(sent, sent + 20_000))
        sent += 20_000
        connection.carrier.write(number, [data], False)
        connection.carrier.flush()
        await asyncio.sleep(0.01)
    said[str(connection.error)[:200]] = None


async def attachments(places: Places) -> None:
    """Calls that are refused, each with 1,000 channels."""
    connection = await _connected(places.tcp)
    number, sent = _say(connection, _entry()), 0
    while True:
        ids = ((n + 1) << 3 | 0 for n in range(sent * 1000, (sent + 10) * 1000))
        data = b"".join(
            _message(sent + k, attached=[next(ids) for _ in range(1000)]) for k in range(10)
        )
        sent += 10
        connection.carrier.write(number, [data], False)
        connection.carrier.flush()
        await asyncio.sleep(0.02)
        if connection.closed:
            said[str(connection.error)[:200]] = None
            connection = await _connected(places.tcp)
            number, sent = _say(connection, _entry()), 0


async def channels(places: Places) -> None:
    """Channels that are opened by a message and closed, over and over."""
    connection = await endpoint.connect(places.tcp)
    while not connection.closed:
        for _ in range(50):
            pairs = [endpoint.channel() for _ in range(100)]
            with suppress(AqueductError):
                connection.entrypoint.send_nowait(
                    b"", attachments=[receiver for _, receiver in pairs], force=True
                )
                for sender, _ in pairs:
                    sender.cancel()
        await asyncio.sleep(0)
    said[str(connection.error)[:200]] = None


async def tiny_chunks(places: Places) -> None:
    """A message of 16 MiB in chunks of one byte each."""
    config = replace(DEFAULT, bpmux=Bpmux(chunk=1))
    frame = b"".join(map(bytes, codec.encode_message(0, bytes(15 * MiB), (), ())))
    await _pour(places, _entry(), frame, places.tcp, config)


def _quic(kind: str) -> Callable[[Places], Awaitable[None]]:
    async def flood(places: Places) -> None:
        while True:
            connection = await endpoint.connect(places.quic)
            await connection.ping()
            quic: Any = connection.carrier._quic  # type: ignore[attr-defined]
            host: Any = connection.carrier._host  # type: ignore[attr-defined]
            address = quic._network_paths[0].addr
            plains = _plains(kind)
            quic._fill = lambda room, handlers, plains=plains: next(plains)
            deadline = time.monotonic() + 3
            while not connection.closed and time.monotonic() < deadline:
                quic._loss._cc.congestion_window = 1 << 50
                run = quic._run(time.monotonic(), 1 << 40)
                if run:
                    host.send_run(run, len(run[0]) + len(run[1]), address)
                await asyncio.sleep(0)
            said[str(connection.error)[:200]] = None
            connection.core.close(0, "", 0.0)
            connection.carrier.lose(ConnectionLost("over"))  # type: ignore[attr-defined]

    flood.__doc__ = f"QUIC packets of {kind}."
    return flood


def _plains(kind: str) -> Iterator[bytes]:
    """The frames of one packet after the other; no packet is longer than 15,900 bytes."""
    room, offset = 15_900, 0
    stream = 2 + 4 * 5
    content = _entry(_message(0, bytes(15 * MiB)))
    while True:
        if kind == "stream_frames":
            parts = []
            for at in range(offset, offset + room // 7):
                place = (0x80000000 | at).to_bytes(4, "big")
                parts.append(b"\x0e%c%b\x01%b" % (stream, place, content[at : at + 1] or b"x"))
            offset += room // 7
            yield b"".join(parts)
        elif kind == "late_stream_frames":  # always the same bytes: they are repetitions
            yield (b"\x0e%c\x00\x01\x00" % stream) * (room // 5)
        elif kind == "gaps":  # every other byte
            parts = []
            for at in range(offset, offset + 2 * (room // 7), 2):
                place = (0x80000000 | at % 60_000 + 1).to_bytes(4, "big")
                parts.append(b"\x0e%c%b\x01x" % (stream, place))
            offset += 2 * (room // 7)
            yield b"".join(parts)
        elif kind == "pings":
            yield b"\x01" * room
        elif kind == "tiny":
            yield b"\x01" * 24
        elif kind == "max_data":
            yield b"\x10\x00" * (room // 2)
        elif kind == "max_stream_data":
            yield (b"\x11%c\x00" % 3) * (room // 3)
        elif kind == "acks":
            yield b"\x02\x00\x00\x00\x00" * (room // 5)
        elif kind == "challenges":
            yield b"\x1aabcdefgh" * (room // 9)
        elif kind == "datagrams":
            yield b"\x31\x01x" * (room // 3)
        elif kind == "crypto":
            yield b"\x06\x00\x01x" * (room // 4)


async def garbage(places: Places) -> None:
    """UDP datagrams of 30 bytes that belong to nobody."""
    host, _, port = places.quic.partition("//")[2].partition("?")[0].rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, int(port)))
        while True:
            for _ in range(1000):
                with suppress(OSError):
                    sock.send(b"\x40" + bytes(29))
            await asyncio.sleep(0)


FLOODS: Final[dict[str, Callable[[Places], Awaitable[None]]]] = {
    "bpmux-requests": bpmux_requests,
    **{
        f"{name.replace('_', '-')}-{kind}": _table(name, kind)
        for name in ("rows", "applied", "loop_rows")
        for kind in ("parts", "deep", "decimals", "timestamps", "columns", "long", "nested", "keys")
    },
    "metadata-keys": _metadata("keys"),
    "metadata-nested": _metadata("nested"),
    "commit-attempts": _commit("attempts"),
    "commit-receipt": _commit("receipt"),
    "commit-keys": _commit("keys"),
    "describe": describes,
    "unknown-handlers": unknown_handlers,
    "cancelled-calls": cancelled_calls,
    "acks": acks,
    "tiny-frames": tiny_frames,
    "tiny-messages": tiny_messages,
    "attachments": attachments,
    "channels": channels,
    "tiny-chunks": tiny_chunks,
    **{
        f"quic-{kind.replace('_', '-')}": _quic(kind)
        for kind in (
            "stream_frames",
            "late_stream_frames",
            "gaps",
            "pings",
            "tiny",
            "max_data",
            "max_stream_data",
            "acks",
            "challenges",
            "datagrams",
            "crypto",
        )
    },
    "quic-garbage": garbage,
}


async def attack(name: str, places: list[str], seconds: float) -> None:
    """One flood for so long."""
    flood = FLOODS[name](Places(places))  # some have long texts to make
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await flood
    print(json.dumps(list(said)[:3]), flush=True)


# The table


class _Process:
    def __init__(self, folder: str, *arguments: str) -> None:
        self.complaints: IO[bytes] = open(f"{folder}/complaints", "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> str:
        try:
            out, _ = self.process.communicate("\n", timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            out = ""
        self.complaints.close()
        return out


def measure(name: str, seconds: float, *, collects: bool = True) -> None:
    """Prints a line for one flood."""
    with tempfile.TemporaryDirectory() as folder:
        handlers = HANDLERS if name in CROWDED else 0
        options = [] if collects else ["--no-collections"]
        service = _Process(folder, "--serve", folder, "--handlers", str(handlers), *options)
        places = service.line()
        client = _Process(folder, "--call", json.loads(places)[0])
        client.line()
        flood = _Process(folder, "--attack", name, "--places", places, "--seconds", str(seconds))
        errors = flood.end().strip()
        told = client.end().strip()
        service.end()
        complaints = Path(folder, "complaints").read_text(errors="replace").strip()
    if not told:
        print(f"{name:28} the service answered no more", errors, complaints[-600:], flush=True)
        return
    found = json.loads(told.splitlines()[-1])
    print(
        f"{name:28}{found['step']:9.1f}{found['gap']:9.1f}{found['collection']:9.1f}"
        f"{found['p50']:8.1f}{found['p99']:8.1f}{found['worst']:9.1f}{found['calls']:7}"
        f"{found['refused']:8}",
        flush=True,
    )
    if verbose:
        print("    ", found["what"], errors, complaints[-600:], flush=True)


verbose = False


def main() -> None:
    """Starts the processes for each flood."""
    global verbose
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument(
        "--no-collections",
        action="store_true",
        help="the service collects no garbage: what is left is the work of the library alone",
    )
    parser.add_argument("--verbose", action="store_true", help="say what the longest step was")
    parser.add_argument("--handlers", type=int, default=0, help=argparse.SUPPRESS)
    for hidden in ("--serve", "--call", "--attack", "--places"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("floods", nargs="*", metavar="FLOOD", help=", ".join(FLOODS))
    arguments = parser.parse_args()
    verbose = arguments.verbose
    if arguments.serve:
        collects = not arguments.no_collections
        asyncio.run(serve(arguments.serve, arguments.handlers, collects=collects))
    elif arguments.call:
        asyncio.run(call(arguments.call))
    elif arguments.attack:
        asyncio.run(attack(arguments.attack, json.loads(arguments.places), arguments.seconds))
    else:
        print(
            f"{'flood':28}{'step':>9}{'gap':>9}{'collect':>9}{'p50':>8}{'p99':>8}{'worst':>9}"
            f"{'calls':>7}{'refused':>8}"
        )
        for name in arguments.floods or FLOODS:
            if name not in FLOODS:
                parser.error(f"{name!r} is none of {', '.join(FLOODS)}")
            measure(name, arguments.seconds, collects=not arguments.no_collections)


if __name__ == "__main__":
    main()
