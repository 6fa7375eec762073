"""A network that fails when it is told to: each order, over byte streams and over QUIC."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import aqueduct
from aqueduct import errors
from aqueduct.address import Address
from aqueduct.config import Config, Timing
from aqueduct.reactivesocket import connect
from aqueduct.testing import FaultyNetwork
from aqueduct.testing.stream_relay import StreamRelay
from tests.service.reactive_clients import asked, rows_of
from tests.support.calls import NUMBERS, TLS, numbers, served, until

QUICK = Config(timing=Timing(idle_timeout=1.0, ping_interval=0.3, connect_timeout=20))
KINDS = ("tcp", "tls", "unix", "quic")


def echoing() -> aqueduct.Service:
    service = aqueduct.Service("echo", config=QUICK)

    @service.handler(input=NUMBERS)
    async def echo(batch):
        return batch

    return service


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory):
    """One service at an address of each kind, on a loop of its own."""
    folder = tempfile.mkdtemp(prefix="aq-")
    listen = (
        "aqueduct+tcp://127.0.0.1:0",
        "aqueduct+tls://127.0.0.1:0",
        f"aqueduct+unix://{folder}/s",
        "aqueduct://127.0.0.1:0",
        "reactivesocket+tcp://127.0.0.1:0",
    )
    found: list[str] = []
    begun, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with echoing().serving(*listen, tls=TLS, drain=0) as running:
            found.extend(running.addresses)
            begun.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert begun.wait(20)
    yield dict(zip((*KINDS, "reactive"), found, strict=True))
    over.set()
    thread.join(20)
    os.rmdir(folder)


@asynccontextmanager
async def through(network: FaultyNetwork) -> AsyncIterator[aqueduct.Client]:
    async with await aqueduct.Client.connect(network.address, config=QUICK) as client:
        yield client


ROWS = numbers(*range(200_000))


@pytest.mark.parametrize("kind", KINDS)
async def test_all_passes_and_a_cut_ends_what_there_is(addresses, kind: str) -> None:
    async with FaultyNetwork(addresses[kind]) as network:
        async with through(network) as client:
            assert await client.call("echo", ROWS) == ROWS
            # The last bytes may be read before they are counted.
            await until(lambda: min(network.passed.values()) >= ROWS.nbytes)
            network.cut()
            with pytest.raises(errors.ConnectionLost):
                await client.call("echo", ROWS)
        async with through(network) as client:
            assert await client.call("echo", numbers(1)) == numbers(1)
        assert (network.connections, network.cuts) == (2, 1)


@pytest.mark.parametrize("kind", ["tcp", "quic"])
async def test_a_cut_comes_after_so_many_bytes_and_so_often(addresses, kind: str) -> None:
    async with FaultyNetwork(addresses[kind]) as network:
        network.cut(after="300k", times=2)
        for _ in range(2):
            async with through(network) as client:
                with pytest.raises(errors.ConnectionLost):
                    await client.call("echo", ROWS)
        assert network.cuts == 2
        if kind == "tcp":
            assert max(network.passed.values()) == 2 * (300 << 10)  # to the byte
        async with through(network) as client:  # that was all
            assert await client.call("echo", ROWS) == ROWS
            network.cut(after="300k")
            network.resume()
            assert await client.call("echo", ROWS) == ROWS
        assert network.cuts == 2


@pytest.mark.parametrize("kind", ["tcp", "quic"])
async def test_another_order_leaves_a_cut_where_it_is(addresses, kind: str) -> None:
    some = numbers(*range(25_000))
    async with FaultyNetwork(addresses[kind]) as network, through(network) as client:
        network.cut(after="300k")
        assert await client.call("echo", some) == some
        network.slow(latency=0.001)
        with pytest.raises(errors.ConnectionLost):
            await client.call("echo", some)
        assert network.cuts == 1


def unreachable() -> tuple[socket.socket, socket.socket]:
    """A server whose queue is full, so that connections to it take their time."""
    server = socket.create_server(("127.0.0.1", 0), backlog=0)
    return server, socket.create_connection(server.getsockname())


def test_a_cut_reaches_connections_that_are_being_made() -> None:
    server, first = unreachable()
    with server, first, FaultyNetwork(f"aqueduct+tcp://127.0.0.1:{server.getsockname()[1]}") as it:
        port = Address.parse(it.address).port
        with socket.create_connection(("127.0.0.1", port)) as client:
            it.cut()
            client.settimeout(20)
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        assert (it.connections, it.cuts) == (1, 1)


async def test_a_cut_reaches_connections_that_do_not_reach_the_server() -> None:
    server, first = unreachable()
    relay = StreamRelay()
    with server, first:
        place: Any = relay.start(server.getsockname())
        with socket.create_connection(place) as client:
            await until(lambda: relay.joining == 1)
            assert (relay.cut(), relay.cut_early, relay.links) == (1, 1, [])
            await until(lambda: not relay.joining)
            client.settimeout(20)
            with pytest.raises(ConnectionResetError):
                await asyncio.to_thread(client.recv, 1)
        relay.close()


@pytest.mark.parametrize("kind", ["tcp", "quic"])
@pytest.mark.parametrize("way", ["both", "up", "down"])
async def test_what_is_stalled_goes_on_later(addresses, kind: str, way) -> None:
    async with FaultyNetwork(addresses[kind]) as network, through(network) as client:
        assert await client.call("echo", numbers(1)) == numbers(1)
        network.stall(way)
        before = network.passed
        call = asyncio.ensure_future(client.call("echo", numbers(2)))
        done, _ = await asyncio.wait((call,), timeout=0.1)
        assert not done
        if way != "down":
            assert network.passed["up"] == before["up"]
        network.resume()
        assert await call == numbers(2)


async def test_a_stall_reaches_deadlines_and_new_connections(addresses) -> None:
    async with FaultyNetwork(addresses["tcp"]) as network:
        async with through(network) as client:
            network.stall()
            with pytest.raises(errors.DeadlineExceeded):
                await client.call("echo", numbers(1), deadline="50ms")
            connecting = asyncio.ensure_future(aqueduct.Client.connect(network.address))
            await until(lambda: network.connections == 2)
            await asyncio.sleep(0)
            assert not connecting.done()
            network.resume()
            await (await connecting).close()


@pytest.mark.parametrize("kind", ["tcp", "quic"])
async def test_what_is_slow_takes_its_time(addresses, kind: str) -> None:
    loop = asyncio.get_running_loop()
    async with FaultyNetwork(addresses[kind]) as network, through(network) as client:
        network.slow(latency="50ms")
        assert await client.ping() >= 0.1  # there and back; no less is possible
        network.slow("1m")
        began = loop.time()
        some = numbers(*range(30_000))
        assert await client.call("echo", some) == some
        assert loop.time() - began >= some.nbytes / (1 << 20) * 0.9
        network.resume()
        assert await client.call("echo", numbers(1)) == numbers(1)


async def test_what_quic_loses_is_sent_again(addresses) -> None:
    async with FaultyNetwork(addresses["quic"]) as network, through(network) as client:
        network.lose(0.2, seed=7)
        some = numbers(*range(10_000))
        assert await client.call("echo", some) == some
        lost = network.lost
        assert lost > 0
        network.lose(0)
        assert await client.call("echo", numbers(1)) == numbers(1)
        assert network.lost == lost


def test_threads_give_orders_too(addresses) -> None:
    with FaultyNetwork(addresses["tls"]) as network:
        with aqueduct.SyncClient(network.address, config=QUICK) as client:
            assert client.call("echo", numbers(1)) == numbers(1)
            timer = threading.Timer(0.05, network.cut)
            network.stall()
            timer.start()
            with pytest.raises(errors.ConnectionLost):
                client.call("echo", numbers(1))
            timer.join()


async def test_a_client_of_reactivesocket_passes(addresses) -> None:
    async with FaultyNetwork(addresses["reactive"]) as network:
        async with await connect(network.address) as client:
            item = await client.request(asked("echo", numbers(5)))
            assert rows_of(item.data) == [[5]]


def test_the_address_keeps_what_the_service_s_has(tmp_path: Path) -> None:
    def leads(address: str) -> str:
        with FaultyNetwork(address) as network:
            scheme, _, rest = network.address.partition("://127.0.0.1:")
            return scheme + rest.lstrip("0123456789")

    assert leads("aqueduct+tls://scores.example:4433?compression=lz4") == (
        "aqueduct+tls?compression=lz4&server_name=scores.example"
    )
    pinned = f"fingerprint=sha256:{64 * '0'}"
    assert leads(f"aqueduct://localhost?{pinned}") == f"aqueduct?{pinned}"
    assert leads("aqueduct+tcp://127.0.0.1:1?resume=60s") == "aqueduct+tcp?resume=60s"
    assert leads(f"aqueduct+unix://{tmp_path}/s?mode=0660") == "aqueduct+tcp"
    assert leads("reactivesocket+ws://127.0.0.1:1/path") == "reactivesocket+ws/path"


async def test_a_service_that_is_not_there() -> None:
    async with FaultyNetwork("aqueduct+tcp://127.0.0.1:1") as network:
        with pytest.raises(errors.ConnectFailed):
            await aqueduct.Client.connect(network.address, config=QUICK)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("memory://words", "serve at aqueduct\\+tcp://127.0.0.1:0, and give FaultyNetwork the"),
        ("aqueduct+tcp://127.0.0.1:0", "has no port yet; give the address that serving.addresses"),
        ("nowhere", "is not an address"),
        (5, "FaultyNetwork: address is 5"),
    ],
)
def test_an_address_without_a_network_is_refused(address, text: str) -> None:
    with pytest.raises(errors.ConfigError, match=text):
        FaultyNetwork(address)


def test_wrong_orders_are_refused() -> None:
    network = FaultyNetwork("aqueduct+tcp://127.0.0.1:1")
    for order in (network.cut, network.resume, network.stall, lambda: network.address):
        with pytest.raises(errors.LocalProtocolError, match="use it in a block"):
            order()
    with network:
        with pytest.raises(errors.LocalProtocolError, match="is in use by a block"):
            network.__enter__()
        with pytest.raises(errors.ConfigError, match=r"no loss of a byte stream.*take slow"):
            network.lose(0.1)
        with pytest.raises(errors.ConfigError, match="way is 'left'; it must be both, up or"):
            network.stall("left")  # type: ignore[arg-type]
        with pytest.raises(errors.ConfigError, match="give bytes_per_second, latency, or both"):
            network.slow()
        with pytest.raises(errors.ConfigError, match="cut: after is 'much'"):
            network.cut(after="much")
        with pytest.raises(errors.ConfigError, match="cut: times is 0"):
            network.cut(after=1, times=0)
        with pytest.raises(errors.ConfigError, match="slow: latency is 'late'"):
            network.slow(latency="late")
    with pytest.raises(errors.LocalProtocolError, match="use it in a block"):
        network.__exit__()
    with FaultyNetwork("aqueduct://127.0.0.1:1") as quic:
        for fraction in (-0.1, 1.5, "half", True):
            with pytest.raises(errors.ConfigError, match="it must be a number from 0 to 1"):
                quic.lose(fraction)  # type: ignore[arg-type]


def test_a_program_s_own_retry_is_seen_to_work() -> None:
    """What the page shows: a client that connects again."""
    with served(echoing(), "tcp") as address, FaultyNetwork(address) as network:

        def ask(tries: int) -> object:
            for _ in range(tries):
                with aqueduct.SyncClient(network.address) as client:
                    try:
                        return client.call("echo", numbers(1))
                    except errors.ConnectionLost:
                        time.sleep(0)
            return None

        network.cut(after=200, times=2)
        assert ask(3) == numbers(1)
        assert (network.cuts, network.connections) == (2, 3)
