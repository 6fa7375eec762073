"""Peers that connect and then say nothing keep nobody out, over any carrier."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aioquic._buffer import Buffer
from aioquic.quic.packet import QuicPacketType, pull_quic_header

from aqueduct.address import Address
from aqueduct.carriers import stream
from aqueduct.carriers.certificates import ClientTls
from aqueduct.carriers.quic import dev_certificate
from aqueduct.carriers.quic.packets import FastConnection
from aqueduct.carriers.quic.tls import client_configuration
from aqueduct.config import DEFAULT, Config
from aqueduct.endpoint import Connection, Server, connect, serve
from aqueduct.errors import ConnectionLost
from tests.carriers.chunks import Kind, chunk
from tests.carriers.users import DEADLINE, OVER, Recorder, met

TLS = dev_certificate()
CARRIERS = ("tcp", "tls", "unix", "quic")
LONG = 600.0
"""Seconds that handshakes may take here: no place comes free because time is over."""


def settings(half_open: int, **limits: Any) -> Config:
    return dataclasses.replace(
        DEFAULT,
        timing=dataclasses.replace(DEFAULT.timing, connect_timeout=LONG),
        byte_stream=dataclasses.replace(DEFAULT.byte_stream, half_open=half_open),
        quic=dataclasses.replace(DEFAULT.quic, half_open=half_open),
        limits=dataclasses.replace(DEFAULT.limits, **limits),
    )


@asynccontextmanager
async def listening(kind: str, folder: Path, config: Config) -> AsyncIterator[tuple[Server, str]]:
    address = {"unix": f"aqueduct+unix://{folder}/s", "quic": "aqueduct://127.0.0.1:0"}.get(
        kind, f"aqueduct+{kind}://127.0.0.1:0"
    )
    tls = TLS if kind in ("tls", "quic") else None
    async with await serve(lambda _: None, address, config=config, tls=tls) as server:
        yield server, server.addresses[0]


def dial(address: Address) -> socket.socket:
    """A socket that does not wait; its connection is made by the kernel."""
    if address.scheme == "aqueduct":
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    else:
        family = socket.AF_UNIX if address.path else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(address.path or (address.host, address.port))
    except BlockingIOError:
        pass
    return sock


def hello(address: Address) -> FastConnection:
    """A QUIC connection whose first packet is ready to leave."""
    made = FastConnection(
        client_configuration(address, DEFAULT, ClientTls(verify=False)),
        streams=16,
        initial_window=1000,
    )
    made.connect((address.host, address.port), now=asyncio.get_running_loop().time())
    return made


def client_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    out = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost").do_handshake()
    return out.read()


def long_message() -> bytes:
    """A message of bpmux that is not over soon; no credit comes, which would end the handshake."""
    return chunk(Kind.IN_SINK, 0, b"\1" * 10_000)


class Crowd:
    """Peers that stop in the middle of a handshake, or never come to its end."""

    def __init__(self, address: str) -> None:
        self.address = Address.parse(address)
        self.sockets: list[socket.socket] = []
        self._dribblers: list[asyncio.Task[None]] = []

    async def join(self, how: str) -> None:
        """``nothing``: they connect; ``half``: a part of what a client says first."""
        sock = dial(self.address)
        self.sockets.append(sock)
        if self.address.scheme == "aqueduct":
            await self._begin_quic(sock)
        elif how == "half":
            await asyncio.get_running_loop().sock_sendall(sock, client_hello()[:50])

    def dribble(self, count: int, every: float = 0.05) -> None:
        """So many peers send the parts of a handshake that never ends, one each ``every`` s."""
        self._dribblers += [
            asyncio.create_task(self._dribble(every * number / count, every))
            for number in range(count)
        ]

    async def _dribble(self, first: float, every: float) -> None:
        await asyncio.sleep(first)
        sock = dial(self.address)
        self.sockets.append(sock)
        loop = asyncio.get_running_loop()
        if self.address.scheme == "aqueduct":
            await self._dribble_quic(sock, every)
            return
        said = client_hello()[:-1] if self.address.scheme == "aqueduct+tls" else long_message()
        with suppress(ConnectionError):
            for byte in said:
                await loop.sock_sendall(sock, bytes([byte]))
                await asyncio.sleep(every)

    async def _dribble_quic(self, sock: socket.socket, every: float) -> None:
        """Goes on with its first packets, which are no news to the service."""
        said = await self._begin_quic(sock)
        while True:
            await asyncio.sleep(every)
            for data in said:
                sock.send(data)

    async def _begin_quic(self, sock: socket.socket) -> list[bytes]:
        """Sends a first packet, again with the token if that is asked for, and no more.

        Returns what it has sent last.
        """
        loop = asyncio.get_running_loop()
        connection = hello(self.address)
        said = [data for data, _ in connection.datagrams_to_send(loop.time())]
        for data in said:
            sock.send(data)
        with self._none_in_time():
            answer = await asyncio.wait_for(loop.sock_recv(sock, 65_536), 0.5)
            header = pull_quic_header(Buffer(data=answer), host_cid_length=8)
            if header.packet_type == QuicPacketType.RETRY:
                connection.receive_datagram(answer, sock.getpeername(), loop.time())
                said = [data for data, _ in connection.datagrams_to_send(loop.time())]
                for data in said:
                    sock.send(data)
        return said

    @contextmanager
    def _none_in_time(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            pass  # it waits for a place, as the honest ones do

    async def close(self) -> None:
        for task in self._dribblers:
            task.cancel()
        for end in await asyncio.gather(*self._dribblers, return_exceptions=True):
            assert end is None or isinstance(end, asyncio.CancelledError), end
        for sock in self.sockets:
            sock.close()


@asynccontextmanager
async def crowd_at(address: str) -> AsyncIterator[Crowd]:
    crowd = Crowd(address)
    try:
        yield crowd
    finally:
        await crowd.close()


async def all_connect(address: str, count: int, config: Config) -> None:
    """So many honest clients connect, at once."""
    async with asyncio.timeout(DEADLINE * 2):
        made = await asyncio.gather(*(connect(address, config=config) for _ in range(count)))
    await asyncio.gather(*(connection.close() for connection in made))


@pytest.mark.parametrize("kind", CARRIERS)
async def test_silent_peers_take_no_places_from_honest_ones(kind: str, tmp_path: Path) -> None:
    config = settings(16)
    async with listening(kind, tmp_path, config) as (server, address), crowd_at(address) as crowd:
        for _ in range(40):
            await crowd.join("nothing")
        (listener,) = server._listeners
        await met(lambda: listener.half_open == 16)  # type: ignore[attr-defined]
        await all_connect(address, 30, config)


@pytest.mark.long
@pytest.mark.parametrize("kind", CARRIERS)
async def test_three_hundred_honest_clients_and_six_hundred_silent_peers(
    kind: str, tmp_path: Path
) -> None:
    config = settings(DEFAULT.byte_stream.half_open)
    async with listening(kind, tmp_path, config) as (_, address), crowd_at(address) as crowd:
        for _ in range(200):
            await crowd.join("nothing")
        joining = asyncio.gather(*(crowd.join("nothing") for _ in range(400)))
        await all_connect(address, 300, config)
        await joining


@pytest.mark.parametrize("kind", CARRIERS)
async def test_peers_that_dribble_take_no_places_from_honest_ones(
    kind: str, tmp_path: Path
) -> None:
    config = settings(16)
    async with listening(kind, tmp_path, config) as (server, address), crowd_at(address) as crowd:
        crowd.dribble(40)
        (listener,) = server._listeners
        await met(lambda: listener.half_open == 16)  # type: ignore[attr-defined]
        await all_connect(address, 30, config)


@pytest.mark.long
@pytest.mark.parametrize("kind", CARRIERS)
async def test_three_hundred_honest_clients_and_six_hundred_that_dribble(
    kind: str, tmp_path: Path
) -> None:
    config = settings(DEFAULT.byte_stream.half_open)
    async with listening(kind, tmp_path, config) as (_, address), crowd_at(address) as crowd:
        crowd.dribble(600, every=0.1)
        await all_connect(address, 300, config)


@pytest.mark.parametrize("kind", CARRIERS)
async def test_peers_that_only_ping_once_the_transport_is_up_take_no_place(
    kind: str, tmp_path: Path
) -> None:
    config = settings(256, unready_connections=8)
    async with listening(kind, tmp_path, config) as (server, address):
        pinging: list[Any] = []
        for _ in range(20):
            if kind == "quic":
                from aqueduct.carriers import quic

                pinging.append(await quic.connect(Address.parse(address), config))
            else:
                pinging.append(await stream.connect(Address.parse(address), config))
            Recorder(pinging[-1], config)
        await met(lambda: server.accepted == 20)
        await all_connect(address, 10, config)
        crowd, now = len(server._unready), asyncio.get_running_loop().time

        def one_may_go() -> bool:
            for carrier in pinging:
                carrier.ping()
            return server._unready.candidate(now()) is not None

        await met(one_may_go)
        await all_connect(address, 10, config)
        await met(lambda: len(server._unready) < crowd)
        for carrier in pinging:
            carrier.abandon(OVER)


async def test_a_first_packet_of_quic_waits_for_a_place(tmp_path: Path) -> None:
    async with (
        listening("quic", tmp_path, settings(4)) as (server, address),
        crowd_at(address) as crowd,
    ):
        for _ in range(4):
            await crowd.join("nothing")
        (listener,) = server._listeners
        await met(lambda: listener.half_open == 4)  # type: ignore[attr-defined]
        await crowd.join("nothing")  # it sends each packet once
        loop = asyncio.get_running_loop()
        # Before the others are gone because of Timing.idle_timeout.
        answer = await asyncio.wait_for(loop.sock_recv(crowd.sockets[-1], 65_536), 20)
        header = pull_quic_header(Buffer(data=answer), host_cid_length=8)
        assert header.packet_type == QuicPacketType.INITIAL


async def test_a_first_packet_of_quic_sent_again_brings_back_no_closed_connection(
    tmp_path: Path,
) -> None:
    async with (
        listening("quic", tmp_path, settings(1)) as (server, address),
        crowd_at(address) as crowd,
    ):
        loop = asyncio.get_running_loop()
        sock = dial(crowd.address)
        crowd.sockets.append(sock)
        said = await crowd._begin_quic(sock)
        listener: Any = server._listeners[0]
        (first,) = listener._carriers
        await crowd.join("nothing")
        await met(lambda: first not in listener._carriers and listener.connections == 1)
        heard = set()
        with suppress(BlockingIOError):
            while True:
                heard.add(sock.recv(65_536))
        sock.send(said[0])
        async with asyncio.timeout(DEADLINE):
            assert await loop.sock_recv(sock, 65_536) in heard  # the close, once more
        assert first not in listener._carriers and not listener._waiting


async def test_first_packets_of_quic_above_the_backlog_are_dropped(tmp_path: Path) -> None:
    config = settings(1)
    config = dataclasses.replace(config, quic=dataclasses.replace(config.quic, backlog=2))
    config = dataclasses.replace(
        config, timing=dataclasses.replace(config.timing, handshake_silence=LONG)
    )
    async with listening("quic", tmp_path, config) as (server, address), crowd_at(address) as crowd:
        listener: Any = server._listeners[0]
        for _ in range(5):
            await crowd.join("nothing")
        await met(lambda: listener._delayed == 4)
        assert listener.half_open == 1 and len(listener._waiting) == 2


@pytest.mark.parametrize("kind", ["tcp", "tls"])
async def test_half_a_hello_takes_no_place_from_honest_ones(kind: str, tmp_path: Path) -> None:
    config = settings(8)
    async with listening(kind, tmp_path, config) as (_, address), crowd_at(address) as crowd:
        for _ in range(20):
            await crowd.join("half")
        await all_connect(address, 10, config)


async def test_peers_that_are_silent_once_tls_is_up_take_no_place(tmp_path: Path) -> None:
    config = settings(8)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([stream.tls.ALPN])
    async with listening("tls", tmp_path, config) as (server, address):
        where = Address.parse(address)
        (listener,) = server._listeners
        silent = [
            await asyncio.open_connection(where.host, where.port, ssl=context) for _ in range(8)
        ]
        assert listener.half_open == 8  # type: ignore[attr-defined]
        await all_connect(address, 10, config)
        for reader, writer in silent:
            writer.transport.abort()
            reader.feed_eof()


@pytest.mark.parametrize("kind", CARRIERS)
async def test_peers_that_are_silent_once_the_transport_is_up_take_no_place(
    kind: str, tmp_path: Path
) -> None:
    config = settings(256, unready_connections=8)
    async with listening(kind, tmp_path, config) as (server, address):
        silent = []
        for _ in range(20):
            if kind == "quic":
                from aqueduct.carriers import quic

                carrier: Any = await quic.connect(Address.parse(address), config)
            else:
                carrier = await stream.connect(Address.parse(address), config)
            silent.append(carrier)
        await met(lambda: server.accepted == 20)
        await all_connect(address, 10, config)
        crowd, now = len(server._unready), asyncio.get_running_loop().time
        await met(lambda: server._unready.candidate(now()) is not None)
        await all_connect(address, 10, config)
        await met(lambda: len(server._unready) < crowd)
        for carrier in silent:
            carrier.abandon(OVER)


async def test_a_slow_handshake_that_goes_on_is_kept(tmp_path: Path) -> None:
    config = settings(6)
    async with listening("tls", tmp_path, config) as (server, address), crowd_at(address) as crowd:
        (listener,) = server._listeners
        where = Address.parse(address)
        sock, said = dial(where), client_hello()
        try:
            sent = 0
            for number in range(len(said)):
                await asyncio.get_running_loop().sock_sendall(sock, said[number : number + 1])
                sent += 1
                if number % 20 == 0 and number < 500:
                    await crowd.join("nothing")
                await asyncio.sleep(0.002)  # a slow client: a byte now and then
            assert sent == len(said) and len(crowd.sockets) > 6
            async with asyncio.timeout(DEADLINE):
                answer = await asyncio.get_running_loop().sock_recv(sock, 1)
            assert answer == b"\x16"  # the server goes on with the handshake, or refuses in it
        finally:
            sock.close()
        await met(lambda: listener.half_open <= 6)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", CARRIERS)
async def test_connections_of_one_address_are_limited_if_that_is_set(
    kind: str, tmp_path: Path
) -> None:
    config = settings(256, connections_address=3)
    async with listening(kind, tmp_path, config) as (server, address):
        made = [await connect(address, config=config) for _ in range(3)]
        with pytest.raises(ConnectionLost, match=r"Limits\.connections_address") as caught:
            await connect(address, config=config)
        assert caught.value.code == 5
        await made[0].close()
        await met(lambda: len(server.connections) == 2)
        again: Connection = await connect(address, config=config)
        for connection in (*made[1:], again):
            await connection.close()
        await met(lambda: not server._by_origin)


async def test_silence_is_told_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = settings(2)
    async with listening("tls", tmp_path, config) as (_, address), crowd_at(address) as crowd:
        for _ in range(3):
            await crowd.join("half")
        await met(lambda: "all places of handshakes are taken" in caplog.text)
    assert "(ByteStream.half_open, Timing.handshake_silence)" in caplog.text
