"""``aqueduct serve --workers``: real processes that share addresses, die and are replaced."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from queue import Empty, Queue

import pyarrow as pa
import pytest

import aqueduct
from aqueduct import reactivesocket
from aqueduct.client.client import Client
from aqueduct.config import Config, Timing
from aqueduct.errors import AqueductError, ConfigError, ConnectFailed
from aqueduct.rpc.reactive_calls import ReactiveItems
from aqueduct.service.supervisor import Restarts
from aqueduct.service.worker import tls_from_json, tls_to_json
from tests.service.reactive_clients import asked
from tests.support.selection import mostly_long
from tests.test_cli import COMMAND, environment

NUMBERS = pa.schema([pa.field("number", pa.int64(), nullable=False)])
APP = """
import asyncio
import os
import pathlib
import time

import pyarrow as pa

from aqueduct.config import Config, Timing
from aqueduct.service.service import Service

NUMBERS = pa.schema([pa.field("number", pa.int64(), nullable=False)])
service = Service("crew", config=Config(timing=Timing(drain_timeout=20)))

if pathlib.Path("broken").exists():
    raise RuntimeError("no such licence")
if pathlib.Path("crashes").exists():
    os.abort()
while pathlib.Path("slow").exists():
    pass


@service.handler("who", kind="source", output=NUMBERS)
async def who():
    yield pa.record_batch([[os.getpid()]], schema=NUMBERS)


@service.handler("echo", input=NUMBERS)
async def echo(batches):
    async for batch in batches:
        yield batch


@service.handler("die", kind="source", output=NUMBERS)
async def die():
    os.abort()
    yield


TURNS = pa.schema([("process", pa.int64()), ("begin", pa.float64()), ("end", pa.float64())])


@service.handler("turn", input=NUMBERS, output=TURNS, max_concurrency=1)
def turn(batch):
    begin = time.monotonic()
    time.sleep(0.01)
    return pa.record_batch([[os.getpid()], [begin], [time.monotonic()]], schema=TURNS)


@service.handler("block", input=NUMBERS)
async def block(batches):
    async for batch in batches:
        yield batch
        await asyncio.sleep(0.1)
        while True:
            pass
"""
WAIT = 60.0
BRIEF = Config(timing=Timing(close_linger=0.2))


def numbers(*some: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(some, pa.int64())], schema=NUMBERS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "crew.py").write_text(APP)
    return tmp_path


class Crew:
    """``aqueduct serve --workers``, running."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.errors: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert process.stdout is not None
        self.address = process.stdout.readline().removeprefix("listening on ").strip()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.put(line)

    async def told(self, words: str) -> str:
        """The next line of standard error with these words."""
        return await asyncio.to_thread(self.line, words)

    def line(self, words: str) -> str:
        seen: list[str] = []
        try:
            while words not in (line := self.errors.get(timeout=WAIT)):
                seen.append(line)
        except Empty:
            raise AssertionError(f"{words!r} was never said: {seen}") from None
        return line

    async def states(self, count: int) -> list[dict]:
        self.process.send_signal(signal.SIGUSR1)
        lines = [await self.told('"counters"') for _ in range(count)]
        return [json.loads(line) for line in lines]

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, WAIT)


