"""1,000 connections with 10 channels each on one server process, all busy at once.

    python -m benchmarks.many_connections [--repeat N] [--quick] [--json FILE] [--only TEXT]
        [--list]

The clients are in another process. First every connection is made and every channel attached; the
server answers on each with a word, so that both its directions are open. Then, at once, every
channel carries 64 KiB to the server and the channel of its answers 64 KiB back: 10,000 exchanges.
Each has bytes of its own, and both sides compare every byte. Reported: time and CPU of the
exchanges, and the server's memory with all channels open and at rest, and at its peak.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aqueduct
from aqueduct.endpoint import Connection, Message, Receiver, Sender
from benchmarks import processes, results
from benchmarks.peers import common
from benchmarks.runner import ROOT, Benchmark, Progress, run_command

MiB: Final = 1 << 20
SIZE: Final = 64 << 10
QUICK: Final = 10
TIMEOUT: Final = 300.0
CONNECTING: Final = 50
"""Connections that are being made at once."""
ENCRYPTED: Final = ("quic", "tls")
TABLE: Final = (
    "exchange_s",
    "mib_s",
    "client_cpu_s",
    "server_cpu_s",
    "server_rest_mib",
    "server_growth_mib",
    "connection_kib",
)


@dataclass(frozen=True)
class Told:
    """What both processes know of a measurement."""

    carrier: str
    connections: int
    channels: int
    folder: str = ""

    @property
    def exchanges(self) -> int:
        return self.connections * self.channels


@dataclass(frozen=True)
class Contestant:
    """Ours, over a carrier."""

    name: str
    carrier: str


@dataclass(frozen=True)
class Case:
    """So many connections with so many channels."""

    name: str
    contestants: tuple[Contestant, ...]
    connections: int = 1000
    channels: int = 10


PLAN: Final = (
    Case("many", tuple(Contestant(f"aqueduct/{name}", name) for name in ("tcp", "unix", "tls"))),
)


class Payloads:
    """Payloads that all differ, as views of one piece of random memory."""

    def __init__(self, exchanges: int) -> None:
        self.exchanges = exchanges
        random = np.random.default_rng(11)
        self.base = memoryview(random.bytes(SIZE + 2 * 8 * exchanges))

    def question(self, number: int) -> memoryview:
        return self.base[8 * number : 8 * number + SIZE]

    def answer(self, number: int) -> memoryview:
        return self.question(self.exchanges + number)


def check(found: Any, expected: memoryview, what: str) -> None:
    if found != expected:  # memoryviews of bytes: every byte
        raise RuntimeError(f"{what} is not what was sent ({len(found)} bytes)")


def resident() -> int:
    """Bytes of this process's memory now (Linux; elsewhere the peak)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return common.peak_memory()


# ----------------------------------------------------------------- the server


class Server:
    """Answers on every channel of every connection."""

    def __init__(self, told: Told) -> None:
        self.payloads = Payloads(told.exchanges)
        self.answered = 0
        self.usage = common.Usage()
        self.rest: dict[str, float] = {}
        self.wrong: list[str] = []

    async def serve_connection(self, connection: Connection) -> None:
        async with asyncio.TaskGroup() as group:
            async for message in connection.entrypoint:
                group.create_task(self._serve_channel(message))

    async def _serve_channel(self, opening: Message) -> None:
        if len(opening.attachments) == 1:  # everything is open
            (asker,) = opening.attachments
            assert isinstance(asker.handle, Sender)
            self.rest = {"rest": resident() - self.usage.memory, "opening": self.usage.spent()}
            await asker.handle.send(b"go")
            return
        questions, answers = (attached.handle for attached in opening.attachments)
        assert isinstance(questions, Receiver) and isinstance(answers, Sender)
        number = int.from_bytes(opening.payload, "little")
        await answers.send(b"open")
        message = await questions.receive()
        try:
            check(message.payload, self.payloads.question(number), f"question {number}")
        except RuntimeError as error:
            self.wrong.append(str(error))
        await answers.send(self.payloads.answer(number))
        self.answered += 1
        answers.finish()
        async for _ in questions:
            self.wrong.append(f"another message behind question {number}")


async def serve(told: Told) -> None:
    server = Server(told)
    tls = aqueduct.dev_certificate() if told.carrier in ENCRYPTED else None
    running = await aqueduct.serve(server.serve_connection, address_of(told), tls=tls)
    server.usage = common.Usage()

    def report() -> None:
        sys.stdin.buffer.read()
        found: dict[str, Any] = {**server.usage.report(), **server.rest}
        found.update(answered=server.answered, wrong=server.wrong[:3])
        print(json.dumps(found), flush=True)
        os._exit(0)

    threading.Thread(target=report, daemon=True).start()
    print(json.dumps({"address": running.addresses[0]}), flush=True)
    await asyncio.Event().wait()


def address_of(told: Told) -> str:
    if told.carrier == "unix":
        return f"aqueduct+unix://{told.folder}/many.sock"
    scheme = "aqueduct" if told.carrier == "quic" else f"aqueduct+{told.carrier}"
    return f"{scheme}://127.0.0.1:0"


# ----------------------------------------------------------------- the clients


