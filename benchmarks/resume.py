"""Connections that can be resumed beside plain ones, and how soon a cut one moves bytes again.

    python -m benchmarks.resume [--repeat N] [--quick] [--json FILE] [--only TEXT] [--list]

- ``call``, ``sink`` and ``echo``: ``plain`` is without ``?resume=``, ``link`` with it. ``again`` is
  ``plain`` once more: how far two of a kind are apart. They take turns, on connections that stay
  open. Batches have 1 MiB or 64 KiB; a call has 25 rows of 8 bytes.
- ``redial``: a source sends a batch each millisecond, and a proxy cuts the connection. Counted is
  the time from the next connection of the proxy to the next batch that the reader gets.
- ``redial-far``: the same in round trips, as the proxy delays all bytes by 50 ms each way. One is
  added for the handshake of TCP, which a proxy cannot delay.
- ``links``: 1,000 links whose proxy ends, and is there again after half a second. Counted is the
  time until the last one is up, from then on.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aqueduct
from aqueduct.address import Address
from benchmarks import processes, results
from benchmarks.peers import common
from benchmarks.runner import ROOT, Benchmark, Progress, run_command

KiB: Final = 1 << 10
MiB: Final = 1 << 20
QUICK: Final = 16
TIMEOUT: Final = 600.0
CALLS: Final = 400
LINKS: Final = 1000
AWAY: Final = 0.5
"""Seconds without a proxy."""
SIDES: Final = ("plain", "link", "again")
SCHEMA: Final = pa.schema([("n", pa.int64())])
TABLE: Final = ("p50_us", "mib_s", "redial_ms", "redial_trips", "up_s")


@dataclass(frozen=True)
class Contestant:
    """Of ``SIDES``."""

    name: str


@dataclass(frozen=True)
class Case:
    """What is measured. ``size`` is of a batch, ``delay`` the proxy's each way, in seconds."""

    name: str
    scheme: str
    kind: str
    size: int = 0
    nbytes: int = 0
    delay: float = 0.0

    @property
    def contestants(self) -> tuple[Contestant, ...]:
        compared = self.kind in ("call", "sink", "echo")
        return tuple(map(Contestant, SIDES if compared else ("link",)))


PLAN: Final = tuple(
    case
    for scheme in ("tcp", "tls")
    for case in (
        Case(f"{scheme}-call", scheme, "call"),
        *(
            Case(f"{scheme}-{kind}-{name}", scheme, kind, size, nbytes)
            for kind in ("sink", "echo")
            for name, size, nbytes in (("1m", MiB, 512 * MiB), ("64k", 64 * KiB, 128 * MiB))
        ),
        Case(f"{scheme}-redial", scheme, "redial"),
        Case(f"{scheme}-redial-far", scheme, "redial", delay=0.05),
        Case(f"{scheme}-links", scheme, "links"),
    )
)


# ----------------------------------------------------------------- the service