@contextmanager
def crew(folder: Path, *options: str, workers: int = 2) -> Iterator[Crew]:
    options = options or ("--listen", "aqueduct://127.0.0.1:0", "--dev-certificate")
    process = subprocess.Popen(
        [*COMMAND, "serve", "crew:service", "--workers", str(workers), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
    )
    try:
        running = Crew(process)
        yield running
    finally:
        process.kill()
        process.wait(WAIT)
        running._reader.join(WAIT)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def alive(pid: int) -> bool:
    """Whether the process is there, and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def gone(pids: set[int]) -> None:
    """Waits until none of them is there."""
    async with asyncio.timeout(WAIT):
        while any(map(alive, pids)):  # noqa: ASYNC110  # no event tells of a stranger's end
            await asyncio.sleep(0.02)


async def who(client: Client) -> int:
    """The process at the other end."""
    async with client.source("who", output_schema=NUMBERS) as stream:
        (batch,) = [batch async for batch in stream]
    found: int = batch["number"][0].as_py()
    return found


async def one_of_each(address: str, workers: int) -> dict[int, Client]:
    """A client for each worker, by the worker's process."""
    found: dict[int, Client] = {}
    async with asyncio.timeout(WAIT):
        while len(found) < workers:
            client = await Client.connect(address, config=BRIEF)
            pid = await who(client)
            if pid in found:
                await client.close()
            else:
                found[pid] = client
    return found


ADDRESSES = {
    "quic": "aqueduct://127.0.0.1:0",
    "tls": "aqueduct+tls://127.0.0.1:0",
    "tcp": "aqueduct+tcp://127.0.0.1:0",
    "draft": "aqueduct+tcp://127.0.0.1:0?dialect=control-streams",
    "unix": "aqueduct+unix://FOLDER/crew.sock",
}


@pytest.fixture(params=mostly_long(ADDRESSES, "quic", "tcp"))
def listen(request, folder: Path) -> tuple[str, ...]:
    address = ADDRESSES[request.param].replace("FOLDER", str(folder))
    secure = request.param in ("quic", "tls")
    return ("--listen", address, *(["--dev-certificate"] if secure else []))


async def test_calls_wait_for_their_turn_in_each_worker(folder):
    with crew(folder, "--listen", "aqueduct+tcp://127.0.0.1:0") as running:
        clients = (await one_of_each(running.address, 2)).values()
        calls = [client.call("turn", numbers(0)) for client in clients for _ in range(10)]
        turns = [answer.to_pylist()[0] for answer in await asyncio.gather(*calls)]
        for client in clients:
            await client.close()
    processes = {turn["process"] for turn in turns}
    assert len(processes) == 2
    for process in processes:
        times = sorted((t["begin"], t["end"]) for t in turns if t["process"] == process)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(times))


async def test_a_socket_file_is_there_while_workers_are_not_ready(folder, tmp_path):
    (folder / "slow.toml").write_text('[timing]\ndrain_timeout = "60s"\ndrain_delay = "25s"\n')
    listen = ("--listen", f"aqueduct+unix://{tmp_path}/s", "--config", "slow.toml")
    with crew(folder, *listen, workers=1) as running:
        running.process.send_signal(signal.SIGTERM)
        await running.told("not ready from now on")
        async with await Client.connect(running.address) as client:
            assert await who(client)
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() in (0, 1)
    assert not (tmp_path / "s").exists()


async def test_workers_share_one_address_and_are_drained_together(folder: Path, listen):
    with crew(folder, *listen, workers=3) as running:
        clients = await one_of_each(running.address, 3)
        reading = asyncio.Event()

        async def batches():
            yield numbers(1)
            await reading.wait()
            yield numbers(2)

        streams = [
            client.exchange("echo", batches(), schema=NUMBERS) for client in clients.values()
        ]
        for stream in streams:
            assert await anext(stream) == numbers(1)
        running.process.send_signal(signal.SIGTERM)
        await running.told("draining")
        for client in clients.values():  # each has heard of it, and its open call goes on
            with pytest.raises(AqueductError, match="is ending"):
                async with asyncio.timeout(WAIT):
                    while True:
                        await who(client)
        reading.set()
        for stream in streams:
            assert [batch async for batch in stream] == [numbers(2)]
        for client in clients.values():
            await client.close()
        assert await running.ended() == 0
        await gone(set(clients))
        assert not (folder / "crew.sock").exists()


async def test_a_dead_worker_is_replaced_and_the_others_do_not_notice(folder: Path, listen):
    with crew(folder, *listen, workers=3) as running:
        clients = await one_of_each(running.address, 3)
        victim = min(clients)
        others = {pid: client for pid, client in clients.items() if pid != victim}
        os.kill(victim, signal.SIGKILL)
        assert f"(process {victim}) was killed by SIGKILL; another" in await running.told("killed")
        await running.told("listens")
        for pid, client in others.items():
            assert await who(client) == pid
        again = await one_of_each(running.address, 3)
        assert victim not in again
        assert set(others) < set(again)
        assert {state["pid"] for state in await running.states(3)} == set(again)
        for client in (*again.values(), *others.values()):
            await client.close()
        await clients[victim].close()
        running.process.send_signal(signal.SIGINT)
        assert await running.ended() == 0


