"""Connecting over byte streams: every way it can fail, and the words that say so."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from aqueduct.address import Address
from aqueduct.carriers import stream
from aqueduct.carriers.certificates import ClientTls
from aqueduct.carriers.stream.sockets import tune
from aqueduct.config import DEFAULT, ByteStream, Config
from aqueduct.errors import ConfigError, ConnectFailed
from tests.carriers.users import DEADLINE, OVER, TLS, Recorder, record, stream_pair, timing

Start = Callable[..., Awaitable[stream.StreamListener]]
QUICK = timing(connect_timeout=0.5)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Listeners whose carriers are taken; all is over at the end."""
    listeners: list[stream.StreamListener] = []
    carriers: list[Any] = []

    async def listen(text: str, **more: Any) -> stream.StreamListener:
        def took(carrier: Any) -> None:
            carriers.append(carrier)
            record(carrier)

        listener = await stream.listen(
            Address.parse(text), more.get("config", DEFAULT), more.get("tls", TLS), took
        )
        listeners.append(listener)
        return listener

    yield listen
    for carrier in carriers:
        carrier.abandon(OVER)
    for listener in listeners:
        listener.close()
        await asyncio.wait_for(listener.wait_closed(), DEADLINE)


async def refusal(text: str, config: Config = DEFAULT, tls: ClientTls | None = None) -> str:
    """The words of a connection that does not come up."""
    address = Address.parse(text)
    with pytest.raises(ConnectFailed) as caught:
        await stream.connect(address, config, tls)
    assert str(caught.value).startswith(str(address))
    assert caught.value.reason
    return str(caught.value)


async def connected(text: str, config: Config = DEFAULT) -> str:
    """Connects, and ends it; the peer's address."""
    carrier = await stream.connect(Address.parse(text), config)
    user = Recorder(carrier, DEFAULT)
    await user.until(lambda: user.begun)
    carrier.close(0, "")
    await user.until(lambda: user.lost)
    return carrier.peer


# TCP


async def test_a_name_that_does_not_resolve() -> None:
    text = await refusal("aqueduct+tcp://no-such-host.invalid:4433")
    assert "'no-such-host.invalid' does not resolve" in text


async def test_a_name_that_cannot_be_one() -> None:
    text = await refusal(f"aqueduct+tcp://{'x' * 70}.test:4433")
    assert "is no name of a host" in text or "does not resolve" in text


async def test_port_0_is_none_to_connect_to() -> None:
    text = await refusal("aqueduct+tcp://127.0.0.1:0")
    assert "no server listens at port 0" in text


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_nobody_listens(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host.strip("[]"), 0))
        port = probe.getsockname()[1]
    text = await refusal(f"aqueduct+tcp://{host}:{port}")
    assert f"{host}:{port}: connection refused" in text
    assert "is the server started" in text