def service() -> aqueduct.Service:
    made = aqueduct.Service("resume")

    @made.handler("same")
    def same(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    @made.handler("sink", output=SCHEMA)
    async def sink(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        rows = 0
        async for batch in batches:
            rows += batch.num_rows
        yield pa.record_batch({"n": [rows]}, schema=SCHEMA)

    @made.handler("echo", output=SCHEMA)
    async def echo(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for batch in batches:
            yield batch

    @made.handler("ticks", kind="source", output=SCHEMA)
    async def ticks() -> AsyncIterator[pa.RecordBatch]:
        number = 0
        while True:
            yield pa.record_batch({"n": [number]}, schema=SCHEMA)
            number += 1
            await asyncio.sleep(0.001)

    return made


async def serve(scheme: str) -> None:
    place = f"aqueduct+{scheme}://127.0.0.1:0"
    places = place, place + "?resume=60s"
    async with service().serving(*places, drain=0, dev_certificate=scheme == "tls") as running:

        def end() -> None:
            sys.stdin.buffer.read()
            print(json.dumps({}), flush=True)
            os._exit(0)

        plain, link = running.addresses
        print(json.dumps({"address": {"plain": plain, "link": link}}), flush=True)
        threading.Thread(target=end, daemon=True).start()
        await asyncio.Event().wait()


# ----------------------------------------------------------------- the proxy


class LateProxy:
    """Stands before a service; its bytes are ``delay`` seconds late, each way."""

    def __init__(self, address: str, delay: float) -> None:
        self._address = Address.parse(address)
        self._delay = delay
        self._port = 0
        self._open: set[asyncio.Transport] = set()
        self.accepted: list[float] = []
        """When there was a new connection."""

    @property
    def address(self) -> str:
        return str(self._address.with_port(self._port))

    async def start(self) -> None:
        """Also again, at the same port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Side(self), "127.0.0.1", self._port, backlog=2 * LINKS
        )
        self._port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        for transport in tuple(self._open):
            transport.abort()

    async def join(self, client: _Side) -> None:
        host, port = self._address.host, self._address.port
        loop = asyncio.get_running_loop()
        try:
            _, client.other = await loop.create_connection(lambda: _Side(self, client), host, port)
        except OSError:
            client.transport.abort()
            return
        for data in client.early:
            client.pass_on(data)


class _Side(asyncio.Protocol):
    """One end of a connection through the proxy."""

    def __init__(self, proxy: LateProxy, other: _Side | None = None) -> None:
        self.early: list[bytes] = []
        self.transport: asyncio.Transport
        self.other = other
        self._proxy = proxy
        self._accepted = other is None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._proxy._open.add(transport)
        if self._accepted:
            self._proxy.accepted.append(time.perf_counter())
            self._joining = asyncio.ensure_future(self._proxy.join(self))

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early.append(data)
        else:
            self.pass_on(data)

    def pass_on(self, data: bytes) -> None:
        assert self.other is not None
        if self._proxy._delay:
            loop = asyncio.get_running_loop()
            loop.call_later(self._proxy._delay, self.other.transport.write, data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._proxy._open.discard(self.transport)
        if self.other is not None:
            self.other.transport.abort()


# ----------------------------------------------------------------- the client


async def compare(case: Case, repeats: int, addresses: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of ``SIDES``, in turn."""
    clients = {
        side: await aqueduct.Client.connect(addresses["link" if side == "link" else "plain"])
        for side in SIDES
    }
    rows = []
    for repeat in range(-1, repeats):  # the first one is a rehearsal
        for side in SIDES:
            row = await (call if case.kind == "call" else move)(case, clients[side])
            if repeat >= 0:
                rows.append({"contestant": side, "repeat": repeat, **row})
    return rows


async def call(case: Case, client: aqueduct.Client) -> dict[str, Any]:
    batch = pa.record_batch({"n": list(range(25))}, schema=SCHEMA)
    times = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        answer = await client.call("same", batch)
        times.append((time.perf_counter() - begun) * 1e6)
        if answer != batch:
            raise RuntimeError("the answer is another batch")
    return {"p50_us": statistics.median(times)}


async def move(case: Case, client: aqueduct.Client) -> dict[str, Any]:
    count = case.nbytes // case.size
    batch = pa.record_batch({"n": range(case.size // 8)}, schema=SCHEMA)
    begun = time.perf_counter()
    rows = 0
    async for each in client.exchange(case.kind, [batch] * count, schema=SCHEMA):
        rows += each.column(0)[0].as_py() if case.kind == "sink" else each.num_rows
    seconds = time.perf_counter() - begun
    if rows != count * batch.num_rows:
        raise RuntimeError(f"{rows} rows of {count * batch.num_rows} came")
    return {"mib_s": count * case.size / MiB / seconds}


async def redial(case: Case, repeats: int, addresses: dict[str, str]) -> list[dict[str, Any]]:
    proxy = LateProxy(addresses["link"], case.delay)
    await proxy.start()
    client = await aqueduct.Client.connect(proxy.address)
    rows: list[dict[str, Any]] = []
    wanted = 0
    async for each in client.source("ticks", output_schema=SCHEMA):
        now = time.perf_counter()
        number = each.column(0)[0].as_py()
        if number != wanted:
            raise RuntimeError(f"batch {number} came, not {wanted}")
        wanted += 1
        if len(proxy.accepted) == len(rows) + 2:  # the first one after a cut
            took = now - proxy.accepted[-1]
            row: dict[str, Any] = {"contestant": "link", "repeat": len(rows)}
            if case.delay:
                row["redial_trips"] = 1 + took / (2 * case.delay)
            else:
                row["redial_ms"] = took * 1e3
            rows.append(row)
            if len(rows) == repeats:
                break
        if wanted % 200 == 100:
            proxy.cut()
    return rows


async def links(case: Case, repeats: int, addresses: dict[str, str]) -> list[dict[str, Any]]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    proxy = LateProxy(addresses["link"], 0.0)
    await proxy.start()
    count = case.size or LINKS
    clients = [await aqueduct.Client.connect(proxy.address) for _ in range(count)]
    rows = []
    for repeat in range(repeats):
        proxy.stop()
        await asyncio.sleep(AWAY)
        await proxy.start()
        begun = time.perf_counter()
        while any(client.connection.carrier.resumes <= repeat for client in clients):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        rows.append({"contestant": "link", "repeat": repeat, "up_s": time.perf_counter() - begun})
    return rows


async def client(case: Case, repeats: int, addresses: dict[str, str]) -> list[dict[str, Any]]:
    measures = {"redial": redial, "links": links}
    return await measures.get(case.kind, compare)(case, repeats, addresses)


# ----------------------------------------------------------------- the benchmark


def measure(case: Case, repeats: int) -> list[dict[str, Any]]:
    """The rows of a case, by two fresh processes. Raises Failed."""
    command = [sys.executable, str(ROOT / "benchmarks" / "resume.py")]
    told = json.dumps({"case": asdict(case), "repeats": repeats})
    _, found = processes.run_pair(
        [*command, "--server", case.scheme], [*command, "--client", told], TIMEOUT
    )
    rows: list[dict[str, Any]] = found["rows"]
    return [{"case": case.name, **row} for row in rows]


def run(cases: list[Case], repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    progress = Progress(len(cases))
    for case in cases:
        told = asdict(case)
        if quick:
            told["nbytes"] //= QUICK
            told["size"] = told["size"] or LINKS // QUICK
        try:
            yield from measure(Case(**told), repeats)
        except processes.Failed as error:
            for contestant in case.contestants:
                row = {"case": case.name, "contestant": contestant.name, "repeat": 0}
                yield {**row, "error": str(error)}
        progress.done += 1
        progress.show(case.name)
    progress.end()


def report(found: results.Run) -> str:
    """A line for each contestant, with what it has and its ratio to ``plain``."""
    lines = []
    for case in found.cases():
        for name in found.contestants(case):
            failed = len(found.errors(case, name))
            for metric in TABLE:
                values = found.values(case, name, metric).values()
                if not values and not (failed and metric == TABLE[0]):
                    continue
                ratios = found.ratios(case, name, SIDES[0], metric) if name != SIDES[0] else []
                lines.append(
                    [
                        case,
                        name + (f" ({failed} failed)" if failed else ""),
                        results.UNITS[metric],
                        str(results.Spread.of(values)) if values else "-",
                        str(results.Spread.of(ratios)) if ratios else "",
                    ]
                )
    return results.table(["case", "contestant", "what", "median", "of plain"], lines)


def select(only: str) -> list[Case]:
    """The cases whose name holds one of the words of ``only``."""
    words = [word for word in only.split(",") if word]
    return [case for case in PLAN if not words or any(word in case.name for word in words)]


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--server"]:
        common.end_with_parent()
        asyncio.run(serve(arguments[1]))
    if arguments[:1] == ["--client"]:
        common.end_with_parent()
        told, addresses = map(json.loads, arguments[1:])
        rows = asyncio.run(client(Case(**told["case"]), told["repeats"], addresses))
        print(json.dumps({"rows": rows}), flush=True)
        os._exit(0)
    benchmark = Benchmark(select, run, report, QUICK)
    summary = (__doc__ or "").replace("\n", " ")
    return run_command(benchmark, arguments, summary=summary, only="words in cases", repeat=11)


if __name__ == "__main__":
    sys.exit(main())
