"""Where the time of a small call over QUIC goes: its stages, and the datagrams that it takes.

    python -m benchmarks.trace_quic [--calls N] [--datagram-size N] [--json]

A client and a service, each in a process of its own, make calls of one batch of 25 rows over
127.0.0.1, one after another. Both note when their socket sends and reads, by the clock of the
machine. The stages of each call follow from that; the medians are printed, in microseconds:

- **client, to its first datagram**: from the call's begin until the kernel is asked to send;
- **up**: until the service has read that datagram, with the kernel's work and the wake-up;
- **service**: until the kernel is asked to send the answer;
- **down**: until the client has read that;
- **client, to its result**: until the call has returned.

Below them, for each call and each side: datagrams sent, and those of them that aioquic made, which
carry acknowledgements and limits; calls of the kernel; and processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow as pa

import aqueduct
from aqueduct.carriers.quic.packets import FastConnection
from aqueduct.carriers.quic.udp import UdpSocket

__all__ = ["Notes", "main", "stages", "table"]

BATCH: Final = pa.record_batch({"id": pa.array(range(25), pa.int64())})
WARM: Final = 300  # calls
STAGES: Final = (
    "client, to its first datagram",
    "up",
    "service",
    "down",
    "client, to its result",
)


class Notes:
    """What one process notes of its sockets: when they send and read, and how often."""

    def __init__(self) -> None:
        self.sent: list[float] = []
        self.read: list[float] = []
        self.counts: Counter[str] = Counter()
        self._began = 0.0

    def install(self) -> None:
        """Has the sockets of this process noted from now on."""
        send, receive = UdpSocket._send_now, UdpSocket._receive
        general = FastConnection.datagrams_to_send

        def noted_send(sock: UdpSocket, run: Any, **options: Any) -> Any:
            self.sent.append(time.monotonic())
            self.counts["kernel"] += 1
            self.counts["datagrams"] += len(run[0]) // run[1]
            return send(sock, run, **options)

        def noted_receive(sock: UdpSocket) -> Any:
            self.counts["kernel"] += 1
            found = receive(sock)
            self.read.append(time.monotonic())
            return found

        def noted_general(connection: FastConnection, now: float) -> Any:
            made = general(connection, now)
            self.counts["aioquic's"] += len(made)
            return made

        patched: Any = UdpSocket
        patched._send_now, patched._receive = noted_send, noted_receive
        other: Any = FastConnection
        other.datagrams_to_send = noted_general

    def start(self) -> None:
        """Forgets what was noted."""
        self.sent.clear()
        self.read.clear()
        self.counts.clear()
        self._began = time.process_time()

    def report(self) -> dict[str, Any]:
        """What was noted, as JSON has it."""
        used = time.process_time() - self._began
        return {"sent": self.sent, "read": self.read, "counts": self.counts, "used": used}


def stages(
    spans: list[tuple[float, float]], client: dict[str, Any], service: dict[str, Any]
) -> list[list[float]]:
    """The seconds of the stages of each call, from when it began and ended.

    A call is left out where a datagram of another kind lies between.
    """
    found = []
    for began, ended in spans:
        times = [began]
        for noted in (client["sent"], service["read"], service["sent"], client["read"]):
            place = bisect_left(noted, times[-1])
            times.append(noted[place] if place < len(noted) else ended + 1)
        times.append(ended)
        parts = [later - earlier for earlier, later in pairwise(times)]
        if min(parts) >= 0:
            found.append(parts)
    return found


def table(found: list[list[float]], calls: int, client: Any, service: Any) -> str:
    """All of it, for people."""
    lines = ["| stage | us, p50 |", "|---|--:|"]
    for name, seconds in zip(STAGES, zip(*found, strict=True), strict=True):
        lines.append(f"| {name} | {statistics.median(seconds) * 1e6:.0f} |")
    whole = statistics.median(map(sum, found)) * 1e6
    lines += [f"| all | {whole:.0f} |", ""]
    lines += ["| side | datagrams | aioquic's | kernel | processor us |", "|---|--:|--:|--:|--:|"]
    for name, side in (("client", client), ("service", service)):
        counts = [side["counts"].get(what, 0) / calls for what in ("datagrams", "aioquic's")]
        kernel = side["counts"].get("kernel", 0) / calls
        lines.append(
            f"| {name} | {counts[0]:.2f} | {counts[1]:.2f} | {kernel:.1f} "
            f"| {side['used'] / calls * 1e6:.0f} |"
        )
    return "\n".join(lines)


async def _serve(address: str) -> None:
    """Echoes; each line of stdin forgets what was noted, or is answered with it."""
    notes = Notes()
    notes.install()
    service = aqueduct.Service("trace")

    @service.handler("echo")
    async def echo(batches: Any) -> Any:
        async for batch in batches:
            yield batch

    async with service.serving(address, dev_certificate=True) as live:
        print(live.addresses[0], flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            if line == "start\n":
                notes.start()
                print("{}", flush=True)
            else:
                print(json.dumps(notes.report()), flush=True)


async def _measure(address: str, calls: int, tell: Any) -> tuple[list[Any], Any, Any]:
    notes = Notes()
    notes.install()
    spans = []
    async with await aqueduct.Client.connect(address) as client:
        for _ in range(WARM):
            await client.call("echo", BATCH)
        tell("start")
        notes.start()
        for _ in range(calls):
            began = time.monotonic()
            await client.call("echo", BATCH)
            spans.append((began, time.monotonic()))
        return spans, notes.report(), tell("report")


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--datagram-size", default="auto", help="bytes, or auto")
    parser.add_argument("--json", action="store_true", help="print the medians as JSON")
    parser.add_argument("--service", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.service:
        asyncio.run(_serve(options.service))
        return
    where = f"aqueduct://127.0.0.1:0?datagram_size={options.datagram_size}"
    process = subprocess.Popen(
        [sys.executable, __file__, "--service", where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def tell(line: str) -> Any:
        stdin.write(f"{line}\n")
        stdin.flush()
        return json.loads(stdout.readline())

    try:
        address = stdout.readline().strip()
        spans, client, service = asyncio.run(_measure(address, options.calls, tell))
    finally:
        process.kill()
        process.communicate()
    found = stages(spans, client, service)
    if options.json:
        medians = [statistics.median(part) * 1e6 for part in zip(*found, strict=True)]
        print(json.dumps(dict(zip(STAGES, medians, strict=True))))
    else:
        print(table(found, options.calls, client, service))


if __name__ == "__main__":
    main()
