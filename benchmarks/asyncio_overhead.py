"""Ways to drive byte-stream connections from asyncio, with nothing on top of them but lengths.

    python -m benchmarks.asyncio_overhead [--repeat N] [--quick] [--json FILE] [--only TEXT]
        [--list]

- ``callbacks``: the event loop's own ``add_reader`` and ``add_writer``, non-blocking sockets. This
  is what ``aqueduct/carriers/stream`` does.
- ``threads``: a thread with a blocking socket reads for each connection and hands messages to the
  loop; what the loop cannot write at once another thread writes.

Messages have their length in front. The loop takes every message whole, in memory of its own, as a
program would. Cases: batches of 1 MiB and of 64 KiB in one direction, 200 bytes there and back, and
1,000 connections that each send 64 KiB and get them back, four times, all at once; over TCP and a
Unix socket, between two processes. Each message begins with its number, and the numbers and the
lengths are checked.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import processes, results
from benchmarks.asyncio_transports import DRIVERS, HIGH_WATER, Connection, KiB, MiB
from benchmarks.peers import common
from benchmarks.runner import ROOT, Benchmark, Progress, run_command

QUICK: Final = 8
TIMEOUT: Final = 120.0
ROUNDS: Final = 4
BULK: Final = ("mib_s", "cpu_gib", "client_growth_mib", "server_growth_mib")
TRIPS: Final = ("p50_us", "p99_us")


@dataclass(frozen=True)
class Contestant:
    """A way to drive a connection, of DRIVERS."""

    name: str


@dataclass(frozen=True)
class Case:
    """Messages of ``size``: ``nbytes`` of them one way, or so many laps there and back."""

    name: str
    carrier: str
    size: int
    nbytes: int = 0
    laps: int = 0
    connections: int = 1
    contestants: tuple[Contestant, ...] = tuple(map(Contestant, DRIVERS))

    def told(self, contestant: Contestant, quick: bool, folder: str) -> dict[str, Any]:
        divisor = QUICK if quick else 1
        return {
            "carrier": self.carrier,
            "size": self.size,
            "count": self.nbytes // self.size // divisor,
            "laps": self.laps if self.laps <= ROUNDS else self.laps // divisor,
            "connections": max(1, self.connections // divisor),
            "driver": contestant.name,
            "folder": folder,
        }


PLAN: Final = tuple(
    case
    for carrier in ("tcp", "unix")
    for case in (
        Case(f"{carrier}-1m", carrier, MiB, nbytes=1 << 30),
        Case(f"{carrier}-64k", carrier, 64 * KiB, nbytes=1 << 29),
        Case(f"{carrier}-200", carrier, 200, laps=4000),
        Case(f"{carrier}-1000", carrier, 64 * KiB, laps=ROUNDS, connections=1000),
    )
)


# ----------------------------------------------------------------- the two processes


def expect(body: memoryview, size: int, number: int) -> None:
    found = int.from_bytes(body[:8], "little")
    if len(body) != size or found != number:
        raise RuntimeError(f"message {number} of {size}: got {found} of {len(body)}")


def tune(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def serve(told: dict[str, Any]) -> None:
    """Counts what comes in one way and confirms the end, or sends everything back."""
    if told["carrier"] == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(told["folder"], "drivers.sock"))
        listener.listen(4096)
    else:
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setblocking(False)
    driver, connections, seen = DRIVERS[told["driver"]], [], 0

    def counted(connection: Connection, body: memoryview) -> None:
        nonlocal seen
        expect(body, told["size"], seen)
        seen += 1
        if seen == told["count"]:
            connection.send(b"ok")

    def echoed(connection: Connection, body: memoryview) -> None:
        connection.send(body)

    loop = asyncio.get_running_loop()
    usage = common.Usage()

    def report() -> None:
        sys.stdin.buffer.read()
        print(json.dumps(usage.report()), flush=True)
        os._exit(0)

    print(json.dumps({"address": listener.getsockname()}), flush=True)
    threading.Thread(target=report, daemon=True).start()
    while True:
        sock, _ = await loop.sock_accept(listener)
        tune(sock)
        connections.append(driver(sock, counted if told["count"] else echoed))


async def call(told: dict[str, Any], address: Any) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    driver, size, laps = DRIVERS[told["driver"]], told["size"], told["laps"]
    payload = bytes(np.random.default_rng(3).bytes(size - 8))
    confirmed: asyncio.Future[memoryview] = loop.create_future()
    done = asyncio.Event()
    began: list[float] = []
    left = told["connections"]
    lap: dict[Connection, int] = {}

    def once(_: Connection, body: memoryview) -> None:
        confirmed.set_result(body)

    def back(connection: Connection, body: memoryview) -> None:
        nonlocal left
        number = lap[connection]
        expect(body, size, number)
        began.append(time.perf_counter())
        lap[connection] = number = number + 1
        if number < laps:
            connection.send(number.to_bytes(8, "little"), payload)
        else:
            left -= 1
            if not left:
                done.set()

    connections = []
    for _ in range(told["connections"]):
        unix = told["carrier"] == "unix"
        sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        sock.connect(address if unix else tuple(address))
        tune(sock)
        connections.append(driver(sock, once if told["count"] else back))
    usage, start = common.Usage(), time.perf_counter()
    if told["count"]:
        (connection,) = connections
        for number in range(told["count"]):
            connection.send(number.to_bytes(8, "little"), payload)
            if connection.queued > HIGH_WATER:
                await connection.room()
        if bytes(await confirmed) != b"ok":
            raise RuntimeError("the end was not confirmed")
    else:
        began.append(start)
        for connection in connections:
            lap[connection] = 0
            connection.send(bytes(8), payload)
        await done.wait()
    result: dict[str, Any] = {"seconds": time.perf_counter() - start}
    result["bytes"] = size * (told["count"] or laps * len(connections))
    result.update({f"client_{name}": value for name, value in usage.report().items()})
    if len(connections) == 1 and laps:
        times = sorted((b - a) * 1e6 for a, b in itertools.pairwise(began))
        result.update(p50_us=times[len(times) // 2], p99_us=times[len(times) * 99 // 100])
    return result


# ----------------------------------------------------------------- the benchmark


def measure(told: dict[str, Any]) -> dict[str, Any]:
    """One measurement, in two fresh processes."""
    command = [sys.executable, str(ROOT / "benchmarks" / "asyncio_overhead.py")]
    text = json.dumps(told)
    server, result = processes.run_pair(
        [*command, "--server", text], [*command, "--client", text], TIMEOUT
    )
    gib = result["bytes"] / (1 << 30)
    row = {"bytes": result["bytes"], "seconds": result["seconds"]}
    if "p50_us" in result:
        return row | {name: result[name] for name in ("p50_us", "p99_us")}
    row["mib_s"] = result["bytes"] / MiB / result["seconds"]
    row["cpu_gib"] = (result["client_cpu"] + server["cpu"]) / gib
    for side, growth in (("client", result["client_growth"]), ("server", server["growth"])):
        row[f"{side}_growth_mib"] = growth / MiB
    return row


def run(cases: list[Case], repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    progress = Progress(repeats * sum(len(case.contestants) for case in cases))
    for repeat in range(repeats):
        for case in cases:
            for contestant in case.contestants:
                row = {"case": case.name, "contestant": contestant.name, "repeat": repeat}
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        row.update(measure(case.told(contestant, quick, folder)))
                    except processes.Failed as error:
                        row["error"] = str(error)
                progress.done += 1
                progress.show(f"{case.name} {contestant.name}: {row.get('error', 'done')}")
                yield row
    progress.end()


def report(found: results.Run) -> str:
    """The tables: bytes, and round trips."""
    tables: dict[tuple[str, ...], list[list[str]]] = {BULK: [], TRIPS: []}
    for case in found.cases():
        metrics = TRIPS if case.endswith("-200") else BULK
        for name in found.contestants(case):
            failed = len(found.errors(case, name))
            cells = [case, name + (f" ({failed} failed)" if failed else "")]
            for metric in metrics:
                values = found.values(case, name, metric).values()
                cells.append(str(results.Spread.of(values)) if values else "-")
            tables[metrics].append(cells)
    return "\n\n".join(
        results.table(["case", "driver", *(results.UNITS[metric] for metric in metrics)], lines)
        for metrics, lines in tables.items()
        if lines
    )


def select(only: str) -> list[Case]:
    """The cases whose name holds one of the words of ``only``."""
    words = [word for word in only.split(",") if word]
    return [case for case in PLAN if not words or any(word in case.name for word in words)]


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["--server"], ["--client"]):
        common.end_with_parent()
        role, told, *address = arguments
        if role == "--server":
            asyncio.run(serve(json.loads(told)))
        print(json.dumps(asyncio.run(call(json.loads(told), json.loads(*address)))), flush=True)
        os._exit(0)
    benchmark = Benchmark(select, run, report, QUICK)
    summary = (__doc__ or "").replace("\n", " ")
    return run_command(benchmark, arguments, summary=summary, only="words in cases", repeat=3)


if __name__ == "__main__":
    sys.exit(main())