async def test_a_server_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        text = await refusal(f"aqueduct+tcp://127.0.0.1:{port}", QUICK)
        assert "was reached, but the first credit of bpmux did not come within 0.5 s" in text
        text = await refusal(f"aqueduct+tls://127.0.0.1:{port}?verify=off", QUICK)
        assert "was reached, but the handshake of TLS did not come within 0.5 s" in text


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``names(place, ...)``: what every name resolves to from now on."""

    def resolve(*places: str) -> None:
        async def found(host: str, port: int, **_: Any) -> list[Any]:
            return [
                (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (place, port, 0, 0))
                if ":" in place
                else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, port))
                for place in places
            ]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)

    return resolve


async def test_the_next_address_is_tried_when_one_refuses(
    start: Start, names: Callable[..., None]
) -> None:
    listener = await start("aqueduct+tcp://127.0.0.2:0")
    port = Address.parse(listener.addresses[0]).port
    names("::1", "127.0.0.1", "127.0.0.2")
    assert await connected(f"aqueduct+tcp://many.test:{port}") == f"127.0.0.2:{port}"


async def test_each_address_that_fails_is_named(names: Callable[..., None]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names("127.0.0.1", "::1", "127.0.0.3")
    text = await refusal(f"aqueduct+tcp://many.test:{port}")
    for place in ("127.0.0.1", "[::1]", "127.0.0.3"):
        assert f"{place}:{port}: connection refused" in text


@pytest.fixture
def full() -> Iterator[int]:
    """A port of 127.0.0.9 where connections are neither taken nor refused.

    At 127.0.0.1 a listener of the test may have it, and nobody else.
    """
    with ExitStack() as stack:
        kept, silent, first, second = (stack.enter_context(socket.socket()) for _ in range(4))
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        silent.bind(("127.0.0.9", kept.getsockname()[1]))
        silent.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        yield silent.getsockname()[1]


async def test_an_address_that_does_not_answer_is_joined_by_the_next(
    full: int, start: Start, names: Callable[..., None]
) -> None:
    await start(f"aqueduct+tcp://127.0.0.1:{full}")
    names("127.0.0.9", "127.0.0.1")
    assert await connected(f"aqueduct+tcp://two.test:{full}") == f"127.0.0.1:{full}"


async def test_addresses_that_do_not_answer_are_named(
    full: int, names: Callable[..., None]
) -> None:
    names("127.0.0.9", "127.0.0.1")
    text = await refusal(f"aqueduct+tcp://two.test:{full}", QUICK)
    assert f"127.0.0.9:{full}: nothing answers TCP within 0.5 s" in text
    assert f"127.0.0.1:{full}: connection refused" in text


async def test_what_every_connection_has(start: Start) -> None:
    config = Config(byte_stream=ByteStream(keepalive=7, notsent_lowat=100_000))
    for host in ("127.0.0.1", "[::1]"):
        listener = await start(f"aqueduct+tcp://{host}:0", config=config)
        carrier = await stream.connect(Address.parse(listener.addresses[0]), config)
        sock = carrier._sock
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 7
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 100_000
        assert carrier.peer == f"{host}:{Address.parse(listener.addresses[0]).port}"
        assert (carrier.peer_credentials, carrier.peer_identity) == (None, None)
        carrier.abandon(OVER)
    plain = Config(byte_stream=ByteStream(keepalive=0))
    carrier = await stream.connect(Address.parse(listener.addresses[0]), plain)
    assert not carrier._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    carrier.abandon(OVER)


def congestion_of(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()


congestion_settable = pytest.mark.skipif(
    not hasattr(socket, "TCP_CONGESTION"),
    reason="this system lets no socket choose its congestion control",
)


@pytest.fixture
def system_congestion() -> str:
    """What a connection has of which nobody says anything."""
    with socket.socket() as sock:
        return congestion_of(sock)


@congestion_settable
@pytest.mark.parametrize(
    ("at", "to"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("[::1]", "[::1]"),
        ("[::]", "127.0.0.1"),
        ("[::]", "127.0.0.2"),
    ],
)
async def test_nothing_paces_what_stays_on_the_machine(start: Start, at: str, to: str) -> None:
    listener = await start(f"aqueduct+tcp://{at}:0")
    port = Address.parse(listener.addresses[0]).port
    carrier = await stream.connect(Address.parse(f"aqueduct+tcp://{to}:{port}"), DEFAULT)
    await Recorder(carrier, DEFAULT).until(lambda: len(listener._carriers) == 1)
    (other,) = listener._carriers
    assert [congestion_of(end._sock) for end in (carrier, other)] == ["reno", "reno"]
    carrier.abandon(OVER)


@congestion_settable
async def test_the_congestion_control_may_be_left_to_the_system(
    start: Start, system_congestion: str
) -> None:
    config = Config(byte_stream=ByteStream(loopback_congestion=""))
    listener = await start("aqueduct+tcp://127.0.0.1:0", config=config)
    carrier = await stream.connect(Address.parse(listener.addresses[0]), config)
    assert congestion_of(carrier._sock) == system_congestion
    carrier.abandon(OVER)


@congestion_settable
async def test_a_congestion_control_that_is_not_there_is_said_once(
    start: Start, system_congestion: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await start("aqueduct+tcp://127.0.0.1:0")
    config = Config(byte_stream=ByteStream(loopback_congestion="nothing-at-all"))
    for _ in range(2):
        carrier = await stream.connect(Address.parse(listener.addresses[0]), config)
        assert congestion_of(carrier._sock) == system_congestion
        carrier.abandon(OVER)
    (text,) = [one.message for one in caplog.records if "congestion" in one.message]
    assert "ByteStream.loopback_congestion is 'nothing-at-all'" in text


@congestion_settable
def test_a_connection_that_was_reset_before_it_was_looked_at_is_none_of_its_business() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock, _ = server.accept()
        with sock:
            with pytest.raises(OSError, match="not connected"):
                sock.getpeername()
            tune(sock, DEFAULT)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


class Elsewhere(socket.socket):
    """A socket whose peer is called as one of another machine."""

    def getpeername(self) -> tuple[str, int]:
        return "192.0.2.7", super().getpeername()[1]


@congestion_settable
def test_another_machine_is_reached_as_the_system_has_it(system_congestion: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Elsewhere() as sock:
        sock.connect(server.getsockname())
        tune(sock, DEFAULT)
        assert congestion_of(sock) == system_congestion
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_tls_settings_are_not_ignored_where_there_is_no_tls(tmp_path: Path) -> None:
    for text in ("aqueduct+tcp://localhost:1", f"aqueduct+unix://{tmp_path}/x"):
        with pytest.raises(ConfigError, match="there is no TLS on this carrier"):
            await stream.connect(Address.parse(text), DEFAULT, ClientTls())


async def test_a_connect_that_is_cancelled_leaves_nothing(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        address = Address.parse(f"aqueduct+tcp://127.0.0.1:{silent.getsockname()[1]}")
        task = asyncio.ensure_future(stream.connect(address, DEFAULT))
        sock, _ = await asyncio.get_running_loop().sock_accept(silent)
        with sock:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(DEADLINE):
                while await asyncio.get_running_loop().sock_recv(sock, 4096):
                    pass


# Unix sockets


async def test_a_peer_that_resets_as_soon_as_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is dead before anything is asked of it: closed, and said in words."""
    page = sys.modules[stream.connect.__module__]
    dial = page._dial
    dialled: list[socket.socket] = []

    async def dial_and_wait(*arguments: Any) -> socket.socket:
        sock: socket.socket = await dial(*arguments)
        dialled.append(sock)
        peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1), DEADLINE)
        return sock

    monkeypatch.setattr(page, "_dial", dial_and_wait)
    with socket.create_server(("127.0.0.1", 0)) as server:
        await refusal(f"aqueduct+tcp://127.0.0.1:{server.getsockname()[1]}")
    assert [sock.fileno() for sock in dialled] == [-1]


