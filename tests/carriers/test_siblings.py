"""Links over processes that share an address: a redial that reaches another one is handed over.

Here the processes are services of one event loop, each with an address of its own, so that a test
can say which one a client reaches. ``tests/service/test_resume_workers.py`` has real ones.
"""

from __future__ import annotations

import array
import asyncio
import itertools
import json
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.address import Address
from aqueduct.carriers.contract import Bound, Siblings
from aqueduct.carriers.stream import StreamListener, bind
from aqueduct.carriers.stream.link import opening
from aqueduct.carriers.stream.siblings import _received
from aqueduct.config import Config, Relink, Resume
from aqueduct.errors import ConfigError, ConnectionLost
from aqueduct.protocol.relink.handshake import ConnectorHandshake, encode_reply
from aqueduct.service.server import RunningService
from tests.carriers.test_resume import SCHEMA, batch, link_of, service_of, until
from tests.support.proxy import CuttingProxy

EPOCH = 1_700_000_000_000_000
PATIENCE = 30.0
both = pytest.mark.parametrize("scheme", ["tcp", "tls"])


class Crew:
    """Services that are siblings, and a proxy before the one that ``reach`` says."""

    def __init__(self, services: list[RunningService], seen: list[list[int]]) -> None:
        self.services = services
        self.seen = seen
        """What the handlers of each have seen."""
        self.paths: tuple[str, ...] = ()
        self.proxy = CuttingProxy(services[0].addresses[0])

    def reach(self, number: int) -> None:
        """New connections reach this one."""
        self.proxy.lead_to(self.services[number].addresses[0])

    def listener(self, number: int) -> StreamListener:
        server = self.services[number]._server
        assert server is not None
        (listener,) = server._listeners
        assert isinstance(listener, StreamListener)
        return listener

    def relays(self) -> list[int]:
        """How many connections each one relays."""
        doors = [self.listener(number)._door for number in range(len(self.services))]
        return [0 if door is None else door.relays for door in doors]

    def links(self) -> list[int]:
        """How many links each one has."""
        return [len(self.listener(number)._known) for number in range(len(self.services))]


@asynccontextmanager
async def crew(
    folder: Path, scheme: str, count: int = 3, *, resume: str = "60s", config: Config | None = None
) -> AsyncIterator[Crew]:
    paths = tuple(str(folder / f"0-{number}") for number in range(count))
    services, seen = [], []
    async with AsyncExitStack() as stack:
        for number in range(count):
            seen.append(list[int]())
            (bound,) = await bind(Address.parse(f"aqueduct+{scheme}://127.0.0.1:0?resume={resume}"))
            bound = replace(bound, siblings=Siblings(number, paths, EPOCH))
            service = service_of(seen[number], config)
            services.append(await stack.enter_async_context(serving(service, scheme, bound)))
        running = Crew(services, seen)
        running.paths = paths
        await stack.enter_async_context(running.proxy)
        yield running


def serving(service: aqueduct.Service, scheme: str, bound: Bound):
    return service.serving(bound, dev_certificate=scheme == "tls", drain=0)


@asynccontextmanager
async def client_of(running: Crew, config: Config | None = None) -> AsyncIterator[aqueduct.Client]:
    """A client whose certificates are those of any of the siblings."""
    address = Address.parse(running.proxy.address)
    if address.scheme == "aqueduct+tls":  # each has a certificate of its own here
        options = {**address.options, "verify": "off"}
        options.pop("fingerprint")
        address = replace(address, options=options)
    client = await aqueduct.Client.connect(str(address), config=config or Config())
    try:
        yield client
    finally:
        await client.close()


@both
async def test_an_exchange_goes_on_whichever_sibling_a_redial_reaches(
    tmp_path: Path, scheme: str
) -> None:
    async with crew(tmp_path, scheme) as running, client_of(running) as client:
        reached = itertools.cycle((1, 2, 0, 0, 2))

        async def batches() -> AsyncIterator[pa.RecordBatch]:
            for number in range(60):
                if number % 10 == 5:
                    running.reach(next(reached))
                    assert running.proxy.cut() == 1
                yield batch(number, 20_000)
                await asyncio.sleep(0.005)

        got = [each async for each in client.exchange("count", batches(), schema=SCHEMA)]
        assert got == [batch(number, 20_000) for number in range(60)]
        assert running.seen == [list(range(60)), [], []]
        assert link_of(client)["resumes"] == 6
        # The last one has reached sibling 1.
        await until(lambda: running.relays() == ([0, 1, 0] if scheme == "tls" else [0, 0, 0]))
        (connection,) = running.services[0].connections
        transport = connection.snapshot().transport
        assert isinstance(transport["link"], dict)
        assert transport["link"]["relayed"] == (scheme == "tls")
        assert ("cipher" in transport) == (scheme == "tls")
        assert connection.peer.startswith("127.0.0.1:")
    assert os.listdir(tmp_path) == []


