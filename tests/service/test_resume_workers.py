"""Links over real workers: a redial reaches any of them, and its calls go on where they were."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pyarrow as pa
import pytest

from aqueduct.client.client import Client
from aqueduct.config import Config, Relink
from aqueduct.errors import ConfigError, ConnectionLost
from aqueduct.service import supervisor
from tests.service.test_workers import NUMBERS, WAIT, Crew, crew, gone, numbers, one_of_each, who
from tests.support.proxy import CuttingProxy
from tests.support.selection import mostly_long

APP = """
import asyncio, json, os
import pyarrow as pa
from aqueduct.config import Config, Timing
from aqueduct.service.service import Service

NUMBERS = pa.schema([pa.field("number", pa.int64(), nullable=False)])
TEXT = pa.schema([pa.field("text", pa.string(), nullable=False)])
service = Service("crew", config=Config(timing=Timing(drain_timeout=20)))


@service.handler("who", kind="source", output=NUMBERS)
async def who():
    yield pa.record_batch([[os.getpid()]], schema=NUMBERS)


@service.handler("echo", input=NUMBERS)
async def echo(batches):
    "Each batch, with how many came on this call."
    count = 0
    async for batch in batches:
        count += 1
        yield pa.record_batch([[*batch.column(0).to_pylist(), count]], schema=NUMBERS)


@service.handler("inherited", kind="source", output=TEXT)
async def inherited():
    "What a forked child has open."
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{name}"))
            except OSError:
                pass
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as lines:
        yield pa.record_batch([[lines.read()]], schema=TEXT)
    os.waitpid(child, 0)
"""
LISTEN = {
    "tcp": ("--listen", "aqueduct+tcp://127.0.0.1:0?resume=60s"),
    "tls": ("--listen", "aqueduct+tls://127.0.0.1:0?resume=60s", "--dev-certificate"),
}
both = pytest.mark.parametrize("scheme", mostly_long(LISTEN, "tcp"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With a short TMPDIR, ``sockets`` in it: the path of a socket may have 107 bytes."""
    (tmp_path / "crew.py").write_text(APP)
    with tempfile.TemporaryDirectory(prefix="crew") as sockets:
        (tmp_path / "sockets").symlink_to(sockets)
        monkeypatch.setenv("TMPDIR", sockets)
        yield tmp_path


def directories(folder: Path) -> list[Path]:
    """Where workers hand connections to each other."""
    return list((folder / "sockets").iterdir())


class Talk:
    """An open exchange of a client, and who answers it."""

    def __init__(self, client: Client, pid: int) -> None:
        self.client = client
        self.pid = pid
        self._asked: asyncio.Queue[int | None] = asyncio.Queue()
        self._stream = client.exchange("echo", self._batches(), schema=NUMBERS)
        self._count = 0

    async def _batches(self) -> AsyncIterator[pa.RecordBatch]:
        while (number := await self._asked.get()) is not None:
            yield numbers(number)

    async def ask(self, number: int) -> None:
        """One more batch, which the handler has to see once."""
        self._asked.put_nowait(number)
        self._count += 1
        async with asyncio.timeout(WAIT):
            answer = await anext(self._stream)
        assert answer["number"].to_pylist() == [number, self._count]

    async def end(self) -> None:
        self._asked.put_nowait(None)
        async with asyncio.timeout(WAIT):
            assert [batch async for batch in self._stream] == []

    @property
    def resumes(self) -> int:
        link = self.client.connection.snapshot().transport["link"]
        assert isinstance(link, dict)
        found: int = link["resumes"]
        return found


async def echoed(client: Client, rows: list[int]) -> None:
    """An exchange of one large batch."""
    async with asyncio.timeout(WAIT):
        stream = client.exchange("echo", [numbers(*rows)], schema=NUMBERS)
        (answer,) = [batch async for batch in stream]
    assert answer["number"].to_pylist() == [*rows, 1]


async def links_of(running: Crew, workers: int) -> dict[str, int]:
    """How many links the workers have, and how many of them are relayed."""
    found = {"links": 0, "relayed": 0, "resumes": 0}
    for state in await running.states(workers):
        for connection in state["connections"]:
            link = connection["transport"]["link"]
            found["links"] += 1
            found["relayed"] += link["relayed"]
            found["resumes"] += link["resumes"]
    return found


