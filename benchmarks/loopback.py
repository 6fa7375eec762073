"""Aqueduct beside pyarrow Flight, aioquic and plain sockets on the loopback, in one run.

    python benchmarks/loopback.py [--repeat N] [--quick] [--json FILE] [--only TEXT] [--list]

Every measurement has a server and a client process of its own. In each repeat and each case ours
and its rivals run in turn, the next time backwards; a ratio is taken between neighbours in time.
The table on standard output has medians with (lowest-highest), the JSON all rows, each with how far
apart the processors were (``cpu_topology.py``). The exit status is 1 if a measurement failed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import cases as bench_cases
from benchmarks import certificate, cpu_topology, processes, results
from benchmarks.cases import Case, Contestant, MiB
from benchmarks.peers.common import Setup
from benchmarks.runner import ROOT, Benchmark, Progress, run_command

TIMEOUT: Final = 180.0
"""Seconds for one measurement, starting two processes included."""
OURS: Final = "aqueduct/"


def measure(peer: str, setup: Setup) -> dict[str, Any]:
    """One measurement: a fresh server process and a fresh client process of ``peer``."""
    module = "codec" if setup.mode == "codec" else peer
    command = [sys.executable, str(ROOT / "benchmarks" / "peers" / f"{module}_peer.py")]
    told = json.dumps(asdict(setup))
    if setup.mode == "codec":
        return processes.run([*command, told], TIMEOUT)
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if setup.aes128 and peer == "sockets":
            environment["OPENSSL_CONF"] = str(_only_aes128(Path(folder)))
        told = json.dumps(asdict(replace(setup, folder=folder)))
        report, result = processes.run_pair(
            [*command, "server", told],
            [*command, "client", told],
            TIMEOUT,
            environment=environment,
        )
    result.update({f"server_{name}": value for name, value in report.items()})
    return result


def _only_aes128(folder: Path) -> Path:
    """Before Python 3.14 a suite of TLS 1.3 can only be chosen in OpenSSL's configuration."""
    path = folder / "openssl.cnf"
    path.write_text(
        "openssl_conf = all\n[all]\nssl_conf = ssl\n[ssl]\nsystem_default = default\n"
        "[default]\nCiphersuites = TLS_AES_128_GCM_SHA256\n"
    )
    return path


def row_of(
    case: Case, contestant: Contestant, repeat: int, result: dict[str, Any]
) -> dict[str, Any]:
    """A result with its name and its derived numbers."""
    row: dict[str, Any] = {"case": case.name, "contestant": contestant.name, "repeat": repeat}
    row.update(result)
    if "seconds" in result:
        gib = result["bytes"] / (1 << 30)
        row["mib_s"] = result["bytes"] / MiB / result["seconds"]
        row["cpu_gib"] = (result["client_cpu"] + result["server_cpu"]) / gib
        row["growth_mib"] = max(result["client_growth"], result["server_growth"]) / MiB
        for side in ("client", "server"):
            row[f"{side}_cpu_gib"] = result[f"{side}_cpu"] / gib
    for name in ("client_memory", "server_memory", "client_growth", "server_growth"):
        if name in result:
            row[f"{name}_mib"] = result[name] / MiB
    return row


def _in_turn(cases: list[Case], repeat: int) -> Iterator[tuple[Case, Contestant, int]]:
    """Who is measured in a repeat, in that order, and for the how manieth time.

    Every other time the order is reversed: what one leaves behind in memory is the next one's.
    """
    for case in cases:
        for turn in range(repeat * case.turns, (repeat + 1) * case.turns):
            for contestant in case.contestants[:: -1 if turn % 2 else 1]:
                yield case, contestant, turn


def run(cases: list[Case], repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measures ``cases`` and yields rows; what failed has ``error`` instead of numbers."""
    measured = sum(len(case.contestants) * case.turns for case in cases)
    progress = Progress(repeats * measured)
    with tempfile.TemporaryDirectory() as folder:
        paths = certificate.write(Path(folder))
        for repeat in range(repeats):
            for case, contestant, turn in _in_turn(cases, repeat):
                if progress.terminal:
                    progress.show(f"{case.name} {contestant.name}")
                setup = case.setup(contestant, quick)
                setup = replace(setup, certificate=str(paths[0]), key=str(paths[1]))
                before = cpu_topology.apart()
                try:
                    row = row_of(case, contestant, turn, measure(contestant.peer, setup))
                except processes.Failed as error:
                    row = row_of(case, contestant, turn, {"error": str(error)})
                row["apart_ns"], row["apart_after_ns"] = before, cpu_topology.apart()
                progress.done += 1
                progress.show(f"{case.name} {contestant.name}: {_brief(row)}")
                yield row
    progress.end()


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
                sides = [_sides(found, case, name, what) for what in ("cpu_gib", "growth_mib")]
                cells = [cell("mib_s"), cell("cpu_gib"), *sides]
                bulk.append([case, label, *cells, ratio("mib_s"), ratio("cpu_gib")])
    parts = []
    if bulk:
        header = ["case", "peer", "MiB/s", "CPU s/GiB", "client + server", "growth MiB c/s"]
        header += ["ours/peer, MiB/s", "ours/peer, CPU"]
        parts.append(results.table(header, bulk))
    if trips:
        header = ["round trip of 200 bytes", "peer", "p50 us", "p99 us", "ours/peer, p50"]
        parts.append(results.table(header, trips))
    if codec:
        header = ["MESSAGEs of 200 bytes", "encoded/s", "decoded/s"]
        parts.append(results.table(header, codec))
    if placed := cpu_topology.summary(found.rows):
        parts.append(placed)
    return "\n\n".join(parts)


def _sides(found: results.Run, case: str, name: str, metric: str) -> str:
    """The medians of both sides."""
    cells = []
    for side in ("client", "server"):
        values = found.values(case, name, f"{side}_{metric}").values()
        cells.append(results.number(results.Spread.of(values).median) if values else "-")
    return (" + " if metric == "cpu_gib" else " / ").join(cells)


def main(arguments: list[str] | None = None) -> int:
    benchmark = Benchmark(bench_cases.select, run, report, bench_cases.QUICK)
    return run_command(
        benchmark,
        arguments,
        summary=__doc__ or "",
        only="cases and peers with one of these in their name, a,b,c; =NAME is a whole name",
        repeat=5,
    )


if __name__ == "__main__":
    sys.exit(main())