async def test_a_burst_of_connections_is_shared(folder: Path):
    """No worker takes all that wait: each takes one, and lets others take the next."""
    with crew(folder, "--listen", "aqueduct+tcp://127.0.0.1:0", workers=2) as running:
        clients = await asyncio.gather(
            *(Client.connect(running.address, config=BRIEF) for _ in range(60))
        )
        pids = [await who(client) for client in clients]
        assert len(set(pids)) == 2
        assert min(map(pids.count, pids)) >= 6
        for client in clients:
            await client.close()


async def test_each_worker_tells_its_state(folder: Path):
    with crew(folder) as running:
        clients = await one_of_each(running.address, 2)
        states = await running.states(2)
        assert {state["pid"] for state in states} == set(clients)
        assert {state["worker"] for state in states} == {0, 1}
        assert all(state["counters"]["calls"] >= 1 for state in states)
        assert all(state["connections"][0]["side"] == "server" for state in states)
        for client in clients.values():
            await client.close()


async def test_a_worker_that_is_drained_alone_is_replaced(folder: Path):
    with crew(
        folder, "--listen", "aqueduct://127.0.0.1:0", "--dev-certificate", "--restarts", "0"
    ) as (running):
        before = {state["pid"] for state in await running.states(2)}
        leaving = min(before)
        os.kill(leaving, signal.SIGTERM)
        await running.told(f"(process {leaving}) was drained; another takes its place")
        await running.told("listens")
        after = {state["pid"] for state in await running.states(2)}
        assert len(after) == 2
        assert before - after == {leaving}


async def test_a_second_signal_ends_a_worker_whose_handler_blocks(folder: Path):
    with crew(folder) as running:
        clients = await one_of_each(running.address, 2)
        client = next(iter(clients.values()))
        stream = client.exchange("block", [numbers(1)], schema=NUMBERS)
        assert await anext(stream) == numbers(1)
        running.process.send_signal(signal.SIGTERM)
        await running.told("draining")
        running.process.send_signal(signal.SIGTERM)
        await running.told("ended by a second signal")
        assert await running.ended() == 1
        await gone(set(clients))
        for client in clients.values():
            await client.close()


async def test_workers_end_with_the_process_that_watches_them(folder: Path):
    with crew(folder) as running:
        clients = await one_of_each(running.address, 2)
        client = next(iter(clients.values()))  # one of the two cannot even look
        stream = client.exchange("block", [numbers(1)], schema=NUMBERS)
        assert await anext(stream) == numbers(1)
        running.process.kill()
        await gone(set(clients))
        for client in clients.values():
            await client.close()


async def test_workers_that_die_too_often_end_the_service(folder: Path):
    options = ("--listen", "aqueduct://127.0.0.1:0", "--dev-certificate", "--restarts", "2")
    with crew(folder, *options) as running:
        (folder / "crashes").touch()
        clients = await one_of_each(running.address, 2)
        dying, living = clients.values()
        stream = dying.source("die", output_schema=NUMBERS)
        for _ in range(2):
            await running.told("SIGABRT; another takes its place")
        last = await running.told("SIGABRT; 3 workers died within 60 s, and 2 are borne")
        assert "draining the others" in last
        assert await running.ended() == 1
        await gone(set(clients))
        await living.close()
        await stream.aclose()
        await dying.close()


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "serve", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(),
        timeout=WAIT,
        check=False,
    )


LISTEN = ("--listen", "aqueduct://127.0.0.1:0", "--dev-certificate", "--workers", "2")