@both
async def test_a_link_is_unknown_once_its_process_has_gone(tmp_path: Path, scheme: str) -> None:
    async with crew(tmp_path, scheme) as running, client_of(running) as client:
        await client.call("once", batch(1))
        running.reach(1)
        running.listener(0)._door.close()  # type: ignore[union-attr]
        assert sorted(os.listdir(tmp_path)) == ["0-1", "0-2"]
        running.proxy.cut()
        with pytest.raises(ConnectionLost, match="the service dropped the link"):
            await client.call("once", batch(2))
        assert running.seen == [[1], [], []]


@both
async def test_a_socket_that_a_dead_process_left_is_that_of_nobody(
    tmp_path: Path, scheme: str
) -> None:
    async with crew(tmp_path, scheme) as running, client_of(running) as client:
        await client.call("once", batch(1))
        running.reach(1)
        running.listener(0)._door.close()  # type: ignore[union-attr]
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(running.paths[0])
        running.proxy.cut()
        with pytest.raises(ConnectionLost, match="the service dropped the link"):
            await client.call("once", batch(2))
        # A process that takes its place takes its path, too.
        await asyncio.sleep(0)
        (bound,) = await bind(Address.parse(f"aqueduct+{scheme}://127.0.0.1:0?resume=60s"))
        bound = replace(bound, siblings=Siblings(0, running.paths, EPOCH))
        async with serving(service_of(), scheme, bound) as replaced:
            running.proxy.lead_to(replaced.addresses[0])
            async with client_of(running) as other:
                running.reach(2)
                running.proxy.cut()
                assert await other.call("once", batch(3)) == batch(3)


async def test_a_link_that_was_dropped_is_unknown_to_its_own_process(tmp_path: Path) -> None:
    async with crew(tmp_path, "tcp", resume="300ms") as running:
        running.proxy._address = replace(running.proxy._address, options={"resume": "60s"})
        async with client_of(running) as client:
            await client.call("once", batch(1))
            running.proxy.refuse = True
            running.proxy.cut()
            await until(lambda: running.links() == [0, 0, 0])
            running.reach(1)
            running.proxy.refuse = False
            with pytest.raises(ConnectionLost, match="the service dropped the link"):
                await client.call("once", batch(2))


async def test_a_sibling_that_does_not_answer_is_tried_again(tmp_path: Path) -> None:
    """It is there, and so are its links: its event loop may only be busy."""
    config = Config(relink=Relink(handshake_deadline=0.3))
    async with crew(tmp_path, "tcp") as running, client_of(running, config) as client:
        await client.call("once", batch(1))
        running.reach(1)
        door = running.listener(0)._door
        assert door is not None
        door._rest()  # what comes waits in the kernel
        running.proxy.cut()
        call = asyncio.ensure_future(client.call("once", batch(2)))
        await until(lambda: running.proxy.connections >= 3)
        assert not call.done()
        door._accept_more()
        assert await call == batch(2)
        assert running.seen[0] == [1, 2]


@both
async def test_an_attempt_that_its_client_has_given_up_takes_no_link(
    tmp_path: Path, scheme: str
) -> None:
    """It comes late to the process of the link, which its client has reached otherwise."""
    config = Config(relink=Relink(handshake_deadline=0.5))
    async with crew(tmp_path, scheme) as running, client_of(running, config) as client:
        running.reach(1)
        door = running.listener(0)._door
        assert door is not None
        door._rest()  # what comes waits in the kernel
        running.proxy.cut()
        await until(lambda: running.proxy.connections >= 3)
        running.reach(0)
        await until(lambda: link_of(client)["state"] == "up")
        connections = running.proxy.connections
        door._accept_more()
        await until(lambda: not door._arriving)
        await until(lambda: running.relays() == [0, 0, 0])
        assert await client.call("once", batch(1)) == batch(1)
        assert link_of(client)["resumes"] == 1
        assert running.proxy.connections == connections


