"""The demo as a person runs it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aqueduct
from spark_udfs.demo.flights import FLIGHTS, flights
from spark_udfs.demo.scoring import DelayModel, score, scored_schema

ROOT = Path(__file__).parent.parent.parent

COUNTERS = pa.schema([("name", pa.string()), ("value", pa.int64())])

pytestmark = pytest.mark.spark


def demo(*arguments, environment=None):
    return subprocess.run(
        [sys.executable, "-m", "spark_udfs.demo", *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


# One after the other in one process: they share a JVM, whose start is most of their time.
RUNNER = """
import json, os, runpy, sys
told = []
for place, arguments in enumerate(json.loads(sys.argv[1])):
    sys.argv = ["demo", *arguments]
    kept = [os.dup(number) for number in (1, 2)]
    for number, name in ((1, "out"), (2, "err")):
        with open(f"{place}.{name}", "wb") as file:
            os.dup2(file.fileno(), number)
    try:
        runpy.run_module("spark_udfs.demo", run_name="__main__")
        status = None
    except SystemExit as ended:
        status = ended.code
    sys.stdout.flush()
    sys.stderr.flush()
    for number, file in zip((1, 2), kept):
        os.dup2(file, number)
        os.close(file)
    told.append(status)
print(json.dumps(told))
"""


@dataclass
class Ended:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """Two demos: over a Unix socket, and with a service that is killed."""
    folder = tmp_path_factory.mktemp("demos")
    given = [
        ["--rows", "20000", "--scheme", "unix"],
        ["--batch-rows", "500", "--kill-after", "100"],
    ]
    ended = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps(given)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return [
        Ended(status, (folder / f"{place}.out").read_text(), (folder / f"{place}.err").read_text())
        for place, status in enumerate(json.loads(ended.stdout))
    ]


def test_the_whole_demo_ends_well():
    # Whoever has chosen a collector of garbage keeps it: Java does not start with two.
    ended = demo(environment={"SPARK_SUBMIT_OPTS": "-XX:+UseParallelGC"})
    assert ended.returncode == 0, ended.stderr
    out = ended.stdout
    assert "25bf0a7f69f06299" in out
    assert "336,776 of 336,776 rows; checksum equal to the computation without the network" in out
    assert "336,776 rows in, 336,776 rows out" in out
    assert "Hawaiian Airlines Inc." in out
    assert out.count("2013-") == 10
    assert len(re.findall(r"^  2013-", out, re.MULTILINE)) == 10
    for word in ("Rows", "Batches", "Seconds", "MiB/s", "8 calls", "connections"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 80
    assert ended.stderr == ""


def takes_scheme(ended: Any, scheme: str) -> None:
    assert ended.returncode == 0, ended.stderr
    assert f" at aqueduct+{scheme}://" in ended.stdout
    assert "20,000 of 20,000 rows; checksum equal to" in ended.stdout
    assert ended.stderr == ""


@pytest.mark.timeout(400)
def test_the_demo_goes_over_a_unix_socket(in_turn):
    takes_scheme(in_turn[0], "unix")


@pytest.mark.long
def test_the_demo_goes_over_tls():
    takes_scheme(demo("--rows", "20000", "--scheme", "tls"), "tls")


@pytest.mark.timeout(400)
def test_a_service_killed_on_the_way_ends_badly(in_turn):
    ended = in_turn[1]
    assert ended.returncode == 1
    assert "The job failed: " in ended.stderr
    # The other worker may only be starting, and find nobody to connect to.
    assert re.search("ConnectionLost|ConnectFailed", ended.stderr)
    assert "'score' at aqueduct://127.0.0.1:" in ended.stderr
    assert "was killed by SIGKILL" in ended.stderr
    assert "equal to" not in ended.stdout


def test_a_wrong_answer_ends_badly(running, tmp_path):
    service = aqueduct.Service("wrong")
    model = DelayModel.fit(flights())

    @service.handler("score", input=FLIGHTS, output=scored_schema)
    def wrong(batch):
        scored = score(batch, model)
        delays = scored["expected_arr_delay"].to_pylist()
        if batch["id"][0].as_py() == 0:
            delays[1] = math.nextafter(delays[1], math.inf)
        return scored.set_column(24, scored.schema.field(24), pa.array(delays, pa.float64()))

    @service.handler("counters", kind="source", output=COUNTERS)
    def counters():
        counted = service.counters()
        yield pa.record_batch({"name": list(counted), "value": list(counted.values())})

    kept = str(tmp_path / "kept")
    with running(service) as address:
        ended = demo("--rows", "20000", "--batch-rows", "500", "--keep", kept, "--address", address)
    assert ended.returncode == 1
    assert list((tmp_path / "kept" / "scored").glob("*.parquet"))
    assert demo("--keep", kept).returncode == 2
    assert "20,000 of 20,000 rows; checksum DIFFERENT FROM the computation" in ended.stdout
    assert "row 1, column expected_arr_delay: " in ended.stderr


def test_without_java_it_says_what_to_install(tmp_path):
    ended = demo("--rows", "10", environment={"JAVA_HOME": str(tmp_path)})
    assert ended.returncode == 2
    assert "apt install openjdk-17-jre-headless" in ended.stderr


def test_without_its_service_it_says_so():
    ended = demo("--rows", "10", "--address", "aqueduct://127.0.0.1:9")
    assert ended.returncode == 2
    assert "The demo cannot start: aqueduct://127.0.0.1:9: connection refused" in ended.stderr
