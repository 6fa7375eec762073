"""Aqueduct beside pyarrow Flight and plain aioquic on the loopback, interleaved in one run.

    python benchmarks/loopback.py [--repeat N] [--quick] [--json FILE] [--only TEXT] [--list]

Every measurement has a server and a client process of its own. In each repeat and each case ours
runs first, then its rivals; a ratio is taken between neighbours in time. The table on standard
output has medians with (lowest-highest), the JSON all rows. The exit status is 1 if a
measurement failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import certificate, processes, results
from benchmarks.peers.common import BULK, Setup

ROOT: Final = Path(__file__).resolve().parents[1]
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


class Progress:
    """One line on standard error: rewritten in a terminal, short lines elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began = total, 0, time.monotonic()
        self.terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        line = f"[{self.done}/{self.total}, {time.monotonic() - self.began:.0f} s] {text}"
        if self.terminal:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


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


def environment() -> dict[str, Any]:
    """What the numbers depend on: versions, processors, kernel, what else was running."""
    packages = {}
    for package in ("aqueduct-arrow", "pyarrow", "aioquic", "cryptography", "numpy", "Cython"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "not installed"
    return {
        "python": platform.python_version(),
        "packages": packages,
        "revision": _revision(),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _revision() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3, help="measurements of each kind (3)")
    parser.add_argument("--quick", action="store_true", help=f"sizes divided by {QUICK}")
    parser.add_argument("--only", default="", help="cases and peers with one of these, a,b,c")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--list", action="store_true", help="only list the plan")
    args = parser.parse_args(arguments)
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    plan = select(args.only)
    if not plan:
        parser.error(f"--only {args.only}: nothing of that name; see --list")
    if args.list:
        for case in plan:
            print(case.name, *(contestant.name for contestant in case.contestants))
        return 0
    document: dict[str, Any] = {
        "format": results.FORMAT,
        "environment": environment(),
        "settings": {"repeat": args.repeat, "quick": args.quick, "only": args.only},
        "rows": [],
    }
    for row in run(plan, args.repeat, args.quick):
        document["rows"].append(row)
        if args.json:  # after each: an interrupted run keeps what it has
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(report(results.Run(document)))
    failed = [row for row in document["rows"] if "error" in row]
    for row in failed:
        print(f"failed: {row['case']} {row['contestant']}: {row['error']}", file=sys.stderr)
    return 1 if failed else 0


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
