"""What survives what: each cell of the table in docs/cookbook/network-breaks.md, really done."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.client.stream import Stream
from aqueduct.config import Config, Relink, Timing
from aqueduct.errors import ConnectionLost, DeadlineExceeded
from tests.carriers.test_resume import SCHEMA, batch, service_of
from tests.service.test_workers import crew, gone, who
from tests.spark.callees import free_port
from tests.spark.witness import Witness
from tests.support.proxy import CuttingProxy, DatagramProxy
from tests.support.selection import mostly_long

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "cookbook" / "network-breaks.md"
COLUMNS = (("quic",), ("tcp", "tls"), ("tcp with resume", "tls with resume"), ("unix",))
"""The ways to connect that each column is about."""
WAYS = tuple(way for column in COLUMNS for way in column)
ROWS = (
    "cut",
    "silent NAT timeout",
    "proxy roll",
    "address change",
    "worker death",
    "service restart",
    "client death",
)
KILLED = ("worker death", "service restart")
"""Rows that start and end services; TLS is as TCP there, in the long run."""
IDLE = 3.0
"""``Timing.idle_timeout`` of the clients and services here."""
KEEP = 2.0
"""``?resume=`` where a test waits for it."""
SLACK = 15.0
"""For a busy machine: what has a deadline of its own may be late by this."""
CONFIG = Config(
    timing=Timing(idle_timeout=IDLE, ping_interval=0.5, close_linger=0.2),
    relink=Relink(ack_deadline=0.5, handshake_deadline=2.0),
)
ELSEWHERE = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"


def table() -> dict[tuple[str, str], str]:
    """The cells of the page, by row and way to connect."""
    text = PAGE.read_text().partition("## What survives what")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[2:-1]] for line in lines]
    assert len(cells) == len(ROWS)
    assert all(len(line) == len(COLUMNS) for line in cells), cells
    return {
        (row, way): cell
        for row, line in zip(ROWS, cells, strict=True)
        for column, cell in zip(COLUMNS, line, strict=True)
        for way in column
    }


TABLE = table()


def address_of(way: str, path: Path, *, keep: str = "60s", port: int = 0) -> str:
    if way == "unix":
        return f"aqueduct+unix://{path}/s"
    name, _, resumes = way.partition(" with ")
    scheme = "aqueduct" if name == "quic" else f"aqueduct+{name}"
    return f"{scheme}://127.0.0.1:{port}" + (f"?resume={keep}" if resumes else "")


def secure(way: str) -> bool:
    """Whether the service shows a certificate."""
    return way.startswith(("quic", "tls"))


def cases(*rows: str) -> pytest.MarkDecorator:
    """The cells of these rows: row, way to connect, and what the page says."""
    found = [(row, way, TABLE[row, way]) for row in rows for way in WAYS]
    rare = ("tls", "unix", "tls with resume")
    usual = [case for case in found if not (case[0] in KILLED and case[1] in rare)]
    return pytest.mark.parametrize(
        ("row", "way", "cell"),
        mostly_long(found, *usual),
        ids=[f"{row}-{way}" for row, way, _ in found],
    )


def check(cell: str, error: ConnectionLost | None, took: float, since: float) -> None:
    """That a call ended as a cell says: ``took`` seconds, and so many ``since`` the cause."""
    if cell == "go on":
        assert error is None
        return
    assert error is not None
    bounds = {
        "fail at once": (0.0, IDLE * 0.9),
        "fail once it is back": (0.0, SLACK),
        "fail after `Timing.idle_timeout`": (IDLE / 2, IDLE + SLACK),
    }
    least, most = bounds[cell]
    assert least <= since, error
    assert took < most, error


@dataclass
class Talk:
    """An exchange that is open: a batch goes there and back for each ``turn``."""

    client: aqueduct.Client
    given: asyncio.Queue[pa.RecordBatch | None]
    answers: Stream
    turns: int = 0

    async def turn(self) -> None:
        self.turns += 1
        sent = batch(self.turns)
        self.given.put_nowait(sent)
        assert await anext(self.answers) == sent

    async def broken(self, cell: str, since: float | None = None) -> None:
        """Something has just happened, or at ``since``: the next turns end as the cell says."""
        begun = time.monotonic()
        error = None
        try:
            async with asyncio.timeout(IDLE + 2 * SLACK):
                for _ in range(3):
                    await self.turn()
        except ConnectionLost as lost:
            error = lost
        ended = time.monotonic()
        check(cell, error, ended - begun, ended - (begun if since is None else since))
        if error is None:
            self.given.put_nowait(None)
            assert [each async for each in self.answers] == []


@asynccontextmanager
async def talk(address: str, handler: str = "count") -> AsyncIterator[Talk]:
    async with await aqueduct.Client.connect(address, config=CONFIG) as client:
        given: asyncio.Queue[pa.RecordBatch | None] = asyncio.Queue()

        async def batches() -> AsyncIterator[pa.RecordBatch]:
            while (each := await given.get()) is not None:
                yield each

        answers = client.exchange(handler, batches(), schema=SCHEMA)
        found = Talk(client, given, answers)
        await found.turn()
        try:
            yield found
        finally:
            await answers.aclose()


def test_the_page_has_a_test_for_each_cell() -> None:
    words = {
        "go on",
        "fail at once",
        "fail once it is back",
        "fail after `Timing.idle_timeout`",
        "does not happen",
        "cancelled at once",
        "cancelled after `Timing.idle_timeout`",
        "cancelled after `?resume=`",
    }
    assert set(TABLE.values()) == words


# Breaks between two live processes


@cases("cut", "silent NAT timeout", "proxy roll", "address change")
async def test_a_break_of_the_network(row: str, way: str, cell: str, tmp_path: Path) -> None:
    seen: list[int] = []
    service = service_of(seen, CONFIG)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            service.serving(address_of(way, tmp_path), dev_certificate=secure(way), drain=0)
        )
        if cell == "does not happen":
            # There is no network between the two: no address, and the kernel knows the process.
            async with talk(running.addresses[0]) as talking:
                assert running.connections[0].carrier.peer_credentials is not None
                assert talking.client.connection.snapshot().transport["carrier"] == "unix"
                assert ":" not in running.connections[0].peer
            return
        if way == "quic":
            udp = await stack.enter_async_context(DatagramProxy(running.addresses[0]))
            address, happen = udp.address, partial(over_udp[row], udp)
        else:
            proxy = await stack.enter_async_context(CuttingProxy(running.addresses[0]))
            address, happen = proxy.address, partial(over_streams[row], proxy)
        async with talk(address) as talking:
            before = running.connections[0].peer
            await happen()
            await talking.broken(cell)
            if cell == "go on":
                assert seen == [1, 2, 3, 4]
                assert service.counters()["connections"] == 1
            if cell == "go on" and row == "address change" and way != "quic":
                assert before.startswith("127.0.0.1:")
                assert running.connections[0].peer.startswith(f"{ELSEWHERE}:")


async def cut(proxy: CuttingProxy) -> None:
    assert proxy.cut() == 1


async def forget(proxy: CuttingProxy) -> None:
    proxy.silent = {"up", "down"}
    # What passes now is dropped, and with it all that follows on this connection.
    asyncio.get_running_loop().call_later(0.3, proxy.silent.clear)


async def roll(proxy: CuttingProxy) -> None:
    await proxy.stop()
    await asyncio.sleep(0.3)
    await proxy.__aenter__()


async def move(proxy: CuttingProxy) -> None:
    proxy.source = ELSEWHERE
    await forget(proxy)


async def lose(proxy: DatagramProxy) -> None:
    proxy.silent = True
    asyncio.get_running_loop().call_later(1.0, setattr, proxy, "silent", False)


async def forget_udp(proxy: DatagramProxy) -> None:
    proxy.forget()


async def roll_udp(proxy: DatagramProxy) -> None:
    proxy.restart()


async def move_udp(proxy: DatagramProxy) -> None:
    proxy.forget(ELSEWHERE)


over_streams = dict(zip(ROWS, (cut, forget, roll, move), strict=False))
over_udp = dict(zip(ROWS, (lose, forget_udp, roll_udp, move_udp), strict=False))


# What the page says of calls during a break


@asynccontextmanager
async def held_apart(handler: Callable[..., object]) -> AsyncIterator[tuple[Talk, CuttingProxy]]:
    """An exchange with a handler whose connection is cut, and is not made again for now."""
    service = aqueduct.Service("apart", config=CONFIG)
    service.handler("apart", output=SCHEMA)(handler)
    async with (
        service.serving(address_of("tcp with resume", ROOT), drain=0) as running,
        CuttingProxy(running.addresses[0]) as proxy,
        talk(proxy.address, "apart") as talking,
    ):
        proxy.refuse = True
        proxy.cut()
        yield talking, proxy


async def test_a_deadline_runs_on_while_there_is_no_connection() -> None:
    async def echo(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for each in batches:
            yield each

    async with held_apart(echo) as (talking, proxy):
        with pytest.raises(DeadlineExceeded):
            await talking.client.call("apart", batch(1), deadline=0.5)
        proxy.refuse = False
        await talking.turn()


async def test_a_cancel_leaves_when_there_is_a_connection_again() -> None:
    cancelled = asyncio.Event()

    async def echo(
        batches: AsyncIterator[pa.RecordBatch], call: aqueduct.Call
    ) -> AsyncIterator[pa.RecordBatch]:
        call.on_cancel(cancelled.set)
        async for each in batches:
            yield each

    async with held_apart(echo) as (talking, proxy):
        await talking.answers.aclose()
        await asyncio.sleep(0.3)
        assert not cancelled.is_set()
        proxy.refuse = False
        async with asyncio.timeout(KEEP + SLACK):
            await cancelled.wait()


# Deaths of services

APP = f"""
import os