@dataclass
class Exchange:
    """A channel to the server and the one of its answers."""

    number: int
    questions: Sender
    answers: Receiver

    @classmethod
    async def open(cls, connection: Connection, number: int) -> Exchange:
        questions, far_questions = aqueduct.channel()
        far_answers, answers = aqueduct.channel()
        await connection.entrypoint.send(
            number.to_bytes(8, "little"), attachments=[far_questions, far_answers]
        )
        check((await answers.receive()).payload, memoryview(b"open"), f"the word of {number}")
        return cls(number, questions, answers)

    async def run(self, payloads: Payloads) -> None:
        await self.questions.send(payloads.question(self.number))
        self.questions.finish()
        answer = await self.answers.receive()
        check(answer.payload, payloads.answer(self.number), f"answer {self.number}")


async def call(told: Told, address: str) -> dict[str, Any]:
    payloads = Payloads(told.exchanges)
    few = asyncio.Semaphore(CONNECTING)

    async def one(index: int) -> list[Exchange]:
        async with few:
            connection = await aqueduct.connect(address)
            connections.append(connection)
            first = index * told.channels
            numbers = range(first, first + told.channels)
            return await asyncio.gather(*(Exchange.open(connection, n) for n in numbers))

    connections: list[Connection] = []
    began = time.perf_counter()
    opened = await asyncio.gather(*(one(index) for index in range(told.connections)))
    result = {"opened_s": time.perf_counter() - began}
    reply, go = aqueduct.channel(oneshot=True)
    await connections[0].entrypoint.send(b"", attachments=[reply])
    await go.receive()
    usage, began = common.Usage(), time.perf_counter()
    await asyncio.gather(*(each.run(payloads) for some in opened for each in some))
    result["exchange_s"] = time.perf_counter() - began
    result.update({f"client_{name}": value for name, value in usage.report().items()})
    await asyncio.gather(*(connection.close() for connection in connections))
    return result


# ----------------------------------------------------------------- the benchmark


def measure(told: Told) -> dict[str, Any]:
    """One measurement, in two fresh processes; Failed if a byte was wrong, or an answer missing."""
    command = [sys.executable, str(ROOT / "benchmarks" / "many_connections.py")]
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(asdict(replace(told, folder=folder)))
        server, client = processes.run_pair(
            [*command, "--server", text], [*command, "--client", text], TIMEOUT
        )
    if server["wrong"] or server["answered"] != told.exchanges:
        raise processes.Failed(
            f"the server answered {server['answered']} of {told.exchanges}: {server['wrong']}"
        )
    return {
        "exchanges": told.exchanges,
        "opened_s": client["opened_s"],
        "exchange_s": client["exchange_s"],
        "mib_s": 2 * told.exchanges * SIZE / MiB / client["exchange_s"],
        "client_cpu_s": client["client_cpu"],
        "server_cpu_s": server["cpu"] - server["opening"],
        "server_rest_mib": server["rest"] / MiB,
        "server_growth_mib": server["growth"] / MiB,
        "client_growth_mib": client["client_growth"] / MiB,
        "connection_kib": server["growth"] / told.connections / 1024,
    }


def run(cases: list[Case], repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    progress = Progress(repeats * sum(len(case.contestants) for case in cases))
    for repeat in range(repeats):
        for case in cases:
            for contestant in case.contestants:
                connections = case.connections // (QUICK if quick else 1)
                row = {"case": case.name, "contestant": contestant.name, "repeat": repeat}
                try:
                    row.update(measure(Told(contestant.carrier, connections, case.channels)))
                except processes.Failed as error:
                    row["error"] = str(error)
                progress.done += 1
                progress.show(f"{case.name} {contestant.name}: {row.get('error', 'done')}")
                yield row
    progress.end()


def report(found: results.Run) -> str:
    """One line for each carrier."""
    lines = []
    for case in found.cases():
        for name in found.contestants(case):
            failed = len(found.errors(case, name))
            cells = [name + (f" ({failed} failed)" if failed else "")]
            for metric in TABLE:
                values = found.values(case, name, metric).values()
                cells.append(str(results.Spread.of(values)) if values else "-")
            lines.append(cells)
    return results.table(["peer", *(results.UNITS[metric] for metric in TABLE)], lines)


def select(only: str) -> list[Case]:
    """The cases with those contestants whose name holds one of the words of ``only``."""
    words = [word for word in only.split(",") if word]
    chosen = []
    for case in PLAN:
        some = tuple(
            c for c in case.contestants if not words or any(word in c.name for word in words)
        )
        if some:
            chosen.append(replace(case, contestants=some))
    return chosen


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["--server"], ["--client"]):
        common.end_with_parent()
        role, text, *address = arguments
        told = Told(**json.loads(text))
        if role == "--server":
            asyncio.run(serve(told))
        print(json.dumps(asyncio.run(call(told, json.loads(*address)))), flush=True)
        os._exit(0)
    benchmark = Benchmark(select, run, report, QUICK)
    return run_command(benchmark, arguments, summary=__doc__ or "", only="words in peers", repeat=3)


if __name__ == "__main__":
    sys.exit(main())
