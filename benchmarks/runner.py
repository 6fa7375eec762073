"""What the benchmarks with a plan share: the command, its progress, the environment of a run."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from benchmarks import processes, results

ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark has of its own; cases have a ``name`` and ``contestants`` with names."""

    select: Callable[[str], list[Any]]
    run: Callable[[list[Any], int, bool], Iterator[dict[str, Any]]]
    """Measures a plan so many times, quickly or not, and yields rows."""
    report: Callable[[results.Run], str]
    quick: int
    """What --quick divides sizes by."""


def run_command(
    benchmark: Benchmark, arguments: list[str] | None, *, summary: str, only: str, repeat: int
) -> int:
    """The command line of a benchmark: measures, writes JSON, prints tables. The exit status.

    ``summary`` is its help text, ``only`` that of ``--only``, ``repeat`` the default of its.
    """
    parser = argparse.ArgumentParser(description=summary.splitlines()[0])
    parser.add_argument(
        "--repeat", type=int, default=repeat, help=f"measurements of each kind ({repeat})"
    )
    parser.add_argument("--quick", action="store_true", help=f"sizes divided by {benchmark.quick}")
    parser.add_argument("--only", default="", help=only)
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--list", action="store_true", help="only list the plan")
    args = parser.parse_args(arguments)
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    plan = benchmark.select(args.only)
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
    for row in benchmark.run(plan, args.repeat, args.quick):
        document["rows"].append(row)
        if args.json:  # after each: an interrupted run keeps what it has
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(benchmark.report(results.Run(document)))
    failed = [row for row in document["rows"] if "error" in row]
    for row in failed:
        print(f"failed: {row['case']} {row['contestant']}: {row['error']}", file=sys.stderr)
    return 1 if failed else 0


def measure_in_turn(
    cases: list[Any],
    repeats: int,
    metrics: Sequence[str],
    measure: Callable[[Any, Any], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yields a row for each contestant of each case, in each repeat; every other goes backwards.

    ``measure`` has the numbers of one case and contestant, or raises Failed: then the row has
    ``error`` in their place.
    """
    progress = Progress(repeats * sum(len(case.contestants) for case in cases))
    for repeat, case in itertools.product(range(repeats), cases):
        for contestant in case.contestants[:: -1 if repeat % 2 else 1]:
            row: dict[str, Any] = {"case": case.name, "contestant": contestant.name}
            row["repeat"] = repeat
            try:
                row.update(measure(case, contestant))
                said = ", ".join(
                    f"{results.number(row[metric])} {results.UNITS[metric]}"
                    for metric in metrics
                    if metric in row
                )
            except processes.Failed as error:
                said = row["error"] = str(error)
            progress.done += 1
            progress.show(f"{case.name} {contestant.name}: {said}")
            yield row
    progress.end()


def report_ratios(found: results.Run, metrics: Sequence[str], *, upside_down: bool = False) -> str:
    """A line for each contestant and number, with its ratio to the case's first contestant.

    ``upside_down``: the ratio of the first to it.
    """
    lines = []
    for case in found.cases():
        first = found.contestants(case)[0]
        for name in found.contestants(case):
            failed = len(found.errors(case, name))
            pair = (first, name) if upside_down else (name, first)
            for metric in metrics:
                values = found.values(case, name, metric).values()
                if not values:
                    continue
                ratios = found.ratios(case, *pair, metric) if name != first else []
                lines.append(
                    [
                        case,
                        name + (f" ({failed} failed)" if failed else ""),
                        results.UNITS[metric],
                        str(results.Spread.of(values)),
                        str(results.Spread.of(ratios)) if ratios else "",
                    ]
                )
    ratio = "first / this" if upside_down else "this / first"
    return results.table(["case", "contestant", "what", "median", ratio], lines)


def select_words(plan: Sequence[Any], only: str) -> list[Any]:
    """The cases whose name, or whose contestants' names, hold one of the words of ``only``."""
    words = [word for word in only.split(",") if word]
    chosen = []
    for case in plan:
        some = tuple(
            each
            for each in case.contestants
            if not words or any(word in case.name or word in each.name for word in words)
        )
        if some:
            chosen.append(replace(case, contestants=some))
    return chosen


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
        "built": _built(),
        "kernel": f"{platform.system()} {platform.release()}",
        "congestion": _congestion(),
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


def _built() -> str:
    """Whether the compiled modules are as wheels have them (``make profiled``)."""
    modules = list((ROOT / "aqueduct" / "_speedups").rglob("*.so"))
    profiled = sum(b"-fprofile-use" in module.read_bytes() for module in modules)
    return "profiled" if modules and profiled == len(modules) else "not profiled"


def _congestion() -> str:
    """The control of TCP that all have who do not choose; BBR halves the loopback's speed."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return "unknown"
    with socket.socket() as sock:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.partition(b"\0")[0].decode()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
