"""Many large calls at once, each process by itself: what it takes beside its budget."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import memory_budget
from tests.support.selection import mostly_long

pytestmark = [pytest.mark.checkout, pytest.mark.timeout(150)]

MiB = 1 << 20


@pytest.mark.parametrize("kind", mostly_long(["sink", "source"], "source"))
def test_memory_beside_many_large_calls_is_a_budget_and_one_batch(kind: str) -> None:
    """They have ten times the budget in sum."""
    trial = memory_budget.Trial(
        kind, calls=40, size=32 * MiB, budget=128 * MiB, connections=4, pause=0.1
    )
    result = memory_budget.attempt(trial, 120)
    assert result["misses"] == []
    assert result["allowed"] == int(1.1 * 160 * MiB)
    assert 32 * MiB < result["server_above"] <= result["allowed"]


@pytest.mark.parametrize("kind", mostly_long(["clients", "threads"], "clients"))
@pytest.mark.parametrize("calls", [12, pytest.param(40, marks=pytest.mark.long)])
def test_memory_of_clients_that_pull_large_batches_is_a_budget_and_two_batches(
    calls: int, kind: str
) -> None:
    """Each call pulls five batches of 16 MiB: twelve have fifteen times the budget in sum."""
    trial = memory_budget.Trial(
        kind, calls=calls, size=80 * MiB, budget=64 * MiB, connections=2, pause=0.0
    )
    result = memory_budget.attempt(trial, 120)
    assert result["misses"] == []
    assert result["allowed"] == int(1.1 * 96 * MiB)
    assert 16 * MiB < result["client_above"] <= result["allowed"]


def test_handlers_that_collect_more_than_the_budget_end_well() -> None:
    trial = memory_budget.Trial(
        "collect", calls=4, size=64 * MiB, budget=64 * MiB, connections=4, pause=0.0
    )
    result = memory_budget.attempt(trial, 120)
    assert result["misses"] == []
    assert result["server_above"] > 128 * MiB


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["sink", "source"])
def test_200_calls_of_100_megabytes_stay_within_512_mebibytes_and_one(kind: str) -> None:
    trial = memory_budget.Trial(
        kind, calls=200, size=10**8, budget=512 * MiB, connections=16, pause=0.5
    )
    result = memory_budget.attempt(trial, 600)
    assert result["misses"] == []
    assert result["server_above"] <= result["allowed"] == int(1.1 * (512 * MiB + 10**8))


def test_a_budget_that_does_not_hold_is_named_and_fails() -> None:
    """One batch alone is above what this budget allows."""
    command = [sys.executable, str(Path(memory_budget.__file__)), "--only", "sink"]
    command += ["--calls", "2", "--size", "64m", "--budget", "1k", "--connections", "1"]
    command += ["--allowed", "1m"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "the server took" in done.stdout
