"""WebSockets: the client and the server of another library, origins, pings, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import gc
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import connect as web_connect
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as web_serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame
from websockets.protocol import Protocol

from aqueduct.carriers import foreign
from aqueduct.endpoint.accounts import process
from aqueduct.errors import ConfigError, ConnectFailed, ConnectionLost
from aqueduct.reactivesocket import ReactiveRequest, ReactiveSocketServer, connect, serve
from aqueduct.reactivesocket.web_transport import _require_one_frame
from tests.reactivesocket.pairs import (
    BRISK,
    brisk,
    eventually,
    frame,
    frames,
    joined,
    serving,
    within,
)

PAGE = "https://example.org"
WHOLE = frames.BEGIN | frames.END


def message(kind: int, stream: int = 0, data: bytes = b"", **rest: Any) -> bytes:
    """A frame without its length."""
    return frame(kind, stream, data, **rest)[4:]


SETUP = message(frames.SETUP)


def url(server: ReactiveSocketServer) -> str:
    where = server.address
    return f"ws://{where.host}:{where.port}{where.path}"


async def answer(web: Any) -> tuple[int, int, bytes]:
    """The next frame: type, stream, data."""
    data = await within(web.recv())
    assert isinstance(data, bytes)
    return int.from_bytes(data[2:4], "big"), int.from_bytes(data[4:12], "big"), data[12:]


async def test_a_client_of_another_library_asks() -> None:
    async with serving("ws") as server, web_connect(url(server)) as web:
        assert not web.protocol.extensions  # it offers to compress, and that is not taken
        await web.send(SETUP)
        await web.send(message(frames.REQUEST_RESPONSE, 1, b"echo hello"))
        assert await answer(web) == (frames.RESPONSE, 1, b"hello")
        await web.send(message(frames.REQUEST_STREAM, 3, b"count 5", n=2))
        assert await answer(web) == (frames.RESPONSE, 3, b"0")
        assert await answer(web) == (frames.RESPONSE, 3, b"1")
        await web.send(message(frames.REQUEST_N, 3, n=10))
        found = [await answer(web) for _ in range(4)]
        assert [data for _, _, data in found] == [b"2", b"3", b"4", b""]


@pytest.mark.parametrize("looked_at", [True, False], ids=["in time", "too late"])
async def test_the_first_message_is_small(
    looked_at: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Later ones are not, also behind it in the same bytes; and if the library is another one."""
    if not looked_at:
        usual = Protocol.recv_frame

        def recv_frame(self: Protocol, frame: Frame, more: None = None) -> None:
            usual(self, frame)

        monkeypatch.setattr(Protocol, "recv_frame", recv_frame)
        monkeypatch.setattr(foreign, "_told", set())
    _require_one_frame.cache_clear()
    request = message(frames.REQUEST_RESPONSE, 1, b"echo " + bytes(3000))
    config = brisk(setup_bytes=1000)
    async with serving("ws", config=config) as server:
        async with web_connect(url(server)) as web:
            await web.send([SETUP[:5], SETUP[5:]])
            await web.send(request)
            assert await answer(web) == (frames.RESPONSE, 1, bytes(3000))
        for large in (request, [request[:600], request[600:1200], request[1200:]]):
            async with web_connect(url(server)) as web:
                with suppress(ConnectionClosed):
                    await web.send(large)
                    await web.send(SETUP)
                with pytest.raises(ConnectionClosed) as closed:
                    while True:
                        await within(web.recv())
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009
            assert looked_at or "ReactiveSocket.setup_bytes" in closed.value.rcvd.reason
    assert ("recv_frame takes frame, more: a first message" in caplog.text) is not looked_at
    _require_one_frame.cache_clear()


