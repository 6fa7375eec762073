"""Calls over links whose connections are cut: they go on, and nothing comes twice."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest

import aqueduct
from aqueduct.carriers.certificates import dev_certificate
from aqueduct.carriers.stream import dialling
from aqueduct.carriers.stream.link import opening
from aqueduct.carriers.stream.tls import ALPN, LINK_ALPN
from aqueduct.config import Config, Relink, Timing
from aqueduct.endpoint import Connection
from aqueduct.endpoint.accounts import process
from aqueduct.errors import ConnectFailed, ConnectionLost
from aqueduct.protocol.relink.handshake import ConnectorHandshake, Opening
from aqueduct.service.server import RunningService
from tests.support.proxy import CuttingProxy, Way

SCHEMA = pa.schema([("n", pa.int64())])


def batch(number: int, rows: int = 10) -> pa.RecordBatch:
    return pa.record_batch({"n": [number] * rows}, schema=SCHEMA)


def service_of(seen: list[int] | None = None, config: Config | None = None) -> aqueduct.Service:
    """``count`` yields each batch it gets, and notes it; ``once`` answers one."""
    service = aqueduct.Service("resumes", config=config or Config())

    @service.handler("count", output=SCHEMA)
    async def count(batches: AsyncIterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
        async for each in batches:
            if seen is not None:
                seen.append(each.column(0)[0].as_py())
            yield each

    @service.handler
    def once(batch: pa.RecordBatch) -> pa.RecordBatch:
        if seen is not None:
            seen.append(batch.column(0)[0].as_py())
        return batch

    return service


def serving(
    service: aqueduct.Service, scheme: str, resume: str = "60s"
) -> AbstractAsyncContextManager[RunningService]:
    query = f"?resume={resume}" if resume else ""
    return service.serving(
        f"aqueduct+{scheme}://127.0.0.1:0{query}",
        dev_certificate=scheme == "tls",
        drain=0,
    )


def link_of(client: aqueduct.Client) -> dict[str, object]:
    """What the snapshot says of the link."""
    found = client.connection.snapshot().transport["link"]
    assert isinstance(found, dict)
    return found


async def exchanged(client: aqueduct.Client, numbers: range, rows: int = 10) -> list[int]:
    """What an exchange of these answers."""
    batches = [batch(number, rows) for number in numbers]
    stream = client.exchange("count", batches, schema=SCHEMA)
    return [each.column(0)[0].as_py() async for each in stream]


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
async def test_an_exchange_goes_on_over_cuts(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    async with (
        serving(service_of(seen), scheme) as running,
        CuttingProxy(running.addresses[0]) as proxy,
        await aqueduct.Client.connect(proxy.address) as client,
    ):

        async def batches() -> AsyncIterator[pa.RecordBatch]:
            for number in range(40):
                if number % 10 == 5:
                    assert proxy.cut() == 1
                yield batch(number, 20_000)
                await asyncio.sleep(0.005)

        stream = client.exchange("count", batches(), schema=SCHEMA)
        got = [each async for each in stream]
        assert got == [batch(number, 20_000) for number in range(40)]
        assert seen == list(range(40))
        link = link_of(client)
        assert link["state"] == "up"
        assert link["resumes"] == 4
        assert proxy.connections == 5
        assert client.connection.carrier.resumes == running.counters()["resumes"] == 4
    assert [entry for entry in caplog.records if entry.levelno >= logging.ERROR] == []


@pytest.mark.requirement("RL-R17")
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has none")
async def test_the_kernel_gives_up_a_connection_of_a_link_in_time() -> None:
    def limit(connection: Connection) -> int:
        sock = connection.carrier._sock  # type: ignore[attr-defined]
        found: int = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        return found

    config = Config(relink=Relink(ack_deadline=1.25))
    async with (
        serving(service_of(config=config), "tcp") as running,
        CuttingProxy(running.addresses[0]) as proxy,
        await aqueduct.Client.connect(proxy.address, config=config) as client,
    ):
        for _ in range(2):  # the second connection of the link has it, too
            await client.call("once", batch(1))
            assert limit(client.connection) == limit(running.connections[0]) == 1250
            proxy.cut()
        plain = running.addresses[0].partition("?")[0]
        async with await aqueduct.Client.connect(plain, config=config) as other:
            assert limit(other.connection) == 0


async def conversation(client: aqueduct.Client, seen: list[int]) -> None:
    """A call and an exchange, which the handlers see once."""
    seen.clear()
    assert await client.call("once", batch(7)) == batch(7)
    assert await exchanged(client, range(3)) == [0, 1, 2]
    assert seen == [7, 0, 1, 2]


async def measured(scheme: str) -> dict[Way, int]:
    """How many bytes a connection and a conversation have each way."""
    seen: list[int] = []
    async with (
        serving(service_of(seen), scheme) as running,
        CuttingProxy(running.addresses[0]) as proxy,
        await aqueduct.Client.connect(proxy.address) as client,
    ):
        before = dict(proxy.passed)
        await conversation(client, seen)
        await asyncio.sleep(0.05)
        return {
            "up": proxy.passed["up"] - before["up"],
            "down": proxy.passed["down"] - before["down"],
        }


async def cut_everywhere(scheme: str, cuts: list[tuple[Way, int, int | None]]) -> None:
    """Cuts a conversation at each of these: way, bytes, and bytes after the resume.

    Most of the time goes into pauses before redials, so several services are cut at once.
    """
    at_once = 8
    async with asyncio.TaskGroup() as group:
        for number in range(at_once):
            group.create_task(cut_in_turn(scheme, cuts[number::at_once]))


async def cut_in_turn(scheme: str, cuts: list[tuple[Way, int, int | None]]) -> None:
    """The same for one service and one conversation at a time."""
    seen: list[int] = []
    service = service_of(seen)
    async with (
        serving(service, scheme, "5s") as running,
        CuttingProxy(running.addresses[0]) as proxy,
    ):
        for way, at, again in cuts:
            async with await aqueduct.Client.connect(proxy.address) as client:
                proxy.cut_at(way, at)
                if again is not None:
                    connections = proxy.connections
                    task = asyncio.ensure_future(conversation(client, seen))
                    while proxy.connections == connections and not task.done():  # noqa: ASYNC110
                        await asyncio.sleep(0)
                    proxy.cut_at(way, again)
                    await task
                else:
                    await conversation(client, seen)
                proxy.forget_cuts()
        # A client whose last words were cut off has gone, and its link waits for it in vain.
        for _ in range(200):
            if not service.counters()["open_connections"]:
                break
            await asyncio.sleep(0.05)
        assert not service.counters()["open_connections"]


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
async def test_a_conversation_is_cut_at_some_bytes(scheme: str) -> None:
    sizes = await measured(scheme)
    chance = random.Random(11)
    ways: tuple[Way, Way] = ("up", "down")
    cuts = [
        (way, chance.randrange(sizes[way]), chance.choice((None, 1, 8, 64)))
        for way in ways
        for _ in range(25)
    ]
    await cut_everywhere(scheme, cuts)


@pytest.mark.long
@pytest.mark.parametrize("again", [None, 1, 8, 64])
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("scheme", ["tcp", "tls"])
async def test_a_conversation_is_cut_at_every_byte(
    scheme: str, way: Way, again: int | None
) -> None:
    sizes = await measured(scheme)
    step = 1 if scheme == "tcp" else 16
    await cut_everywhere(scheme, [(way, at, again) for at in range(0, sizes[way], step)])


async def test_a_service_that_has_restarted_is_said_to() -> None:
    first = serving(service_of(), "tcp")
    async with CuttingProxy("aqueduct+tcp://127.0.0.1:1?resume=60s") as proxy:
        running = await first.__aenter__()
        proxy.lead_to(running.addresses[0])
        client = await aqueduct.Client.connect(proxy.address)
        assert await client.call("once", batch(1)) == batch(1)
        async with serving(service_of(), "tcp") as other:
            proxy.lead_to(other.addresses[0])
            proxy.cut()
            with pytest.raises(ConnectionLost, match="the service restarted"):
                await client.call("once", batch(2))
        await client.close()
        await first.__aexit__(None, None, None)


async def test_a_connection_that_does_not_come_back_is_lost_after_its_time() -> None:
    async with serving(service_of(), "tcp", "60s") as running:
        address = running.addresses[0].replace("60s", "300ms")
        async with CuttingProxy(address) as proxy:
            client = await aqueduct.Client.connect(proxy.address)
            await client.call("once", batch(1))
            proxy.refuse = True
            proxy.cut()
            with pytest.raises(ConnectionLost, match=r"no connection for 0\.3 s"):
                await client.call("once", batch(2))
            await client.close()


async def test_a_service_drops_a_link_after_its_time() -> None:
    async with serving(service_of(), "tcp", "300ms") as running:
        address = running.addresses[0].replace("300ms", "60s")
        async with CuttingProxy(address) as proxy:
            client = await aqueduct.Client.connect(proxy.address)
            await client.call("once", batch(1))
            proxy.refuse = True
            proxy.cut()
            await asyncio.sleep(0.6)
            proxy.refuse = False
            with pytest.raises(ConnectionLost, match="dropped the link"):
                await client.call("once", batch(2))
            await client.close()


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
async def test_a_server_without_links_is_dialled_plainly(
    scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(service_of(), scheme, "") as running:
        plain = running.addresses[0]
        address = plain + ("&" if "?" in plain else "?") + "resume=60s"
        for _ in range(2):
            async with await aqueduct.Client.connect(address) as client:
                assert await client.call("once", batch(1)) == batch(1)
                assert "link" not in client.connection.snapshot().transport
        assert caplog.text.count("cannot resume connections") == 1
        with pytest.raises(ConnectFailed, match="cannot resume"):
            await aqueduct.Client.connect(address.replace("60s", "require"))


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
async def test_a_client_without_links_connects_to_a_service_that_has_them(scheme: str) -> None:
    async with serving(service_of(), scheme) as running:
        address = running.addresses[0].replace("resume=60s", "").replace("?&", "?").rstrip("?")
        async with await aqueduct.Client.connect(address) as client:
            assert await client.call("once", batch(1)) == batch(1)


async def test_a_server_that_has_links_now_is_asked_again_over_tls() -> None:
    """Only over TCP a plain server is remembered: TLS agrees on the protocol by itself."""
    async with (
        serving(service_of(), "tls", "") as plain,
        serving(service_of(), "tls") as links,
        CuttingProxy(plain.addresses[0].partition("?")[0] + "?verify=off&resume=60s") as proxy,
    ):
        async with await aqueduct.Client.connect(proxy.address) as client:
            assert await client.call("once", batch(1)) == batch(1)
        proxy.lead_to(links.addresses[0].partition("?")[0] + "?verify=off&resume=60s")
        async with await aqueduct.Client.connect(proxy.address) as client:
            assert await client.call("once", batch(2)) == batch(2)
            assert link_of(client)["state"] == "up"


async def test_a_server_that_was_away_is_asked_for_a_link_again() -> None:
    async with serving(service_of(), "tcp") as running, CuttingProxy(running.addresses[0]) as proxy:
        proxy.refuse = True
        with pytest.raises(ConnectFailed):
            await aqueduct.Client.connect(proxy.address)
        proxy.refuse = False
        async with await aqueduct.Client.connect(proxy.address) as client:
            assert link_of(client)["state"] == "up"


async def test_a_connection_that_ends_before_a_hello_makes_no_client_plain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A proxy that is rolled, and a worker that ends, close connections just so."""
    async with serving(service_of(), "tcp") as running, CuttingProxy(running.addresses[0]) as proxy:
        proxy.refusals = 1
        async with await aqueduct.Client.connect(proxy.address) as client:
            assert link_of(client)["state"] == "up"
    assert "cannot resume" not in caplog.text


