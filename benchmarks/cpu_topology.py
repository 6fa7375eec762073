"""How far apart the processors of this machine are, in nanoseconds.

    python benchmarks/cpu_topology.py

Two processors that share a cache hand each other bytes at several times the speed of two that do
not. In a virtual machine it is the host that places them, anew whenever one of them was idle: the
same two processes then move 1 GiB/s or 3, whatever they are. So each measurement says how far
apart they were before and after it.

A byte goes there and back between a process on the first processor and one on the last; what
Python needs for a step of that by itself is taken off.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

FAR: Final = 110.0
"""Nanoseconds: the valley between the two peaks of 1,780 measurements, at 60 and at 120 to 150."""
_LAPS: Final = 1500
_SAMPLES: Final = 7
_END: Final = 64  # a place in another cache line
_TIMEOUT: Final = 10.0  # seconds; it takes a hundredth where nothing else runs


def apart() -> float | None:
    """Nanoseconds from the first processor to the last one; None where it cannot be told.

    That is with one processor, with a system that pins nothing, and where both are so busy that
    it takes above 10 s. Measured in a process of its own, so that the caller stays unpinned.
    """
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-S", str(Path(__file__))],
            capture_output=True,
            timeout=_TIMEOUT,
            check=True,
        )
        return float(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError):
        return None


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """How many of these measurements were made with near processors; empty if none says it."""
    counts = {"near": 0, "far": 0, "moved": 0}
    for row in rows:
        before, after = row.get("apart_ns"), row.get("apart_after_ns")
        if before is None or after is None:
            continue
        far = before > FAR
        counts["moved" if far != (after > FAR) else "far" if far else "near"] += 1
    if not (told := sum(counts.values())):
        return ""
    return (
        f"Of {told} measurements the processors were near each other (up to {FAR:g} ns) before and "
        f"after in {counts['near']}, far in {counts['far']}, and were moved in {counts['moved']}."
    )


def measure() -> float:
    """What ``apart`` returns, in this process, which is pinned from then on."""
    processors = sorted(os.sched_getaffinity(0))
    line = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
    asker, child = os.getpid(), os.fork()
    if child == 0:
        _answer(line, processors[-1], asker)
    os.sched_setaffinity(0, {processors[0]})
    try:
        both = min(_laps(line, alone=False) for _ in range(_SAMPLES))
    finally:
        line[_END] = 1
        os.waitpid(child, 0)
    return max(both - min(_laps(line, alone=True) for _ in range(_SAMPLES)), 0.0)


def _answer(line: memoryview, processor: int, asker: int) -> NoReturn:
    """The child: makes each odd number even, until it is told to end or who asks has ended."""
    try:
        os.sched_setaffinity(0, {processor})
        while not line[_END] and os.getppid() == asker:
            for _ in range(10_000):
                if (turn := line[0]) & 1:
                    line[0] = turn ^ 1
    finally:
        os._exit(0)


def _laps(line: memoryview, *, alone: bool) -> float:
    """Nanoseconds of half a lap: one way. ``alone``: nobody answers, and it is done here."""
    began, turn = time.perf_counter_ns(), 1
    for _ in range(_LAPS):
        line[0] = turn
        if alone:
            line[0] = turn ^ 1
        while line[0] == turn:
            pass
        turn = (turn + 2) & 0xFF
    return (time.perf_counter_ns() - began) / _LAPS / 2


if __name__ == "__main__":
    signal.alarm(int(_TIMEOUT))  # ends it if whoever answers was killed
    print(f"{measure():.1f}")
