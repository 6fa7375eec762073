"""The connection core alone: messages a second, and what channels cost in time and memory.

    python benchmarks/core.py [--repeat N] [--quick] [--json FILE] [--only TEXT] [--list]

Two cores in one process on one processor, joined by the memory carrier
(``benchmarks/core_pair.py``).
Every measurement is a fresh process (``peers/core_peer.py``). The table on standard output has
medians with (lowest-highest), the JSON all rows. The exit status is 1 if a measurement failed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import processes, results
from benchmarks.runner import Benchmark, Progress, run_command

PEER: Final = Path(__file__).with_name("peers") / "core_peer.py"
TIMEOUT: Final = 300.0
"""Seconds for one measurement."""
QUICK: Final = 20
"""What --quick divides sizes by."""


@dataclass(frozen=True)
class Contestant:
    """One measurement: its name, and how many messages or channels it has."""

    name: str
    size: int


@dataclass(frozen=True)
class Case:
    """One row of the plan."""

    name: str
    contestants: tuple[Contestant, ...]


TREES: Final = (Contestant("core/10k", 10_000), Contestant("core/100k", 100_000))
PLAN: Final = (
    Case("codec-100", (Contestant("core/codec", 1_000_000),)),
    Case("ordered", (Contestant("core/memory", 400_000),)),
    Case("large-64k", (Contestant("core/direct", 50_000),)),
    Case("large-1m", (Contestant("core/direct", 10_000),)),
    Case("unordered", (Contestant("core/memory", 100_000),)),
    Case("unreliable", (Contestant("core/memory", 200_000),)),
    Case("churn", (Contestant("core/memory", 100_000),)),
    Case("idle", (Contestant("core/memory", 10_000),)),
    Case("idle-used", (Contestant("core/memory", 10_000),)),
    *(Case(f"cascade-{shape}", TREES) for shape in ("chain", "binary", "wide")),
)
TABLES: Final = (
    ("messages of 100 bytes", ("messages_s", "messages_cpu_s")),
    ("large messages", ("send_us", "take_us", "copied")),
    ("channels used once", ("channels_s", "first_us", "last_us", "last_over_first", "left_bytes")),
    ("bytes of a live idle channel", ("side_bytes", "traced_bytes", "resident_bytes")),
    ("loss of a tree", ("channel_us", "channel_cpu_us", "channel_core_us")),
)
"""Each table's title and metrics; a row that has none of them is not in it."""


def measure(case: str, size: int) -> dict[str, Any]:
    """One measurement in a process of its own; bytes take a second one (``core_peer.idle``)."""
    command = [sys.executable, str(PEER), json.dumps({"case": case, "size": size})]
    result = processes.run(command, TIMEOUT)
    if "traced_bytes" in result and sys.platform == "linux":
        allocator = {**os.environ, "PYTHONMALLOC": "malloc"}
        result.update(processes.run(command, TIMEOUT, environment=allocator))
    return result


def run(plan: list[Case], repeats: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Measures ``plan`` and yields rows; what failed has ``error`` instead of numbers."""
    progress = Progress(repeats * sum(len(case.contestants) for case in plan))
    for repeat in range(repeats):
        for case in plan:
            for contestant in case.contestants:
                name = f"{case.name} {contestant.name}"
                if progress.terminal:
                    progress.show(name)
                size = contestant.size // (QUICK if quick else 1)
                row: dict[str, Any] = {"case": case.name, "contestant": contestant.name}
                row.update(repeat=repeat, size=size)
                try:
                    row.update(measure(case.name, size))
                except processes.Failed as error:
                    row["error"] = str(error)
                progress.done += 1
                progress.show(f"{name}: {_brief(row)}")
                yield row
    progress.end()


def _brief(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"FAILED: {row['error']}"
    return ", ".join(
        f"{results.number(row[metric])} {results.UNITS[metric]}"
        for _, metrics in TABLES
        for metric in metrics[:1]
        if metric in row
    )


def report(found: results.Run) -> str:
    """The tables."""
    parts = []
    for title, metrics in TABLES:
        lines = []
        for case in found.cases():
            for name in found.contestants(case):
                values = [found.values(case, name, metric).values() for metric in metrics]
                failed = len(found.errors(case, name))
                if any(values):
                    label = name + (f" ({failed} failed)" if failed else "")
                    cells = [str(results.Spread.of(some)) if some else "-" for some in values]
                    lines.append([case, label, *cells])
        if lines:
            header = [title, "contestant", *(results.UNITS[metric] for metric in metrics)]
            parts.append(results.table(header, lines))
    return "\n\n".join(parts)


def select(only: str) -> list[Case]:
    """The cases whose name begins with one of the words of ``only``."""
    words = tuple(word for word in only.split(",") if word)
    return [case for case in PLAN if not words or case.name.startswith(words)]


def main(arguments: list[str] | None = None) -> int:
    benchmark = Benchmark(select, run, report, QUICK)
    return run_command(
        benchmark,
        arguments,
        summary=__doc__ or "",
        only="cases whose names begin so, a,b,c",
        repeat=5,
    )


if __name__ == "__main__":
    sys.exit(main())
