"""Aqueduct beside pyarrow Flight and plain aioquic on the loopback, interleaved in one run.

    python benchmarks/loopback.py [--repeat N] [--quick] [--json FILE] [--only TEXT] [--list]

Every measurement has a server and a client process of its own. In each repeat and each case ours
runs first, then its rivals; a ratio is taken between neighbours in time. The table on standard
output has medians with (lowest-highest), the JSON all rows. The exit status is 1 if a
measurement failed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import certificate, processes, results
from benchmarks.command import ROOT, Benchmark, Progress, run_command
from benchmarks.peers.common import BULK, Setup

KiB: Final = 1 << 10
MiB: Final = 1 << 20
TIMEOUT: Final = 180.0
"""Seconds for one measurement, starting two processes included."""
OURS: Final = "aqueduct/"
QUICK: Final = 8
"""What --quick divides sizes by."""


@dataclass(frozen=True)
class Contestant:
    """A peer module with its options; ``nbytes`` is what a bulk measurement moves."""

    peer: str
    variant: str
    nbytes: int = 0
    datagram: int = 1200
    wide: bool = False
    aes128: bool = False

    @property
    def name(self) -> str:
        return f"{self.peer}/{self.variant}"


@dataclass(frozen=True)
class Case:
    """One row of the plan: the first contestant is ours."""

    name: str
    mode: str
    contestants: tuple[Contestant, ...]
    batch: int = 0


OURS_16K = Contestant("aqueduct", "16k", 256 * MiB, datagram=16000)
OURS_1200 = Contestant("aqueduct", "1200", 32 * MiB, datagram=1200)
FLIGHT = Contestant("flight", "tcp", 768 * MiB)
AIOQUIC_16K = Contestant(
    "aioquic", "16k-wide-aes128", 256 * MiB, datagram=16000, wide=True, aes128=True
)
AIOQUIC_DEFAULT = Contestant("aioquic", "default", 32 * MiB)

WIDE = (OURS_16K, FLIGHT, AIOQUIC_16K)
NARROW = (OURS_1200, AIOQUIC_DEFAULT)
SIZES: Final = (("1m", MiB), ("64k", 64 * KiB))
PLAN: Final = (
    Case("codec", "codec", (Contestant("aqueduct", "codec"),)),
    *(Case(f"{mode}-{label}", mode, WIDE, size) for label, size in SIZES for mode in BULK),
    *(
        Case(f"{mode}-{label}-1200", mode, NARROW, size)
        for label, size in SIZES
        for mode in ("sink", "echo")
    ),
    Case("request", "request", WIDE),
    Case("open-request", "open-request", WIDE),
)


def measure(peer: str, setup: Setup) -> dict[str, Any]:
    """One measurement: a fresh server process and a fresh client process of ``peer``."""
    module = "codec" if setup.mode == "codec" else peer
    command = [sys.executable, str(ROOT / "benchmarks" / "peers" / f"{module}_peer.py")]
    told = json.dumps(asdict(setup))
    if setup.mode == "codec":
        return processes.run([*command, told], TIMEOUT)
    report, result = processes.run_pair(
        [*command, "server", told], [*command, "client", told], TIMEOUT
    )
    result.update(server_cpu=report["cpu"], server_memory=report["memory"])
    return result


def row_of(
    case: Case, contestant: Contestant, repeat: int, result: dict[str, Any]
) -> dict[str, Any]:
    """A result with its name and its derived numbers."""
    row: dict[str, Any] = {"case": case.name, "contestant": contestant.name, "repeat": repeat}
    row.update(result)
    if "seconds" in result:
        gib = result["bytes"] / (1 << 30)
        row["mib_s"] = result["bytes"] / MiB / result["seconds"]
        row["client_cpu_gib"] = result["client_cpu"] / gib
        row["server_cpu_gib"] = result["server_cpu"] / gib
    for side in ("client", "server"):
        if f"{side}_memory" in result:
            row[f"{side}_memory_mib"] = result[f"{side}_memory"] / MiB
    return row


def run(plan: list[Case], repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measures ``plan`` and yields rows; what failed has ``error`` instead of numbers."""
    progress = Progress(repeats * sum(len(case.contestants) for case in plan))
    with tempfile.TemporaryDirectory() as folder:
        paths = certificate.write(Path(folder))
        for repeat in range(repeats):
            for case in plan:
                for contestant in case.contestants:
                    if progress.terminal:
                        progress.show(f"{case.name} {contestant.name}")
                    setup = _setup(case, contestant, quick)
                    setup = replace(setup, certificate=str(paths[0]), key=str(paths[1]))
                    try:
                        row = row_of(case, contestant, repeat, measure(contestant.peer, setup))
                    except processes.Failed as error:
                        row = row_of(case, contestant, repeat, {"error": str(error)})
                    progress.done += 1
                    progress.show(f"{case.name} {contestant.name}: {_brief(row)}")
                    yield row
    progress.end()


