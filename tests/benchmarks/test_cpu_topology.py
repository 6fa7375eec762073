"""How far apart the processors are, as the benchmark tells it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import cpu_topology

pytestmark = pytest.mark.checkout

PINS = hasattr(os, "sched_setaffinity")


def test_several_processors_have_a_distance() -> None:
    mine = os.sched_getaffinity(0) if PINS else set()
    found = cpu_topology.apart()
    assert isinstance(found, float) if len(mine) > 1 else found is None
    if PINS:
        assert os.sched_getaffinity(0) == mine


def test_one_processor_has_none() -> None:
    script = (
        "import os\n"
        f"if {PINS}: os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})\n"
        "from benchmarks import cpu_topology; print(cpu_topology.apart())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(cpu_topology.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "None"


@pytest.mark.parametrize(
    "failure", [subprocess.TimeoutExpired("python", 10), OSError("none"), None]
)
def test_what_cannot_be_measured_is_not_said(
    monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    def run(*_: object, **__: object) -> None:
        raise failure or subprocess.CalledProcessError(1, "python")

    monkeypatch.setattr(subprocess, "run", run)
    assert cpu_topology.apart() is None


@pytest.mark.skipif(not PINS, reason="who answers is pinned to a processor, as only Linux can")
def test_the_answering_process_does_not_outlive_the_asking_one() -> None:
    script = (
        "import mmap, os; from benchmarks import cpu_topology\n"
        "line = memoryview(mmap.mmap(-1, 4096)); asker, child = os.getpid(), os.fork()\n"
        "if child == 0: cpu_topology._answer(line, max(os.sched_getaffinity(0)), asker)\n"
        "print(child, flush=True); os._exit(0)"
    )
    root = Path(cpu_topology.__file__).parents[1]
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdout is not None
        child = int(asker.stdout.readline())
    for _ in range(500):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":  # and nobody has asked how
            return
        time.sleep(0.02)
    pytest.fail("it goes on")


def test_a_summary_counts_what_was_told() -> None:
    near, far = cpu_topology.FAR, cpu_topology.FAR + 1
    rows: list[dict[str, float | None]] = [
        {"apart_ns": near, "apart_after_ns": 50.0},
        {"apart_ns": far, "apart_after_ns": far},
        {"apart_ns": far, "apart_after_ns": near},
        {"apart_ns": near, "apart_after_ns": far},
        {"apart_ns": None, "apart_after_ns": near},
        {},
    ]
    assert cpu_topology.summary(rows) == (
        "Of 4 measurements the processors were near each other (up to 110 ns) before and after "
        "in 1, far in 1, and were moved in 2."
    )
    assert cpu_topology.summary(rows[4:]) == ""