async def test_our_client_asks_a_server_of_another_library() -> None:
    async def play(web: ServerConnection) -> None:
        assert await web.recv() == message(frames.SETUP, data=b"hi")
        request = await web.recv()
        assert request == message(frames.REQUEST_RESPONSE, 1, b"x")
        # In fragments of a message, with a ping between them.
        whole = message(frames.RESPONSE, 1, b"well", flags=WHOLE | frames.COMPLETE)
        await (await web.ping())
        await web.send([whole[:5], whole[5:13], whole[13:]])
        await web.close(1000, "enough of it")

    async with web_serve(play, "127.0.0.1", 0) as web:
        port = next(iter(web.sockets)).getsockname()[1]
        where = f"reactivesocket+ws://127.0.0.1:{port}/some/where"
        async with await connect(where, setup=b"hi") as client:
            assert (await within(client.request(b"x"))).data == b"well"
            await within(client.wait_closed())
            with pytest.raises(ConnectionLost, match="closed the connection: enough of it"):
                await client.request(b"y")


@pytest.mark.parametrize("given", [PAGE, PAGE.upper(), f"{PAGE}:443"])
async def test_web_pages_connect_where_their_origin_is_known(given: str) -> None:
    async with serving("ws", origins=[given]) as server:
        where = server.address
        async with await connect(where, origin=PAGE) as client:
            assert (await within(client.request(b"echo x"))).data == b"x"
        async with await connect(where) as client:  # a program, which says no origin
            assert (await within(client.request(b"echo x"))).data == b"x"
        for origin in ("https://example.com", "null", PAGE + "/x"):
            with pytest.raises(ConnectFailed, match=r"the server answers HTTP 403: .*Origin"):
                await connect(where, origin=origin)
            with pytest.raises(InvalidStatus, match="403"):
                await web_connect(url(server), origin=origin)  # type: ignore[arg-type]
        await eventually(lambda: not server.handshakes)
    async with serving("ws") as server:
        with pytest.raises(ConnectFailed, match="the server answers HTTP 403"):
            await connect(server.address, origin=PAGE)
        assert not server.connections


async def test_only_its_path_is_served() -> None:
    async with await serve(None, "reactivesocket+ws://127.0.0.1:0/live", config=BRISK) as server:
        assert server.address.path == "/live"
        async with await connect(server.address):
            pass
        other = f"reactivesocket+ws://127.0.0.1:{server.address.port}/else"
        with pytest.raises(ConnectFailed, match="HTTP 404: nothing is served at /else here"):
            await connect(other)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 426"),
        (b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 4"),
        (b"GET / HTTP/1.1\r\n" + b"x" * 100_000, b"HTTP/1.1 431"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b""),
        (bytes(100_000), b"HTTP/1.1 4"),
        (b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 4000 + b"\r\n", b""),
        (b"GET / HTTP/1.1\r\n" + (b"x: " + b"y" * 4000 + b"\r\n") * 20, b"HTTP/1.1 431"),
    ],
)
async def test_other_requests_get_an_answer_of_http(said: bytes, status: bytes) -> None:
    async with serving("ws") as server:
        reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
        writer.write(said)
        if status:
            assert (await within(reader.read())).startswith(status)
        writer.transport.abort()
        await eventually(lambda: not server.handshakes)


@pytest.mark.parametrize(
    ("said", "code", "text"),
    [
        ("text", 1002, "a text message: frames of ReactiveSocket are binary messages"),
        (b"short", 1002, "a frame of version 115"),
        (message(0, 1), 1002, "type"),
        (bytes(3000), 1009, "ReactiveSocket.frame_bytes"),
        (message(frames.SETUP, 1), 1002, "SETUP"),
    ],
)
async def test_a_violation_closes_with_its_reason(said: str | bytes, code: int, text: str) -> None:
    async with (
        serving("ws", config=brisk(frame_bytes=2048)) as server,
        web_connect(url(server)) as web,
    ):
        await web.send(SETUP)
        await eventually(lambda: server.connections)
        (connection,) = server.connections
        await web.send(said)
        errors = []
        with pytest.raises(ConnectionClosed) as found:
            while True:
                kind, stream, data = await answer(web)
                assert (kind, stream) == (frames.ERROR, 0)
                errors.append(data.decode())
        assert found.value.rcvd is not None
        assert found.value.rcvd.code == code
        if code == 1002:
            assert len(errors) == 1
            assert errors[0].startswith("INVALID: ")
            assert text in errors[0]
            assert found.value.rcvd.reason[:40] in errors[0]
        await within(connection.wait_closed())
        assert text in str(connection.error)