def _setup(case: Case, contestant: Contestant, quick: bool) -> Setup:
    nbytes = contestant.nbytes // (2 if case.mode == "echo" else 1)
    requests = 2000
    if quick:
        nbytes, requests = nbytes // QUICK, requests // QUICK
    return Setup(
        mode=case.mode,
        batch=case.batch,
        nbytes=nbytes,
        requests=requests,
        datagram=contestant.datagram,
        wide=contestant.wide,
        aes128=contestant.aes128,
    )


def _brief(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"FAILED: {row['error']}"
    return ", ".join(
        f"{results.number(row[metric])} {results.UNITS[metric]}"
        for metric in ("mib_s", "p50_us", "encoded_s", "decoded_s")
        if metric in row
    )


def report(found: results.Run) -> str:
    """The tables: throughput, round trips, codec."""
    bulk, trips, codec = [], [], []
    for case in found.cases():
        names = found.contestants(case)
        ours = next((name for name in names if name.startswith(OURS)), "")
        for name in names:
            failed = len(found.errors(case, name))
            label = name + (f" ({failed} failed)" if failed else "")

            def cell(metric: str, case: str = case, name: str = name) -> str:
                values = found.values(case, name, metric).values()
                return str(results.Spread.of(values)) if values else "-"

            def ratio(metric: str, case: str = case, name: str = name, ours: str = ours) -> str:
                values = found.ratios(case, ours, name, metric) if name != ours else []
                return str(results.Spread.of(values)) if values else ""

            if case == "codec":
                codec.append([label, cell("encoded_s"), cell("decoded_s")])
            elif "request" in case:
                trips.append([case, label, cell("p50_us"), cell("p99_us"), ratio("p50_us")])
            else:
                cells = [cell(m) for m in ("mib_s", "client_cpu_gib", "server_cpu_gib")]
                memory = f"{_median(found, case, name, 'client')}/"
                memory += _median(found, case, name, "server")
                bulk.append([case, label, *cells, memory, ratio("mib_s")])
    parts = []
    if bulk:
        header = ["case", "peer", "MiB/s", "client CPU s/GiB", "server CPU s/GiB"]
        header += ["peak MiB c/s", "ours/peer"]
        parts.append(results.table(header, bulk))
    if trips:
        header = ["round trip of 200 bytes", "peer", "p50 us", "p99 us", "ours/peer, p50"]
        parts.append(results.table(header, trips))
    if codec:
        header = ["MESSAGEs of 200 bytes", "encoded/s", "decoded/s"]
        parts.append(results.table(header, codec))
    return "\n\n".join(parts)


def _median(found: results.Run, case: str, name: str, side: str) -> str:
    values = found.values(case, name, f"{side}_memory_mib").values()
    return f"{results.Spread.of(values).median:.0f}" if values else "-"


def main(arguments: list[str] | None = None) -> int:
    benchmark = Benchmark(select, run, report, QUICK)
    return run_command(
        benchmark,
        arguments,
        summary=__doc__ or "",
        only="cases and peers with one of these, a,b,c",
        repeat=3,
    )


def select(only: str) -> list[Case]:
    """The cases whose name, or whose contestants' names, hold one of the words of ``only``."""
    words = [word for word in only.split(",") if word]
    if not words:
        return list(PLAN)
    plan = []
    for case in PLAN:
        if any(word in case.name for word in words):
            plan.append(case)
            continue
        some = tuple(c for c in case.contestants if any(word in c.name for word in words))
        if some:
            plan.append(replace(case, contestants=some))
    return plan


if __name__ == "__main__":
    sys.exit(main())