async def test_a_process_without_descriptors_says_so() -> None:
    there, here = socket.socketpair(socket.AF_UNIX)
    here.setblocking(False)
    used, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with there, here, socket.socket() as given:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [given.fileno()]))
        there.sendmsg([bytes(8)], [rights])
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(OSError, match="no file descriptor left"):
                await _received(here, [])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))


async def test_a_client_comes_again_while_all_relays_are_taken(tmp_path: Path) -> None:
    config = Config(resume=Resume(relays=1))
    async with (
        crew(tmp_path, "tls", config=config) as running,
        client_of(running) as first,
        client_of(running) as second,
    ):
        running.reach(1)
        running.proxy.cut()
        await until(lambda: running.relays() == [0, 1, 0])
        clients = (first, second)
        # The relay begins before its client hears of it.
        await until(lambda: any(link_of(client)["state"] == "up" for client in clients))
        (waiting,) = [client for client in clients if link_of(client)["state"] == "resuming"]
        running.reach(2)
        assert await waiting.call("once", batch(1)) == batch(1)
        assert running.relays() == [0, 1, 1]


@pytest.mark.parametrize("end", ["client", "link", "relay"])
async def test_a_relay_ends_with_either_side(tmp_path: Path, end: str) -> None:
    async with crew(tmp_path, "tls") as running, client_of(running) as client:
        running.reach(1)
        running.proxy.cut()
        await until(lambda: running.relays() == [0, 1, 0])
        assert await client.call("once", batch(1)) == batch(1)
        if end == "client":
            await client.close()
            await until(lambda: running.links() == [0, 0, 0])
        elif end == "link":
            running.services[0].connections[0].close_soon(7, "enough")
            with pytest.raises(ConnectionLost, match="enough"):
                await client.call("once", batch(2))
        else:
            running.reach(0)
            running.listener(1).end_relays()
            assert await client.call("once", batch(3)) == batch(3)
        await until(lambda: running.relays() == [0, 0, 0])


async def test_a_drain_waits_for_calls_whose_bytes_pass_through(tmp_path: Path) -> None:
    async with crew(tmp_path, "tls", 2) as running, client_of(running) as client:
        running.reach(1)
        running.proxy.cut()
        await until(lambda: running.relays() == [0, 1])
        go_on = asyncio.Event()

        async def batches() -> AsyncIterator[pa.RecordBatch]:
            yield batch(1)
            await go_on.wait()
            yield batch(2)

        stream = client.exchange("count", batches(), schema=SCHEMA)
        assert await anext(stream) == batch(1)
        ending = [
            asyncio.ensure_future(service.close(drain=PATIENCE)) for service in running.services
        ]
        await asyncio.sleep(0.2)
        assert not any(each.done() for each in ending)
        go_on.set()
        assert [each async for each in stream] == [batch(2)]
        await asyncio.gather(*ending)
        assert client.connection.closed


async def test_a_sibling_that_is_drained_alone_lets_its_relays_go(tmp_path: Path) -> None:
    async with crew(tmp_path, "tls") as running, client_of(running) as client:
        running.reach(1)
        running.proxy.cut()
        await until(lambda: running.relays() == [0, 1, 0])
        # The relay begins before its client hears of it.
        await until(lambda: link_of(client)["resumes"] == 1)
        running.reach(2)
        await running.services[1].close(drain=PATIENCE, alone=True)
        assert await client.call("once", batch(1)) == batch(1)
        assert link_of(client)["resumes"] == 2


def record(
    known: object, data: bytes = b"", *, known_size: int | None = None, data_size: int = 0
) -> bytes:
    text = json.dumps(known).encode()
    known_size = len(text) if known_size is None else known_size
    return struct.pack("=II", known_size, data_size or len(data)) + text + data


KNOWN = {"scheme": "aqueduct+tcp", "fingerprint": None, "local": "here", "peer": "there"}
USELESS = {
    "nothing": b"",
    "a part": record(KNOWN, b"abc")[:20],
    "too much": record(KNOWN, data_size=1 << 30),
    "too much known": record(KNOWN, known_size=1 << 20),
    "no JSON": struct.pack("=II", 3, 0) + b"{]}",
    "other fields": record({"colour": "red"}),
    "a list": record([]),
    "no hello": record(KNOWN, b"GET / HTTP/1.1\r\n\r\n" * 9),
    "a hello alone": record(KNOWN, bytes(8)),
    "no socket": record(KNOWN | {"relayed": False}, bytes(8)),
}


