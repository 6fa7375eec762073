"""``connect`` and ``serve``: what they refuse and say, and connections that nobody uses.

What channels do on a connection is shown by ``tests/channels``, over every carrier.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import socket
import threading
from contextlib import suppress
from typing import Any

import pytest

import aqueduct
from aqueduct.address import Address
from aqueduct.carriers import quic, stream
from aqueduct.carriers.quic import ClientTls, dev_certificate
from aqueduct.client.loop_thread import LoopThread
from aqueduct.config import DEFAULT, Flow
from aqueduct.endpoint import Connection, Mode, Receiver, Sender, Server, channel, connect, serve
from aqueduct.endpoint.channel import Headers
from aqueduct.errors import (
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    Finished,
    LocalProtocolError,
)
from tests.carriers.users import OVER, record
from tests.support.calls import config
from tests.support.endpoints import eventually

TLS = dev_certificate()


async def test_refused_headers_reach_the_client() -> None:
    def refuse(headers: object, connection: Connection) -> Any:
        raise ValueError("tenant unknown")

    async with await serve(
        lambda _: None, "aqueduct://127.0.0.1:0", tls=TLS, on_headers=refuse
    ) as s:
        with pytest.raises(ConnectionLost, match="tenant unknown") as caught:
            await connect(s.addresses[0])
        assert caught.value.code == 4


async def test_the_hook_for_connection_headers_may_say_true_or_false() -> None:
    def only_friends(headers: Headers, connection: Connection) -> bool:
        return (b"who", b"a friend") in headers

    async with await serve(
        lambda _: None, "memory://friends", on_headers=only_friends, headers=((b"we", b"us"),)
    ) as server:
        client = await connect(server.addresses[0], headers=((b"who", b"a friend"),))
        assert client.headers == ((b"we", b"us"),)
        await client.close()
        with pytest.raises(ConnectionLost, match="does not allow the connection") as caught:
            await connect(server.addresses[0])
        assert caught.value.code == 4


@pytest.mark.parametrize("answer", [None, 1, 0, "yes", ("k", "v"), NotImplemented], ids=repr)
async def test_any_other_answer_of_the_hook_for_connection_headers_refuses(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with await serve(lambda _: None, "memory://odd", on_headers=lambda *_: answer) as server:
        with pytest.raises(ConnectionLost):
            await connect(server.addresses[0])
    (record,) = (one for one in caplog.records if one.levelname == "ERROR")
    assert f"on_headers returned {answer!r}" in record.getMessage()


async def test_a_coroutine_function_cannot_decide_about_connection_headers() -> None:
    async def decide(headers: Headers, connection: Connection) -> bool:
        return True

    decide_any: Any = decide
    with pytest.raises(ConfigError, match="on_headers is the coroutine function"):
        await serve(lambda _: None, "memory://waiting", on_headers=decide_any)


async def test_a_server_without_certificate_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="certificate"):
        await serve(lambda _: None, "aqueduct://127.0.0.1:0")
    with pytest.raises(ConfigError, match="at least one address"):
        await serve(lambda _: None, [])


async def test_a_wrong_fingerprint_is_named() -> None:
    async with await serve(lambda _: None, "aqueduct://127.0.0.1:0", tls=TLS) as server:
        address = server.addresses[0].partition("?")[0]
        with pytest.raises(ConnectFailed, match="fingerprint"):
            await connect(address, tls=ClientTls(fingerprint="sha256:" + "0" * 64))


async def test_an_idle_connection_with_an_open_channel_outlives_the_idle_timeout() -> None:
    timing = dataclasses.replace(DEFAULT.timing, idle_timeout=1.0, ping_interval=0.2)
    config = dataclasses.replace(DEFAULT, timing=timing, flow=Flow())
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    async with await serve(
        arrived.set_result, "aqueduct://127.0.0.1:0", tls=TLS, config=config
    ) as server:
        client = await connect(server.addresses[0], config=config)
        sender, receiver = channel()
        await client.entrypoint.send(b"", attachments=[receiver])
        theirs = (await (await arrived).entrypoint.receive()).attachments[0].handle
        await asyncio.sleep(2.5)
        await sender.send(b"still here")
        assert bytes((await theirs.receive()).payload) == b"still here"
        sender.finish()
        await sender.wait_closed()
        # With nothing open there is nothing to keep alive.
        async with asyncio.timeout(10):
            await client.wait_closed()
        assert client.error is not None and "nothing was heard" in str(client.error)


BAD_HEADERS: Any = [((b"", b"v"),), (("text", b"v"),), ((b"k", 5),), None]


@pytest.mark.parametrize("headers", BAD_HEADERS)
async def test_headers_that_cannot_be_sent(headers: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises((LocalProtocolError, TypeError)):
        await connect("memory://nobody", headers=headers)
    with pytest.raises((LocalProtocolError, TypeError)):
        await serve(lambda _: None, "memory://somebody", headers=headers)
    async with await serve(
        lambda _: None, "memory://somebody", on_headers=lambda *_: headers
    ) as server:
        with pytest.raises(ConnectionLost) as caught:
            await connect(server.addresses[0])
        assert caught.value.code == 6
    assert "cannot be sent" in caplog.text


def test_the_channels_are_at_the_top_of_the_package() -> None:
    assert aqueduct.connect is connect
    assert aqueduct.serve is serve
    assert aqueduct.channel is channel
    assert (aqueduct.Sender, aqueduct.Receiver, aqueduct.Mode) == (Sender, Receiver, Mode)
    assert aqueduct.Connection is Connection and aqueduct.Server is Server
    assert aqueduct.Message.__name__ == "Message"


async def test_pings_come_in_time_whatever_the_phase_of_the_last_input() -> None:
    # Just above half of the idle timeout: a check at fixed times would find the last input too
    # young once, and be too late the next time.
    timing = dataclasses.replace(DEFAULT.timing, idle_timeout=2.0, ping_interval=1.4)
    config = dataclasses.replace(DEFAULT, timing=timing)
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    async with await serve(
        arrived.set_result, "aqueduct://127.0.0.1:0", tls=TLS, config=config
    ) as server:
        client = await connect(server.addresses[0], config=config)
        sender, receiver = channel()
        await client.entrypoint.send(b"", attachments=[receiver])
        theirs = (await (await arrived).entrypoint.receive()).attachments[0].handle
        await asyncio.sleep(0.3)
        await client.ping()
        await (await arrived).ping()
        await asyncio.sleep(4.5)
        await sender.send(b"still here")
        assert isinstance(theirs, Receiver)
        assert bytes((await theirs.receive()).payload) == b"still here"
        await client.close()


@pytest.mark.parametrize("listen", ["memory://slots", "aqueduct://127.0.0.1:0"])
async def test_slots_of_channels_that_ended_together_are_not_given_twice(listen: str) -> None:
    """The stream that ended returns its slot; what was lent for its channel must not stay."""
    config = dataclasses.replace(DEFAULT, flow=Flow(streams=16))
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    async with (
        await serve(arrived.set_result, listen, config=config, tls=TLS) as listener,
        await connect(listener.addresses[0], config=config) as client,
    ):
        server = await arrived
        pairs = [channel() for _ in range(200)]
        await client.entrypoint.send(attachments=[receiver for _, receiver in pairs])
        message = await server.entrypoint.receive()
        for sender, _ in pairs:
            await sender.send(b"x")
        receivers = [attachment.handle for attachment in message.attachments]
        for receiver in receivers:
            assert (await receiver.receive()).payload == b"x"
        for sender, _ in pairs:
            sender.finish()
        for receiver in receivers:
            with pytest.raises(Finished):
                await receiver.receive()
        async with asyncio.timeout(20):
            for sender, _ in pairs:
                await sender.wait_closed()
        assert client.carrier.openable <= 16 + 1  # one lasts: that of the entrypoint


def sockets_to(port: int) -> list[socket.socket]:
    """The open sockets of this process whose peer has that port."""
    found = []
    for each in gc.get_objects():
        if isinstance(each, socket.socket) and each.family == socket.AF_INET:
            with suppress(OSError):
                if each.getpeername()[1] == port:
                    found.append(each)
    return found


@pytest.mark.parametrize("how", ["cancelled", "too late"])
@pytest.mark.parametrize("scheme", ["aqueduct+tcp", "aqueduct"])
async def test_an_attempt_that_is_given_up_leaves_no_socket(scheme: str, how: str) -> None:
    """The event loop may end right after it, and the peer does not answer."""
    carriers: list[Any] = []
    thread, go_on = LoopThread("test-silent"), threading.Event()

    def took(carrier: Any) -> None:  # and sends no headers of Aqueduct
        carriers.append(carrier)
        record(carrier)

    async def end() -> None:
        for carrier in carriers:
            carrier.abandon(OVER)
        listener.close()
        await listener.wait_closed()

    at = Address.parse(f"{scheme}://127.0.0.1:0")
    listen: Any = quic.listen if scheme == "aqueduct" else stream.listen
    listener = thread.run(listen(at, DEFAULT, TLS if scheme == "aqueduct" else None, took))
    try:
        address = listener.addresses[0]
        port = Address.parse(address).port
        settings = config(timing={"connect_timeout": 1 if how == "too late" else 60})
        connecting = asyncio.ensure_future(connect(address, config=settings))
        await eventually(lambda: carriers)
        await asyncio.sleep(0.1)
        thread.call(go_on.wait, 20)
        assert len(sockets_to(port)) == 1
        if how == "cancelled":
            connecting.cancel()
        await asyncio.wait((connecting,))
        assert sockets_to(port) == []
        if how == "cancelled":
            assert connecting.cancelled()
        else:
            with pytest.raises(ConnectFailed, match="no Aqueduct connection headers came"):
                await connecting
    finally:
        go_on.set()
        thread.run(end())
        thread.stop()
