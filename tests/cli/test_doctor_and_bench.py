"""``aqueduct doctor`` and ``aqueduct bench`` as one types them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

import aqueduct
from aqueduct.cli import main
from tests.carriers.streams import eventually

service = aqueduct.Service("looked-at", benchmark=True)


async def run(*arguments: str) -> int:
    """The command, beside a service on this loop."""
    return await asyncio.to_thread(main, list(arguments))


async def test_doctor_prints_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    async with service.serving("aqueduct+tcp://127.0.0.1:0") as serving:
        assert await run("doctor", serving.addresses[0]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("ok") and " service " in line]
    assert not [line for line in lines if line.startswith("failed")]


async def test_doctor_fails_with_what_mends_it(capsys: pytest.CaptureFixture[str]) -> None:
    missing = "aqueduct+unix:///nowhere/aqueduct.sock"
    assert await run("doctor", missing) == 1
    assert "-> start the service" in capsys.readouterr().out
    assert await run("doctor", missing, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["address"], document["failed"]) == (missing, True)
    checks = {each["check"]: each["status"] for each in document["findings"]}
    assert checks["socket file"] == "failed"


def test_doctor_refuses_what_is_no_port(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "aqueduct+tls://localhost", "--quic-port", "70000"])
    assert ended.value.code == 2
    assert "--quic-port is 70000" in capsys.readouterr().err


async def test_bench_prints_figures_and_what_they_mean(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--seconds", "0.3", "--batch", "64k", "--most", "64k")
    async with service.serving("aqueduct+tcp://127.0.0.1:0") as serving:
        assert await run("bench", serving.addresses[0], *options) == 0
        shown = capsys.readouterr().out
        assert await run("bench", serving.addresses[0], *options, "--json") == 0
    for text in ("small call, p99", "to the service", "from the service", "one call at a time"):
        assert text in shown
    document = json.loads(capsys.readouterr().out)
    assert document["complete"]
    assert document["to_service"]["bytes"] == document["from_service"]["bytes"] == 64 << 10


async def test_bench_says_what_a_service_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    async with aqueduct.Service("plain").serving("aqueduct+tcp://127.0.0.1:0") as serving:
        assert await run("bench", serving.addresses[0]) == 1
    assert "Service(..., benchmark=True)" in capsys.readouterr().err


def test_bench_makes_no_batch_that_memory_may_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "aqueduct+tcp://127.0.0.1:1", "--batch", "1025m"])
    assert ended.value.code == 2
    assert "--batch is 1074790400 bytes; it may be 1048576000 (1000m)" in capsys.readouterr().err


async def test_bench_shows_at_ctrl_c_what_it_has() -> None:
    async with service.serving("aqueduct+tcp://127.0.0.1:0") as serving:
        before = service.counters()["calls"]
        command = (sys.executable, "-m", "aqueduct.cli", "bench", serving.addresses[0], "--json")
        process = await asyncio.create_subprocess_exec(
            *command,
            "--seconds",
            "3000",
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(aqueduct.__file__).parents[1])},
        )
        try:
            async with asyncio.timeout(60):
                await eventually(lambda: service.counters()["calls"] >= before + 10)
                process.send_signal(signal.SIGINT)
                out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 128 + signal.SIGINT
    document = json.loads(out)
    assert not document["complete"]
    assert document["call"]["count"] >= 9
