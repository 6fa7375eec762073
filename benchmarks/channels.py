"""Messages of channels, of either dialect, between two processes.

    python -m benchmarks.channels [--repeat N] [--quick] [--json FILE] [--only TEXT] [--list]

A client sends messages of one size on the entrypoint; the server reads them. The time is that from
the first message until the client knows that the server has taken the last. ``first`` is Aqueduct,
``draft`` the control-stream draft. The cases go over TCP, a Unix socket and QUIC. Each measurement
has a server and a client process of its own; contestants take turns.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aqueduct
from benchmarks import certificate, processes, results
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
TABLE: Final = ("mib_s", "cpu_gib", "messages_s", "messages_cpu_s")
DRAFT: Final = "dialect=control-streams"
PLACES: Final = {
    "tcp": "aqueduct+tcp://127.0.0.1:0",
    "unix": "aqueduct+unix://{}/s",
    "quic": "aqueduct://127.0.0.1:0",
}


@dataclass(frozen=True)
class Contestant:
    """A dialect."""

    name: str
    draft: bool = False


@dataclass(frozen=True)
class Case:
    """What is sent, ``count`` messages of ``size`` bytes, and over what."""

    name: str
    scheme: str
    count: int
    size: int
    contestants: tuple[Contestant, ...] = (
        Contestant("channels/first"),
        Contestant("channels/draft", draft=True),
    )


@dataclass(frozen=True)
class Told:
    """What both processes know of a measurement."""

    scheme: str
    count: int
    size: int
    draft: bool


PLAN: Final = (
    Case("tcp-message-64k", "tcp", 32_768, 64 * KiB),
    Case("unix-message-64k", "unix", 32_768, 64 * KiB),
    Case("quic-message-64k", "quic", 2048, 64 * KiB),
    Case("tcp-message-100", "tcp", 200_000, 100),
    Case("unix-message-100", "unix", 200_000, 100),
    Case("quic-message-100", "quic", 50_000, 100),
)


# ----------------------------------------------------------------- the two processes


async def serve(told: Told, folder: str) -> None:
    """The server: reads all messages of each connection, and checks how many came."""
    dialect = f"?{DRAFT}" if told.draft else ""
    place = PLACES[told.scheme].format(folder)
    tls = None
    if told.scheme == "quic":
        paths = certificate.write(Path(folder))
        tls = aqueduct.ServerTls(paths[0], paths[1])

    async def on_connection(connection: aqueduct.Connection) -> None:
        nbytes = count = 0
        try:
            async for message in connection.entrypoint:
                nbytes += message.size
                count += 1
        except aqueduct.Finished:
            pass
        if (count, nbytes) not in {(told.count, told.count * told.size), (WARMUP, WARMUP)}:
            os._exit(1)  # the client sees the connection go

    server = await aqueduct.serve(on_connection, f"{place}{dialect}", tls=tls)
    address = str(server.addresses[0])
    if tls is not None:
        address += ("&" if "?" in address else "?") + f"ca={folder}/cert.pem"
    usage = common.Usage()

    def report() -> None:
        sys.stdin.buffer.read()
        print(json.dumps(usage.report()), flush=True)
        os._exit(0)

    threading.Thread(target=report, daemon=True).start()
    print(json.dumps({"address": address}), flush=True)
    await asyncio.Event().wait()


WARMUP: Final = 100
"""Messages of one byte that a connection of their own carries first."""


async def send(told: Told, address: str) -> dict[str, Any]:
    """The client."""
    await _send_all(address, bytes(1), WARMUP)
    usage, began = common.Usage(), time.perf_counter()
    await _send_all(address, bytes(told.size), told.count)
    return {"seconds": time.perf_counter() - began, "cpu": usage.spent()}


async def _send_all(address: str, payload: bytes, count: int) -> None:
    connection = await aqueduct.connect(address)
    sender = connection.entrypoint
    for _ in range(count):
        await sender.send(payload)
    sender.finish()
    await sender.wait_closed()
    await connection.close()


# ----------------------------------------------------------------- the benchmark


def measure(told: Told) -> dict[str, Any]:
    """One measurement, in two fresh processes. Raises Failed."""
    command = [sys.executable, str(ROOT / "benchmarks" / "channels.py")]
    text = json.dumps(asdict(told))
    with tempfile.TemporaryDirectory() as folder:
        server, client = processes.run_pair(
            [*command, "--server", text, folder], [*command, "--client", text], TIMEOUT
        )
    cpu, nbytes = server["cpu"] + client["cpu"], told.count * told.size
    if told.size >= KiB:
        return {
            "mib_s": nbytes / MiB / client["seconds"],
            "cpu_gib": cpu / (nbytes / (1 << 30)),
        }
    return {"messages_s": told.count / client["seconds"], "messages_cpu_s": told.count / cpu}


def run(cases: list[Case], repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measures ``cases`` in turn and yields rows."""

    def numbers(case: Case, contestant: Contestant) -> dict[str, Any]:
        count = case.count // (QUICK if quick else 1)
        return measure(Told(case.scheme, count, case.size, contestant.draft))

    yield from measure_in_turn(cases, repeats, TABLE, numbers)


def report(found: results.Run) -> str:
    """A line for each contestant and number."""
    return report_ratios(found, TABLE)


def select(only: str) -> list[Case]:
    """The cases that ``only`` names."""
    return select_words(PLAN, only)


def main(arguments: list[str] | None = None) -> int:
    """The command, or one of the two processes of a measurement. The exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--server"]:
        common.end_with_parent()
        asyncio.run(serve(Told(**json.loads(arguments[1])), arguments[2]))
    if arguments[:1] == ["--client"]:
        common.end_with_parent()
        told, address = Told(**json.loads(arguments[1])), json.loads(arguments[2])
        print(json.dumps(asyncio.run(send(told, address))), flush=True)
        os._exit(0)
    benchmark = Benchmark(select, run, report, QUICK)
    return run_command(
        benchmark, arguments, summary=__doc__ or "", only="words in cases and peers", repeat=7
    )


if __name__ == "__main__":
    sys.exit(main())