def unreadable_certificate() -> bytes:
    """A PEM of a key, and of a certificate that OpenSSL takes and ``cryptography`` refuses."""
    shown = dev_certificate()
    assert isinstance(shown.certificate, bytes)
    assert isinstance(shown.key, bytes)
    der = bytearray(ssl.PEM_cert_to_DER_cert(shown.certificate.decode()))
    version = der.index(b"\xa0\x03\x02\x01\x02") + 4
    der[version] = 3  # version 4, which there is not
    return shown.key + ssl.DER_cert_to_PEM_cert(bytes(der)).encode()


@asynccontextmanager
async def unreadable_server(folder: Path) -> AsyncIterator[str]:
    """The address of a server over TLS with such a certificate."""
    path = folder / "shown.pem"
    path.write_bytes(unreadable_certificate())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    context.set_alpn_protocols([ALPN, LINK_ALPN])
    server = await asyncio.start_server(hold_on, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"aqueduct+tls://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def hold_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        await reader.read()
    writer.close()


@pytest.mark.parametrize("query", ["?verify=off", "?verify=off&resume=60s"])
async def test_a_certificate_that_cannot_be_read_is_said_to_be(tmp_path: Path, query: str) -> None:
    async with unreadable_server(tmp_path) as address:
        with pytest.raises(ConnectFailed, match="the peer's certificate cannot be read"):
            await aqueduct.Client.connect(address + query)


async def test_a_redial_that_meets_such_a_certificate_is_made_again(tmp_path: Path) -> None:
    async with (
        serving(service_of(), "tls") as running,
        unreadable_server(tmp_path) as unreadable,
        CuttingProxy(running.addresses[0]) as proxy,
    ):
        async with await aqueduct.Client.connect(proxy.address) as client:
            proxy.lead_to(unreadable)
            proxy.cut()
            call = asyncio.ensure_future(client.call("once", batch(1)))
            async with asyncio.timeout(30):
                while proxy.connections < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                proxy.lead_to(running.addresses[0])
                assert await call == batch(1)


async def test_a_fault_in_a_redial_ends_that_attempt_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(service_of(), "tcp") as running, CuttingProxy(running.addresses[0]) as proxy:
        async with await aqueduct.Client.connect(proxy.address) as client:
            faults = iter([RuntimeError("can't start new thread")])

            def faulty(epoch: int, link: int) -> Opening:
                for fault in faults:
                    raise fault
                return opening(epoch, link)

            monkeypatch.setattr(dialling, "opening", faulty)
            proxy.cut()
            async with asyncio.timeout(30):
                assert await client.call("once", batch(1)) == batch(1)
    assert caplog.text.count("a fault while dialling") == 1


@pytest.mark.parametrize("end", ["resumed", "lost"])
async def test_what_a_link_keeps_counts_for_the_process_until_it_is_acknowledged(end: str) -> None:
    sending, seen = process().sending, list[int]()
    async with (
        serving(service_of(seen), "tcp") as running,
        CuttingProxy(running.addresses[0]) as proxy,
    ):
        address = proxy.address.replace("60s", "60s" if end == "resumed" else "300ms")
        async with await aqueduct.Client.connect(address) as client:
            await until(lambda: not sending.used)
            proxy.silent = {"down"}
            call = asyncio.ensure_future(client.call("once", batch(1, 5000)))
            await until(lambda: seen == [1])  # all of it has left, and no acknowledgement came
            await until(lambda: sending.used >= 80_000)  # the service keeps its answer, too
            assert sending.used <= 90_000
            proxy.silent = set()
            proxy.refuse = end == "lost"
            proxy.cut()
            if end == "lost":
                with pytest.raises(ConnectionLost):
                    await call
            else:
                assert await call == batch(1, 5000)
                await until(lambda: not sending.used)
    await until(lambda: not sending.used)


async def test_links_of_all_addresses_without_a_connection_are_bounded_together() -> None:
    config = Config(relink=Relink(kept_links=1))
    places = ["aqueduct+tcp://127.0.0.1:0?resume=60s"] * 2
    async with (
        service_of(config=config).serving(*places, drain=0) as running,
        CuttingProxy(running.addresses[0]) as first,
        CuttingProxy(running.addresses[1]) as second,
        await aqueduct.Client.connect(first.address) as one,
        await aqueduct.Client.connect(second.address) as other,
    ):
        for proxy in (first, second):
            proxy.refuse = True
            proxy.cut()
            await until(lambda: any(each.carrier.suspended for each in running.connections))
        await until(lambda: len(running.connections) == 1)
        first.refuse = second.refuse = False
        with pytest.raises(ConnectionLost, match="dropped the link"):
            await one.call("once", batch(1))
        assert await other.call("once", batch(2)) == batch(2)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110  # of what no event tells
            await asyncio.sleep(0.01)


async def test_a_client_over_tls_knows_whose_certificate_it_is() -> None:
    async with serving(service_of(), "tls") as running:
        address = running.addresses[0]
        async with await aqueduct.Client.connect(address) as client:
            fingerprint = client.connection.fingerprint
            assert fingerprint is not None
            assert fingerprint in address


async def test_peers_that_reset_behind_their_opening_leave_nothing() -> None:
    service = service_of()
    async with serving(service, "tcp") as running:
        where = aqueduct.address.Address.parse(running.addresses[0])
        first = ConnectorHandshake(opening()).first_flight
        for _ in range(20):
            sock = socket.create_connection((where.host, where.port))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(first)
            sock.close()
        async with await aqueduct.Client.connect(running.addresses[0]) as client:
            assert await client.call("once", batch(1)) == batch(1)
    # Serving has ended: it waits for all connections, half-open ones too.


async def test_a_silent_connection_is_given_up_and_made_again() -> None:
    config = Config(relink=Relink(ack_deadline=0.4, handshake_deadline=0.5))
    async with (
        serving(service_of(), "tcp") as running,
        CuttingProxy(running.addresses[0]) as proxy,
        await aqueduct.Client.connect(proxy.address, config=config) as client,
    ):
        await client.call("once", batch(1))
        proxy.silent = {"up", "down"}
        asyncio.get_running_loop().call_later(0.6, proxy.silent.clear)
        assert await client.call("once", batch(2)) == batch(2)
        assert proxy.connections >= 2


async def test_the_progress_deadline_stops_while_there_is_no_connection() -> None:
    config = Config(timing=Timing(progress_deadline=0.3))
    async with (
        serving(service_of(config=config), "tcp") as running,
        CuttingProxy(running.addresses[0]) as proxy,
        await aqueduct.Client.connect(proxy.address, config=config) as client,
    ):
        await client.call("once", batch(1))
        proxy.refuse = True
        proxy.cut()
        call = asyncio.ensure_future(client.call("once", batch(2)))
        await asyncio.sleep(1.0)
        assert link_of(client)["state"] == "resuming"
        assert not call.done()
        proxy.refuse = False
        assert await call == batch(2)


async def test_a_link_that_is_resumed_all_the_time_waits_between_two() -> None:
    """Each resume costs work: they have a rate, and the link goes on all the same."""
    config = Config(relink=Relink(resumes=5))
    async with (
        serving(service_of(config=config), "tcp") as running,
        CuttingProxy(running.addresses[0]) as proxy,
        await aqueduct.Client.connect(proxy.address) as client,
    ):
        for number in range(12):
            assert await client.call("once", batch(number)) == batch(number)
            proxy.cut()
            await asyncio.sleep(0.01)
        assert await client.call("once", batch(12)) == batch(12)
        assert link_of(client)["resumes"] == 12


async def test_ten_clients_are_cut_again_and_again() -> None:
    seen: list[int] = []
    async with (
        serving(service_of(seen), "tcp") as running,
        CuttingProxy(running.addresses[0]) as proxy,
    ):
        clients = [await aqueduct.Client.connect(proxy.address) for _ in range(10)]

        async def cut() -> None:
            for _ in itertools.count():
                await asyncio.sleep(0.05)
                proxy.cut()

        cutting = asyncio.ensure_future(cut())
        for turn in range(5):
            found = await asyncio.gather(
                *(exchanged(client, range(turn, turn + 20), 5000) for client in clients)
            )
            assert found == [list(range(turn, turn + 20))] * 10
        cutting.cancel()
        for client in clients:
            await client.close()
