"""The trace of a small call over QUIC."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import trace_quic

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[2]


def test_stages_lie_between_what_the_two_sides_note() -> None:
    client = {"sent": [1.0, 5.0], "read": [4.0, 9.0], "counts": {}, "used": 0.1}
    service = {"sent": [3.0, 8.0], "read": [2.0, 7.0], "counts": {}, "used": 0.2}
    found = trace_quic.stages([(0.5, 4.5), (4.75, 10.0)], client, service)
    assert found == [[0.5, 1.0, 1.0, 1.0, 0.5], [0.25, 2.0, 1.0, 1.0, 1.0]]
    text = trace_quic.table(found, 2, client, service)
    assert "| up | 1500000 |" in text
    assert "| service | 0.00 | 0.00 | 0.0 | 100000 |" in text


def test_a_call_without_an_answer_of_its_own_is_left_out() -> None:
    client = {"sent": [1.0], "read": [2.0]}
    service = {"sent": [3.0], "read": [1.5]}
    assert trace_quic.stages([(0.5, 4.0)], client, service) == []


@pytest.mark.parametrize("size", ["auto", "1200"])
def test_calls_are_traced_in_two_processes(size: str) -> None:
    command = [sys.executable, "-m", "benchmarks.trace_quic", "--calls", "50", "--json"]
    done = subprocess.run(
        [*command, "--datagram-size", size],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    medians = json.loads(done.stdout)
    assert set(medians) == set(trace_quic.STAGES)
    assert all(value > 0 for value in medians.values())