@pytest.mark.parametrize(
    ("scheme", "count"), mostly_long([("tcp", 200), ("tcp", 60), ("tls", 60)], ("tcp", 60))
)
async def test_links_over_four_workers_of_which_one_is_killed(
    folder: Path, scheme: str, count: int
) -> None:
    with crew(folder, *LISTEN[scheme], workers=4) as running:
        (directory,) = directories(folder)
        assert directory.stat().st_mode & 0o777 == 0o700
        async with CuttingProxy(running.address) as proxy, AsyncExitStack() as stack:
            # On a busy machine an attempt may take long: it is none to be made again.
            config = Config(relink=Relink(handshake_deadline=WAIT, ack_deadline=WAIT))
            dials = (Client.connect(proxy.address, config=config) for _ in range(count))
            clients = await asyncio.gather(*dials)
            for client in clients:
                stack.push_async_callback(client.close)
            pids = await asyncio.gather(*map(who, clients))
            talks = [Talk(*each) for each in zip(clients, pids, strict=True)]
            assert len(set(pids)) == 4
            await asyncio.gather(*(talk.ask(1) for talk in talks))
            assert proxy.cut() == count
            await asyncio.gather(*(talk.ask(2) for talk in talks))
            assert all(talk.resumes == 1 for talk in talks)
            found = await links_of(running, 4)
            assert (found["links"], found["resumes"]) == (count, count)
            if scheme == "tls":  # about three of four have reached another worker
                assert count / 2 < found["relayed"] < count

            victim = max(set(pids), key=pids.count)
            os.kill(victim, signal.SIGKILL)
            await running.told(f"(process {victim}) was killed by SIGKILL; another")
            await running.told("listens")
            proxy.cut()
            answers = await asyncio.gather(*(talk.ask(3) for talk in talks), return_exceptions=True)
            for talk, answer in zip(talks, answers, strict=True):
                if talk.pid == victim:
                    assert isinstance(answer, ConnectionLost)
                    assert "the service dropped the link" in str(answer)
                else:
                    assert answer is None
            living = [talk for talk in talks if talk.pid != victim]
            pids = await asyncio.gather(*(who(talk.client) for talk in living))
            assert pids == [talk.pid for talk in living]
            await asyncio.gather(*(talk.end() for talk in living))
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
        assert directories(folder) == []


@both
async def test_links_are_cut_again_and_again_while_bytes_move(folder: Path, scheme: str) -> None:
    with crew(folder, *LISTEN[scheme], workers=3) as running:
        async with CuttingProxy(running.address) as proxy, AsyncExitStack() as stack:
            clients = await asyncio.gather(*(Client.connect(proxy.address) for _ in range(20)))
            for client in clients:
                stack.push_async_callback(client.close)
            talks = [Talk(client, await who(client)) for client in clients]

            async def cut() -> None:
                for pause in (0.05, 0.3, 0.02, 0.1) * 4:
                    await asyncio.sleep(pause)
                    proxy.cut()

            cutting = asyncio.ensure_future(cut())
            rows = list(range(50_000))
            for number in itertools.count():
                large = [echoed(talk.client, rows) for talk in talks[number % 8 :: 8]]
                await asyncio.gather(*large, *(talk.ask(number) for talk in talks))
                if cutting.done():
                    break
            await asyncio.gather(*(talk.end() for talk in talks))
            assert sum(talk.resumes for talk in talks) > len(talks)
            assert await asyncio.gather(*map(who, clients)) == [talk.pid for talk in talks]


@both
async def test_a_service_that_drains_lets_calls_end_that_pass_through_other_workers(
    folder: Path, scheme: str
) -> None:
    with crew(folder, *LISTEN[scheme], workers=3) as running:
        async with CuttingProxy(running.address) as proxy, AsyncExitStack() as stack:
            clients = await asyncio.gather(*(Client.connect(proxy.address) for _ in range(12)))
            for client in clients:
                stack.push_async_callback(client.close)
            talks = [Talk(client, await who(client)) for client in clients]
            await asyncio.gather(*(talk.ask(1) for talk in talks))
            proxy.cut()
            await asyncio.gather(*(talk.ask(2) for talk in talks))
            running.process.send_signal(signal.SIGTERM)
            await running.told("draining")
            await asyncio.sleep(0.5)
            await asyncio.gather(*(talk.ask(3) for talk in talks))
            await asyncio.gather(*(talk.end() for talk in talks))
            assert await running.ended() == 0


