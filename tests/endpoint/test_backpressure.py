"""A consumer that rests longer than the idle timeout holds its producer back, and little else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import backpressure
from tests.support.selection import mostly_long

pytestmark = [pytest.mark.checkout, pytest.mark.timeout(150)]

MiB = 1 << 20
LIMIT = 256 * MiB


@pytest.mark.parametrize("kind", mostly_long(backpressure.KINDS, "exchange"))
def test_a_resting_consumer_costs_little_memory_and_no_data(kind: str):
    trial = backpressure.Trial(
        kind, offered=512 * MiB, before=16 * MiB, after=64 * MiB, pause=4.0, idle=1.5
    )
    result = backpressure.attempt(trial, LIMIT)
    assert result["misses"] == []
    assert result["read_after"] == 64
    assert result["stood_still"] > trial.idle
    assert 0 <= result["ahead"] < LIMIT


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", backpressure.KINDS)
def test_ten_gibibytes_are_offered_to_a_resting_consumer(kind: str):
    trial = backpressure.Trial(
        kind, offered=10 << 30, before=64 * MiB, after=1 << 30, pause=15.0, idle=5.0
    )
    result = backpressure.attempt(trial, LIMIT)
    assert result["misses"] == []
    assert result["read_after"] == 1024
    assert result["stood_still"] > trial.idle
    assert 0 <= result["ahead"] < LIMIT
    assert result["server_memory"] < LIMIT
    assert result["client_memory"] < LIMIT


def test_what_misses_is_named_and_fails():
    """The smallest trial, with a limit that nothing can meet."""
    command = [sys.executable, str(Path(backpressure.__file__))]
    command += ["--offered", "128m", "--before", "1m", "--after", "1m", "--limit", "1m"]
    command += ["--pause", "1", "--idle", "0.8", "--only", "source"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "the server needed" in done.stdout
    assert "the client needed" in done.stdout


def test_a_pause_within_the_idle_timeout_is_wrong_usage():
    command = [sys.executable, str(Path(backpressure.__file__)), "--pause", "1", "--idle", "2"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