async def test_a_stranger_gets_little_memory() -> None:
    gc.collect()  # what earlier tests left counts until it is collected
    before = process().receiving.used
    async with serving("ws") as server:
        for size in (70_000, 16 << 20):
            writer = await hand_made(server)
            writer.write(bytes((0x82, 0xFF)) + size.to_bytes(8, "big") + bytes(4))
            with suppress(ConnectionError):
                for _ in range(0, size, 1 << 16):
                    writer.write(bytes(1 << 16))
                    await writer.drain()
            await eventually(lambda: not server.handshakes)
            assert process().receiving.used == before
            assert not server.connections
            writer.transport.abort()


async def test_fragments_of_messages() -> None:
    async with serving("ws") as server, web_connect(url(server)) as web:
        await web.send([SETUP[:1], SETUP[1:]])
        whole = message(frames.REQUEST_RESPONSE, 1, b"echo " + b"x" * 3000)
        await web.send([whole[at : at + 1] for at in range(len(whole))])
        assert await answer(web) == (frames.RESPONSE, 1, b"x" * 3000)


async def test_fragments_without_end_are_cut_off() -> None:
    receiving = process().receiving
    gc.collect()  # what earlier tests left counts until it is collected
    before = receiving.used

    more = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        for number in range(1000):
            if number == 90:
                await more.wait()
            yield bytes(1000)

    async with (
        serving("ws", config=brisk(frame_bytes=100_000)) as server,
        web_connect(url(server)) as web,
    ):
        await web.send(SETUP)
        await eventually(lambda: server.connections)
        (connection,) = server.connections
        sending = asyncio.ensure_future(web.send(endless()))
        await eventually(lambda: receiving.used - before > 80_000)
        more.set()
        with suppress(ConnectionClosed):
            await within(sending)
        await within(connection.wait_closed())
        assert "ReactiveSocket.frame_bytes" in str(connection.error)
    assert receiving.used == before


async def test_pings_both_ways() -> None:
    """A silent client is pinged and answers; its own pings are answered."""
    async with (
        serving("ws", config=brisk(ping=0.1)) as server,
        web_connect(url(server), ping_interval=None) as web,
    ):
        await web.send(SETUP)
        await asyncio.sleep(0.6)
        assert server.connections
        await asyncio.wait_for(await web.ping(), 30)
        await web.send(message(frames.REQUEST_RESPONSE, 1, b"echo x"))
        assert (await answer(web))[2] == b"x"
    config = brisk(ping=0.1)
    async with joined("ws", config=config) as pair:
        await asyncio.sleep(0.6)
        assert not pair.client.closed
        assert (await within(pair.client.request(b"echo x"))).data == b"x"


def upgrade(path: str = "/") -> bytes:
    key = base64.b64encode(os.urandom(16))
    return (
        (
            f"GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
        ).encode()
        + key
        + b"\r\n\r\n"
    )


def masked(data: bytes, opcode: int = 2) -> bytes:
    """A message of a client as it is on the wire."""
    size = len(data)
    if size < 126:
        length = bytes((0x80 | size,))
    elif size < 1 << 16:
        length = b"\xfe" + size.to_bytes(2, "big")
    else:
        length = b"\xff" + size.to_bytes(8, "big")
    return bytes((0x80 | opcode,)) + length + bytes(4) + data


async def hand_made(server: ReactiveSocketServer) -> asyncio.StreamWriter:
    """A WebSocket that answers nothing by itself."""
    _, writer = await by_hand(server)
    return writer