async def test_who_is_at_the_other_end(tmp_path: Path) -> None:
    async with stream_pair("unix") as (client, server, _):
        for carrier in (client, server):
            found = carrier.peer_credentials
            assert found is not None
            assert (found.pid, found.uid, found.gid) == (os.getpid(), os.geteuid(), os.getegid())
            assert (carrier.peer_identity, carrier.peer_certificate_fingerprint) == (None, None)
        assert client.peer == server.local
        assert client.peer.endswith("/socket")
        assert server.peer == client.local == f"process {os.getpid()}"


async def test_the_buffer_of_a_unix_socket_is_as_configured_on_both_ends() -> None:
    config = Config(byte_stream=ByteStream(unix_buffer=50_000))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        usual = other.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 50_000)
        wanted = other.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert wanted != usual
    async with stream_pair("unix", config) as (client, server, _):
        for carrier in (client, server):
            assert carrier._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == wanted


async def test_no_file(tmp_path: Path) -> None:
    text = await refusal(f"aqueduct+unix://{tmp_path}/none")
    assert f"there is no socket file '{tmp_path}/none'; is the server started" in text


async def test_a_file_that_nobody_listens_at(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/stale")
    text = await refusal(f"aqueduct+unix://{tmp_path}/stale")
    assert "no server listens" in text and "is gone" in text


async def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = await refusal(f"aqueduct+unix://{tmp_path}/file/socket")
    assert "is no directory" in text


async def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    long = Address.parse(f"aqueduct+unix://{tmp_path}/{'x' * 120}")
    with pytest.raises(ConfigError, match=r"the path has \d+ bytes; this system allows 10[37]"):
        await stream.connect(long, DEFAULT)
    with pytest.raises(ConfigError, match="take a shorter one"):
        await stream.listen(long, DEFAULT, None, lambda carrier: None)


async def test_a_backlog_that_stays_full(tmp_path: Path) -> None:
    path = f"{tmp_path}/full"
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as filler:
        silent.bind(path)
        silent.listen(0)
        filler.connect(path)
        text = await refusal(f"aqueduct+unix://{path}", QUICK)
    assert "its backlog is full" in text


async def test_a_backlog_that_has_room_again(tmp_path: Path) -> None:
    path = f"{tmp_path}/full"
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as filler:
        listening.bind(path)
        listening.listen(0)
        filler.connect(path)
        task = loop.create_task(stream.connect(Address.parse(f"aqueduct+unix://{path}"), DEFAULT))
        await asyncio.sleep(0.05)
        assert not task.done()
        listening.setblocking(False)
        taken = [await loop.sock_accept(listening)]
        async with asyncio.timeout(DEADLINE):
            taken.append(await loop.sock_accept(listening))
            greeting = await loop.sock_recv(taken[1][0], 100)
        assert greeting[:2] == b"\xa8\0"
        for sock, _ in taken:
            sock.close()
        with pytest.raises(ConnectFailed, match="closed the connection without a word"):
            await task
