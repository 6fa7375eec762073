"""The admin port of ``aqueduct serve``: of one process, and of workers that die."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aqueduct.client.client import Client
from aqueduct.errors import AqueductError
from tests.service.test_admin import asked
from tests.service.test_workers import APP, WAIT, crew, folder, numbers, who
from tests.test_cli import COMMAND, environment

__all__ = ["folder"]

TCP = ("--listen", "aqueduct+tcp://127.0.0.1:0", "--admin", "127.0.0.1:0")


class Port:
    """What the admin port tells."""

    def __init__(self, line: str) -> None:
        self.address = line.partition("admin at ")[2].strip()

    async def get(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(asked, self.address, path)

    async def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((await self.get("/state.json"))[1])
        return found

    async def calls(self, handler: str) -> int:
        found: int = (await self.state())["handlers"][handler]["calls"]
        return found


async def called(address: str, times: int) -> None:
    """So many calls, each on a connection of its own."""
    for _ in range(times):
        async with await Client.connect(address) as client:
            await who(client)


async def test_workers_are_added_up_and_their_counts_outlive_them(folder: Path) -> None:
    with crew(folder, *TCP) as running:
        port = Port(await running.told("admin at "))
        async with asyncio.timeout(WAIT):
            while (await port.get("/health/ready")) != (200, "ready\n"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await called(running.address, 6)
            while await port.calls("who") < 6:  # noqa: ASYNC110  it looks now and then
                await asyncio.sleep(0.05)
        before = await port.state()
        assert before["service"]["name"] == "crew"
        assert before["service"]["addresses"] == [running.address]
        assert before["connections"]["total"] == 6
        assert before["connections"]["limit"] == 2 * 16_384
        assert [each["number"] for each in before["workers"]] == [0, 1]
        pids = [each["pid"] for each in before["workers"]]

        async with await Client.connect(running.address) as client:
            with pytest.raises(AqueductError):
                async with client.source("die", output_schema=numbers().schema) as stream:
                    async for _ in stream:
                        pass
        await running.told("another takes its place")
        counts = []
        async with asyncio.timeout(WAIT):
            while True:
                status, said = await port.get("/health/ready")
                found = await port.state()
                counts.append(found["handlers"]["who"]["calls"])
                if status == 200 and sum(each["deaths"] for each in found["workers"]) == 1:
                    break
                assert status == 200 or "it has not begun to listen" in said
                await asyncio.sleep(0.05)
        assert set(counts) == {6}, "nothing fell, or was counted twice"
        assert len({each["pid"] for each in found["workers"]} - set(pids)) == 1

        # One that is told to end tells what it has counted before it does.
        pid = found["workers"][0]["pid"]
        await called(running.address, 4)
        os.kill(pid, signal.SIGTERM)
        await running.told("was drained; another takes its place")
        async with asyncio.timeout(WAIT):  # one report does for a moment
            while (calls := await port.calls("who")) != 10:
                assert 6 <= calls < 10
                await asyncio.sleep(0.05)
        text = (await port.get("/metrics"))[1]
        assert 'aqueduct_calls_total{handler="who"} 10.0' in text
        assert 'aqueduct_worker_deaths_total{worker="' in text

        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
        with pytest.raises(OSError):
            await port.get("/health/live")


async def test_a_drain_of_workers_is_not_ready_and_live(folder: Path) -> None:
    with crew(folder, *TCP, "--drain", "20s", workers=1) as running:
        port = Port(await running.told("admin at "))
        async with await Client.connect(running.address) as client:
            batches: asyncio.Queue[Any] = asyncio.Queue()

            async def given() -> Any:
                while (batch := await batches.get()) is not None:
                    yield batch

            batches.put_nowait(numbers(1))
            stream = client.exchange("echo", given(), schema=numbers().schema)
            assert await anext(stream) == numbers(1)
            running.process.send_signal(signal.SIGTERM)
            await running.told("draining")
            status, said = await port.get("/health/ready")
            assert status == 503
            assert said.startswith("not ready: the service is draining")
            assert await port.get("/health/live") == (200, "live\n")
            assert (await port.state())["calls"]["open"] == 1
            batches.put_nowait(None)
            assert [batch async for batch in stream] == []
        assert await running.ended() == 0


@pytest.mark.long
async def test_a_worker_whose_event_loop_is_blocked_tells_so(folder: Path) -> None:
    settings = "Config(timing=Timing(drain_timeout=20), admin=Admin(ready_lag=0.3, live_lag=0.5))"
    app = APP.replace("Config(timing=Timing(drain_timeout=20))", settings)
    (folder / "crew.py").write_text(app.replace("import Config", "import Admin, Config"))
    with crew(folder, *TCP, workers=1) as running:
        port = Port(await running.told("admin at "))
        async with await Client.connect(running.address) as client:
            stream = client.exchange("block", [numbers(1)])
            await anext(stream)
            async with asyncio.timeout(WAIT):
                while (await port.get("/health/live"))[0] == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            status, said = await port.get("/health/ready")
            assert status == 503
            assert "worker 0: its event loop has not turned for" in said
            (call,) = (await port.state())["calls"]["listed"]
            assert (call["handler"], call["worker"]) == ("block", 0)
            running.process.kill()


def test_one_process(folder: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "serve", "crew:service", *TCP],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline().startswith("listening on aqueduct+tcp://127.0.0.1:")
            while "admin at " not in (line := process.stderr.readline()):
                assert line
            address = line.partition("admin at ")[2].strip()
            assert asked(address, "/health/ready") == (200, "ready\n")
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=WAIT)
            connection.request("GET", "/health/live", headers={"Host": "evil.example"})
            assert connection.getresponse().status == 421
            connection.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("more", [(), pytest.param(("--workers", "2"), marks=pytest.mark.long)])
def test_a_place_that_is_taken(folder: Path, more: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*COMMAND, "serve", "crew:service", *TCP[:2], "--admin", f"127.0.0.1:{port}", *more],
            capture_output=True,
            text=True,
            timeout=WAIT,
            cwd=folder,
            env=environment(),
            check=False,
        )
    expected = f"aqueduct serve: admin= (--admin) 127.0.0.1:{port} cannot be bound: Address"
    assert done.returncode != 0
    assert done.stdout == ""
    assert expected in done.stderr