@pytest.mark.parametrize(
    ("marker", "arguments", "words"),
    [
        ("", ("missing:service", *LISTEN), "No module named 'missing'"),
        ("broken", ("crew:service", *LISTEN), "RuntimeError: no such licence"),
        ("crashes", ("crew:service", *LISTEN), "was killed by SIGABRT before it listened"),
        ("slow", ("crew:service", *LISTEN, "--start-timeout", "3"), "not listen within 3 s"),
        (
            "",
            ("crew:service", "--listen", "memory://x", "--dev-certificate", "--workers", "2"),
            "processes cannot share",
        ),
    ],
)
def test_what_cannot_begin_is_one_line_and_status_one(folder, marker, arguments, words):
    if marker:
        (folder / marker).touch()
    done = run(folder, *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("aqueduct serve: ")
    assert words in done.stderr


@pytest.mark.parametrize(("output", "status"), [("full", 1), ("closed", 141)])
def test_workers_whose_addresses_nobody_reads_end_as_one_process_does(folder, output, status):
    if output == "full":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        nobody, out = os.pipe()
        os.close(nobody)
    try:
        done = subprocess.run(
            [*COMMAND, "serve", "crew:service", *LISTEN, "--admin", "127.0.0.1:0"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment(),
            timeout=WAIT,
            check=False,
        )
    finally:
        os.close(out)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    if output == "full":
        assert done.stderr == "aqueduct serve: [Errno 28] No space left on device\n"


def test_an_address_is_not_shared_with_strangers(folder: Path):
    with crew(folder) as running:
        taken = running.address.partition("?")[0]
        for workers in ([], ["--workers", "2"]):
            done = run(folder, "crew:service", "--listen", taken, "--dev-certificate", *workers)
            assert done.returncode == 1
            assert "Address already in use" in done.stderr


async def test_a_certificate_and_several_addresses_go_to_all_workers(folder: Path):
    tls = aqueduct.dev_certificate()
    assert isinstance(tls.certificate, bytes)
    assert isinstance(tls.key, bytes)
    (folder / "cert.pem").write_bytes(tls.certificate)
    (folder / "key.pem").write_bytes(tls.key)
    listen = ["--listen", "aqueduct://localhost:0", "--listen", "aqueduct+tls://localhost:0"]
    listen += ["--listen", f"aqueduct+unix://{folder}/crew.sock?mode=0660"]
    with crew(folder, *listen, "--certificate", "cert.pem", "--key", "key.pem") as running:
        assert running.process.stdout is not None
        second, third = (
            running.process.stdout.readline().removeprefix("listening on ").strip()
            for _ in range(2)
        )
        pids = []
        for address in (running.address, second, third):
            assert "fingerprint" not in address
            trust = "" if "+unix" in address else f"?ca={folder / 'cert.pem'}"
            clients = await one_of_each(address + trust, 2)
            pids.append(set(clients))
            for client in clients.values():
                await client.close()
        assert pids[0] == pids[1] == pids[2]


@pytest.mark.parametrize(
    "options", [{"limit": -1}, {"period": 0}, {"start": 0}, {"longest_pause": 0}, {"settled": 0}]
)
def test_numbers_that_cannot_work(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Restarts(**options)


def test_the_pause_doubles_up_to_its_limit():
    restarts = Restarts(pause=0.5, longest_pause=3)
    assert [restarts.wait(deaths) for deaths in (1, 2, 3, 4, 5000)] == [0.5, 1, 2, 3, 3]


def test_certificates_keep_their_form_on_the_way_to_a_worker():
    made = aqueduct.dev_certificate()
    files = aqueduct.ServerTls(Path("a.pem"), "b.pem", key_password="x", client_ca=b"pem")
    there = tls_from_json(json.loads(json.dumps(tls_to_json(made))))
    assert there is not None
    assert there == made
    assert there.development
    found = tls_from_json(json.loads(json.dumps(tls_to_json(files))))
    assert found is not None
    assert (found.certificate, found.key, found.client_ca) == ("a.pem", "b.pem", b"pem")
    assert found.key_password == "x"
    assert tls_from_json(tls_to_json(None)) is None


async def test_workers_answer_clients_of_reactivesocket(folder: Path):
    addresses = ["--listen", "reactivesocket+tcp://127.0.0.1:0"]
    addresses += ["--listen", "reactivesocket+ws://127.0.0.1:0", "--origin", "https://a.example"]
    with crew(folder, *addresses) as running:
        assert running.process.stdout is not None
        tcp = running.address
        web = running.process.stdout.readline().removeprefix("listening on ").strip()
        for address, origin in ((tcp, None), (web, "https://a.example")):
            async with await reactivesocket.connect(address, origin=origin) as client:
                async with client.stream(asked("who"), n=4) as stream:
                    found = [ReactiveItems().read(item.data) async for item in stream]
                assert alive(found[0]["number"][0].as_py())
        with pytest.raises(ConnectFailed, match="403"):
            await reactivesocket.connect(web, origin="https://b.example")
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