@pytest.mark.parametrize("what", USELESS)
async def test_what_no_sibling_sends_ends_that_connection_alone(tmp_path: Path, what: str) -> None:
    config = Config(resume=Resume(hand_over=0.3))
    async with crew(tmp_path, "tcp", 2, config=config) as running, client_of(running) as client:
        loop = asyncio.get_running_loop()
        for passed in (False, True):
            mine, theirs = socket.socketpair()
            with socket.socket(socket.AF_UNIX) as sock, mine:
                sock.connect(running.paths[0])
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))
                if USELESS[what]:
                    sock.sendmsg([USELESS[what]], [rights] if passed else [])
                theirs.close()
                if what in ("nothing", "no hello"):  # it is waited for no more than a while
                    pass
                else:
                    sock.shutdown(socket.SHUT_WR)
                for each in (sock, mine) if passed and USELESS[what] else (sock,):
                    each.setblocking(False)
                    with suppress(ConnectionResetError):
                        async with asyncio.timeout(PATIENCE):
                            assert set(await loop.sock_recv(each, 100)) <= {0}
        assert not running.listener(0)._door._arriving  # type: ignore[union-attr]
        running.reach(1)
        running.proxy.cut()
        assert await client.call("once", batch(2)) == batch(2)


async def test_a_path_where_no_socket_can_be_says_so(tmp_path: Path) -> None:
    (bound,) = await bind(Address.parse("aqueduct+tcp://127.0.0.1:0?resume=60s"))
    bound = replace(bound, siblings=Siblings(0, (str(tmp_path / "none" / "0"),), EPOCH))
    with pytest.raises(ConfigError, match="cannot be listened at"):
        async with serving(service_of(), "tcp", bound):
            pass
    bound.close()


@pytest.mark.requirement("RL-R18")
@pytest.mark.parametrize(
    ("scheme", "fingerprint", "known"),
    [
        ("aqueduct+tls", None, True),
        ("aqueduct+tls", "sha256:" + "0" * 64, False),
        ("aqueduct+tcp", None, False),
    ],
)
async def test_a_link_is_given_to_who_has_proved_what_its_client_had(
    tmp_path: Path, scheme: str, fingerprint: str | None, known: bool
) -> None:
    """Also if another process has seen the proof."""
    async with crew(tmp_path, "tls", 2) as running, client_of(running) as client:
        await client.call("once", batch(1))
        (link,) = running.listener(0)._known.values()
        data = ConnectorHandshake(opening(EPOCH, link.identifier)).first_flight
        given = {"scheme": scheme, "fingerprint": fingerprint, "local": "a", "peer": "b"}
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(running.paths[0])
            sock.send(record(given | {"relayed": True}, data))
            sock.setblocking(False)
            async with asyncio.timeout(PATIENCE):
                answer = await asyncio.get_running_loop().sock_recv(sock, 100)
        if known:
            assert answer[:24] == bytes(8) + encode_reply(EPOCH, link.identifier)
        else:
            assert answer in (bytes(8) + encode_reply(EPOCH, 0), bytes(8))
        assert await client.call("once", batch(2)) == batch(2)  # it has come back, or never left


@pytest.mark.requirement("RL-R18")
async def test_guesses_at_links_of_another_process_are_slowed_there_and_cost_nothing(
    tmp_path: Path,
) -> None:
    config = Config(relink=Relink(unknown_links=3))
    async with crew(tmp_path, "tcp", config=config) as running, client_of(running) as client:
        await client.call("once", batch(1))
        running.reach(1)
        address = Address.parse(running.proxy.address)
        answers = []
        for guess in range(1, 13):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(ConnectorHandshake(opening(EPOCH, guess)).first_flight)
            async with asyncio.timeout(PATIENCE):
                answers.append(await reader.read())
            writer.close()
        assert answers[:3] == [bytes(8) + encode_reply(EPOCH, 0)] * 3
        assert answers.count(bytes(8)) >= 5
        assert running.links() == [1, 0, 0]
        assert not running.listener(1).connections
        running.proxy.cut()
        assert await client.call("once", batch(2)) == batch(2)