import pyarrow as pa

import aqueduct
from aqueduct.client.stream import Stream
from aqueduct.config import Config, Timing

timing = Timing(idle_timeout={IDLE}, ping_interval=0.5)
service = aqueduct.Service("crew", config=Config(timing=timing))


@service.handler("count", output=pa.schema([("n", pa.int64())]))
async def count(batches):
    async for batch in batches:
        yield batch


@service.handler("who", kind="source", output=pa.schema([pa.field("number", pa.int64(), False)]))
async def who():
    number = pa.array([os.getpid()])
    yield pa.record_batch([number], schema=pa.schema([pa.field("number", pa.int64(), False)]))
"""


@dataclass
class Place:
    """Where a service of processes is: what it is told, and what its clients dial."""

    folder: Path
    way: str
    port: int = 0

    def __post_init__(self) -> None:
        tls = aqueduct.dev_certificate()
        assert isinstance(tls.certificate, bytes) and isinstance(tls.key, bytes)
        (self.folder / "crew.py").write_text(APP)
        # In files, so that the service has the same one after a restart.
        (self.folder / "cert.pem").write_bytes(tls.certificate)
        (self.folder / "key.pem").write_bytes(tls.key)
        self._pin = f"fingerprint={tls.fingerprint}"

    @property
    def options(self) -> list[str]:
        certificate = ["--certificate", "cert.pem", "--key", "key.pem"]
        address = address_of(self.way, self.folder, port=self.port)
        return ["--listen", address, *(certificate if secure(self.way) else [])]

    def dialled(self, address: str) -> str:
        """The service's ``address`` with the certificate that it has."""
        if not secure(self.way):
            return address
        return address + ("&" if "?" in address else "?") + self._pin