async def test_a_worker_that_is_drained_alone_sends_its_relays_to_others(folder: Path) -> None:
    with crew(folder, *LISTEN["tls"], workers=3) as running:
        async with CuttingProxy(running.address) as proxy, AsyncExitStack() as stack:
            clients = await asyncio.gather(*(Client.connect(proxy.address) for _ in range(18)))
            for client in clients:
                stack.push_async_callback(client.close)
            talks = [Talk(client, await who(client)) for client in clients]
            await asyncio.gather(*(talk.ask(1) for talk in talks))
            proxy.cut()
            await asyncio.gather(*(talk.ask(2) for talk in talks))
            leaving = talks[0].pid
            others = [talk for talk in talks if talk.pid != leaving]
            assert others
            await asyncio.gather(*(talk.end() for talk in talks if talk.pid == leaving))
            os.kill(leaving, signal.SIGTERM)
            await running.told(f"(process {leaving}) was drained; another takes its place")
            await asyncio.gather(*(talk.ask(3) for talk in others))
            await asyncio.gather(*(talk.end() for talk in others))


async def test_a_service_that_restarts_is_another_one_to_its_clients(folder: Path) -> None:
    async with AsyncExitStack() as stack:
        with crew(folder, *LISTEN["tcp"], workers=2) as first:
            proxy = await stack.enter_async_context(CuttingProxy(first.address))
            client = await Client.connect(proxy.address)
            stack.push_async_callback(client.close)
            await who(client)
            with crew(folder, *LISTEN["tcp"], workers=2) as second:
                proxy.lead_to(second.address)
                proxy.cut()
                with pytest.raises(ConnectionLost, match="the service restarted"):
                    await who(client)


@both
async def test_a_forked_child_has_none_of_the_sockets_between_workers(
    folder: Path, scheme: str
) -> None:
    with crew(folder, *LISTEN[scheme], workers=2) as running:
        async with CuttingProxy(running.address) as proxy, AsyncExitStack() as stack:
            direct = await one_of_each(running.address, 2)  # whose children are looked at
            clients = await asyncio.gather(*(Client.connect(proxy.address) for _ in range(10)))
            for client in (*clients, *direct.values()):
                stack.push_async_callback(client.close)
            pids = await asyncio.gather(*map(who, clients))
            assert set(pids) == set(direct)
            proxy.cut()
            assert await asyncio.gather(*map(who, clients)) == pids
            for client in direct.values():
                async with client.source("inherited", output_schema=None) as stream:
                    (batch,) = [batch async for batch in stream]
                (text,) = batch.column(0).to_pylist()
                assert "socket:" not in text
                assert "/dev/null" in text
            assert await asyncio.gather(*map(who, clients)) == pids


@pytest.mark.parametrize("scheme", ["tls"])
async def test_workers_without_the_first_process_leave_no_file(folder: Path, scheme: str) -> None:
    with crew(folder, *LISTEN[scheme], workers=2) as running:
        clients = await one_of_each(running.address, 2)
        assert len(directories(folder)) == 1
        running.process.kill()
        await gone(set(clients))
        assert directories(folder) == []
        for client in clients.values():
            await client.close()


async def test_no_directory_is_made_for_addresses_without_links(folder: Path) -> None:
    with crew(folder, "--listen", "aqueduct+tcp://127.0.0.1:0", workers=2) as running:
        assert directories(folder) == []
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0


@pytest.mark.parametrize(("name", "words"), [("x" * 90, "shorter"), ("none", "none can be made")])
def test_a_directory_that_cannot_be_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    place = tmp_path / name
    if words == "shorter":
        place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    with pytest.raises(ConfigError, match=words):
        supervisor._private_directory()
    assert not place.exists() or list(place.iterdir()) == []