async def by_hand(
    server: ReactiveSocketServer,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The same, to read from, too."""
    reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
    writer.write(upgrade())
    assert (await within(reader.readuntil(b"\r\n\r\n"))).startswith(b"HTTP/1.1 101")
    return reader, writer


async def next_message(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Opcode and data of what the server says next."""
    head = await within(reader.readexactly(2))
    size = head[1]
    if size > 125:
        more = 2 if size == 126 else 8
        size = int.from_bytes(await within(reader.readexactly(more)), "big")
    return head[0] & 0x0F, await within(reader.readexactly(size))


async def silent(server: ReactiveSocketServer) -> asyncio.StreamWriter:
    """The same, with its SETUP."""
    writer = await hand_made(server)
    writer.write(bytes((0x82, 0x80 | len(SETUP), 0, 0, 0, 0)) + SETUP)
    await eventually(lambda: server.connections)
    return writer


async def test_a_peer_that_answers_no_pings_is_given_up() -> None:
    async with serving("ws", config=brisk(ping=0.1)) as server:
        writer = await silent(server)
        (connection,) = server.connections
        await within(connection.wait_closed())
        assert "silent for 0.3 s, and answers no pings" in str(connection.error)
        writer.transport.abort()


@pytest.mark.parametrize(
    ("said", "code"),
    [(masked(b"\x03\xe8", 8), 1000), (masked(b"bad", 3), 1002)],
    ids=["close", "bad"],
)
async def test_a_close_stands_behind_a_message_that_has_left_in_part(
    said: bytes, code: int
) -> None:
    async with serving("ws") as server:
        reader, writer = await by_hand(server)
        writer.write(masked(SETUP))
        writer.write(masked(message(frames.REQUEST_STREAM, 1, b"ever 8000000", n=2)))
        await eventually(lambda: server.connections)
        (connection,) = server.connections
        # It reads nothing for now: a part has left, and the rest has no room.
        await eventually(lambda: connection.snapshot().queued_bytes > 1_000_000)
        was = 0
        while (queued := connection.snapshot().queued_bytes) != was:
            was = queued
            await asyncio.sleep(0.05)
        writer.write(said)
        opcode, data = await next_message(reader)
        assert (opcode, data[12:].strip(b"\0")) == (2, b"")
        while opcode == 2:
            opcode, data = await next_message(reader)
        assert (opcode, data[:2]) == (8, code.to_bytes(2, "big"))
        writer.transport.abort()
        await within(connection.wait_closed())


async def test_a_large_request_may_come_with_the_setup() -> None:
    async with serving("ws") as server:
        reader, writer = await by_hand(server)
        large = message(frames.REQUEST_RESPONSE, 1, b"echo " + b"x" * 100_000)
        writer.write(masked(SETUP) + masked(large))
        assert (await next_message(reader))[1][12:] == b"x" * 100_000
        writer.transport.abort()


async def test_a_large_request_may_be_first_where_no_setup_is_required() -> None:
    async with serving("ws", setup_required=False) as server:
        reader, writer = await by_hand(server)
        writer.write(masked(message(frames.REQUEST_RESPONSE, 1, b"echo " + b"x" * 100_000)))
        assert (await next_message(reader))[1][12:] == b"x" * 100_000
        writer.transport.abort()


@pytest.mark.parametrize("path", ["/", "/nowhere"])
@pytest.mark.parametrize(
    "early",
    [masked(SETUP), masked(b"\x03\xe8", 8), masked(b"hi", 9), masked(b"bad", 3)],
    ids=["message", "close", "ping", "bad"],
)
async def test_frames_before_the_websocket_is_accepted(
    path: str, early: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving("ws") as server:
        reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
        writer.write(upgrade(path) + early)
        assert (await within(reader.read())).startswith(b"HTTP/1.1 400 ")
        writer.transport.abort()
        await eventually(lambda: not server.handshakes)
    assert not [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")]


async def test_a_handshake_counts_in_the_memory_of_the_process() -> None:
    receiving = process().receiving
    gc.collect()  # what earlier tests left counts until it is collected
    before = receiving.used
    async with serving("ws") as server:
        _, writer = await asyncio.open_connection(server.address.host, server.address.port)
        writer.write(upgrade()[:-2] + (b"x: " + b"y" * 4000 + b"\r\n") * 10)
        await eventually(lambda: receiving.used - before > 40_000)
        writer.transport.abort()
        await eventually(lambda: receiving.used == before)


async def test_a_peer_is_pinged_after_a_hold_before_it_is_given_up() -> None:
    """What it said before the hold is old, though it has had no chance to say more."""
    requests: list[ReactiveRequest] = []
    config = brisk(ping=0.3, receive_bytes=4096)
    async with serving("ws", config=config, responder=requests.append) as server:
        reader, writer = await by_hand(server)
        writer.write(masked(SETUP))
        writer.write(masked(message(frames.REQUEST_RESPONSE, 1, bytes(5000))))
        await eventually(lambda: requests)
        (connection,) = server.connections
        await eventually(lambda: not connection.snapshot().reading)
        await asyncio.sleep(1.0)  # more than three times as long as it may be silent
        requests[0].release()
        assert await next_message(reader) == (9, b"")
        writer.write(masked(b"", 10))
        assert await next_message(reader) == (9, b"")
        assert not connection.closed
        writer.transport.abort()


async def test_a_flood_of_pings_costs_one_answer() -> None:
    sending = process().sending
    gc.collect()  # what earlier tests left counts until it is collected
    before = sending.used
    config = brisk(timing={"progress_deadline": 0.5})
    async with serving("ws", config=config) as server:
        writer = await silent(server)
        (connection,) = server.connections
        ping = bytes((0x89, 0x80 | 100, 0, 0, 0, 0)) + bytes(100)
        for _ in range(100):
            writer.write(ping * 1000)
            await asyncio.sleep(0)
        for _ in range(10):
            assert sending.used - before < 100_000
            await asyncio.sleep(0.02)
        writer.transport.abort()
        await within(connection.wait_closed())


async def test_a_setup_that_is_rejected() -> None:
    async with (
        serving("ws", authorize_setup=lambda connection: "no entry") as server,
        web_connect(url(server)) as web,
    ):
        await web.send(SETUP)
        assert await answer(web) == (frames.ERROR, 0, b"REJECTED_SETUP: no entry")
        with pytest.raises(ConnectionClosed) as found:
            await within(web.recv())
        assert found.value.rcvd is not None
        assert found.value.rcvd.code == 1000


async def test_a_refusal_that_ends_with_the_connection() -> None:
    async def busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\ntry later")
        writer.close()

    async with await asyncio.start_server(busy, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectFailed, match="the server answers HTTP 503: try later"):
            await connect(f"reactivesocket+ws://127.0.0.1:{port}")


async def test_a_server_that_speaks_no_websocket() -> None:
    async def bad(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 mail.example.org ESMTP\r\n")
        writer.close()

    async with await asyncio.start_server(bad, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectFailed, match="did not receive a valid HTTP response"):
            await connect(f"reactivesocket+ws://127.0.0.1:{port}")
    async with serving("tcp") as plain:
        with pytest.raises(ConnectFailed, match=r"in the handshake of the WebSocket|HTTP"):
            await connect(f"reactivesocket+ws://127.0.0.1:{plain.address.port}")


async def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "websockets", None)
    text = r"WebSockets need the package websockets: pip install 'aqueduct-arrow\[websocket\]'"
    with pytest.raises(ConfigError, match=text):
        await connect("reactivesocket+ws://127.0.0.1:1")
    with pytest.raises(ConfigError, match=text):
        await serve(None, "reactivesocket+ws://127.0.0.1:0")
    assert websockets