@cases("worker death")
async def test_a_worker_is_killed(row: str, way: str, cell: str, tmp_path: Path) -> None:
    place = Place(tmp_path, way)
    with crew(tmp_path, *place.options, workers=2) as running:
        address = place.dialled(running.address)
        async with talk(address) as talking:
            os.kill(await who(talking.client), signal.SIGKILL)
            await talking.broken(cell)
            assert way.endswith("resume") == (told_of(talking) is not None)
        # A new connection is another worker's.
        async with await aqueduct.Client.connect(address, config=CONFIG) as client:
            assert await who(client)


@cases("service restart")
async def test_a_service_is_killed_and_restarted(
    row: str, way: str, cell: str, tmp_path: Path
) -> None:
    place = Place(tmp_path, way, free_port())
    with crew(tmp_path, *place.options, workers=1) as running:
        address = place.dialled(running.address)
        async with talk(address) as talking:
            worker = await who(talking.client)
            # Both die at one moment: a worker without supervisor drains, a lost one is replaced.
            running.process.send_signal(signal.SIGSTOP)
            os.kill(worker, signal.SIGKILL)
            running.process.kill()
            died = time.monotonic()
            await gone({worker})
            with crew(tmp_path, *place.options, workers=1):
                await talking.broken(cell, died)
                if way.endswith("resume"):
                    assert told_of(talking) == "the service restarted"
                async with await aqueduct.Client.connect(address, config=CONFIG) as client:
                    assert await who(client) != worker


def told_of(talking: Talk) -> str | None:
    """What a link has learned of a service that does not know it."""
    error = talking.client.connection.error
    assert error is not None
    found = re.search("the service (restarted|dropped the link)", str(error))
    return None if found is None else found[0]


# Deaths of clients

CLIENT = """
import sys

import pyarrow as pa

import aqueduct

schema = pa.schema([("n", pa.int64())])
batch = pa.record_batch({"n": [1]}, schema=schema)
with aqueduct.SyncClient(sys.argv[1]) as client:
    for _ in client.exchange("hold", [batch], schema=schema, headers={"hold": "all"}):
        pass
"""


@pytest.fixture(scope="module")
def witness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Witness]:
    folder = tmp_path_factory.mktemp("witness")
    found = Witness(*(address_of(way, folder, keep=f"{KEEP:g}s") for way in WAYS), idle=IDLE)
    yield found
    found.close()


@cases("client death")
def test_a_client_is_killed(row: str, way: str, cell: str, witness: Witness) -> None:
    witness.forget()
    address = witness.addresses[WAYS.index(way)]
    with subprocess.Popen([sys.executable, "-c", CLIENT, address], cwd=ROOT) as client:
        try:
            witness.wait("holding")
        finally:
            client.kill()
            killed = time.monotonic()
    (cancelled,) = witness.wait("cancelled")
    least, most = {
        "cancelled at once": (0.0, KEEP * 0.9),
        "cancelled after `Timing.idle_timeout`": (IDLE / 2, IDLE + SLACK),
        "cancelled after `?resume=`": (KEEP * 0.9, KEEP + SLACK),
    }[cell]
    assert least <= cancelled["at"] - killed < most
