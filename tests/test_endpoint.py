"""Handles on real event loops: the same code over the memory carrier and over QUIC."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aqueduct
from aqueduct.carriers.quic import ClientTls, dev_certificate
from aqueduct.config import DEFAULT, Flow
from aqueduct.endpoint import Connection, Mode, Receiver, Sender, Server, channel, connect, serve
from aqueduct.errors import (
    Cancelled,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    Finished,
    LocalProtocolError,
    ReceiverClosed,
)

TLS = dev_certificate()


class Peers:
    """A client and a server connection, for as long as a test runs."""

    client: Connection
    server: Connection
    listener: Server
    address: str


@pytest.fixture(params=["memory", "quic"])
async def peers(request: pytest.FixtureRequest) -> AsyncIterator[Peers]:
    found = Peers()
    arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    listen = "memory://endpoint" if request.param == "memory" else "aqueduct://127.0.0.1:0"
    found.listener = await serve(arrived.set_result, listen, tls=TLS)
    found.address = found.listener.addresses[0]
    found.client = await connect(found.address, headers=((b"who", b"me"),))
    async with asyncio.timeout(10):
        found.server = await arrived
    yield found
    await found.client.close()
    await found.listener.close()


async def call(peers: Peers, *handles: Any) -> list[Any]:
    """Sends handles to the server and returns what it got for them."""
    await peers.client.entrypoint.send(b"call", attachments=handles)
    message = await peers.server.entrypoint.receive()
    return [attachment.handle for attachment in message.attachments]


async def test_headers_reach_the_other_side(peers: Peers) -> None:
    assert peers.server.headers == ((b"who", b"me"),)
    assert peers.server.peer and peers.client.peer
    assert peers.client.is_client and not peers.server.is_client


async def test_messages_both_ways_on_channels_in_messages(peers: Peers) -> None:
    to_server, mine = channel()
    back, answers = channel()
    receiver, sender = await call(peers, mine, back)
    assert isinstance(receiver, Receiver) and isinstance(sender, Sender)

    async def echo() -> None:
        async for message in receiver:
            await sender.send(message.payload, headers=message.headers)
        sender.finish()

    task = asyncio.create_task(echo())
    payloads = [random.Random(index).randbytes(index * 1000) for index in range(60)]
    for index, payload in enumerate(payloads):
        await to_server.send(payload, headers=((b"n", b"%d" % index),))
    to_server.finish()
    got = [message async for message in answers]
    assert [bytes(message.payload) for message in got] == payloads
    assert [message.headers for message in got] == [((b"n", b"%d" % n),) for n in range(60)]
    await task
    await to_server.wait_closed()
    with pytest.raises(Finished):
        await answers.receive()


async def test_what_was_sent_before_the_pair_was_networked_goes_first(peers: Peers) -> None:
    sender, receiver = channel()
    await sender.send(b"one")
    await sender.send([b"t", b"wo"])
    inner_sender, inner = channel(oneshot=True)
    await inner_sender.send(b"deep")
    await sender.send(b"three", attachments=[(inner, ((b"h", b"v"),))])
    sender.finish()
    (theirs,) = await call(peers, receiver)
    messages = [message async for message in theirs]
    assert [bytes(message.payload) for message in messages] == [b"one", b"two", b"three"]
    (attachment,) = messages[2].attachments
    assert attachment.headers == ((b"h", b"v"),)
    assert isinstance(attachment.handle, Receiver)
    assert bytes((await attachment.handle.receive()).payload) == b"deep"


async def test_a_pair_works_inside_the_process() -> None:
    sender, receiver = channel()
    inner_sender, inner_receiver = channel(oneshot=True)
    await sender.send([b"a", b"b"], headers=((b"k", b"v"),), attachments=[inner_receiver])
    message = await receiver.receive()
    assert (message.payload, message.headers) == (b"ab", ((b"k", b"v"),))
    await inner_sender.send(b"x")
    handle = message.attachments[0].handle
    assert isinstance(handle, Receiver)
    assert bytes((await handle.receive()).payload) == b"x"
    sender.finish()
    with pytest.raises(Finished):
        await receiver.receive()
    await sender.wait_closed()
    other, theirs = channel()
    theirs.close()
    with pytest.raises(ReceiverClosed):
        await other.send(b"x")
    third, reader = channel()
    third.cancel()
    with pytest.raises(Cancelled):
        await reader.receive()


async def test_misuse_is_refused_with_an_explanation(peers: Peers) -> None:
    sender, receiver = channel()
    (theirs,) = await call(peers, receiver)
    with pytest.raises(LocalProtocolError, match="already sent away"):
        await call(peers, receiver)
    with pytest.raises(LocalProtocolError, match="cannot be sent on"):
        await call(peers, sender)
    with pytest.raises(LocalProtocolError, match="cannot be sent on"):
        await peers.client.entrypoint.send(b"", attachments=[theirs])
    with pytest.raises(LocalProtocolError, match="sent away"):
        await receiver.receive()
    a, b = channel()
    with pytest.raises(LocalProtocolError, match="twice"):
        await call(peers, a, b)
    c, _d = channel()
    with pytest.raises(LocalProtocolError, match="twice"):
        await call(peers, c, c)


async def test_high_water_holds_the_sender_and_reading_lets_it_go(peers: Peers) -> None:
    sender, receiver = channel()
    (theirs,) = await call(peers, receiver)
    size = 1 << 20
    sent = 0

    async def produce() -> None:
        nonlocal sent
        for _ in range(64):
            await sender.send(bytes(size))
            sent += 1
        sender.finish()

    task = asyncio.create_task(produce())
    flow = DEFAULT.flow
    bound = flow.channel_high_water + flow.channel_receive_bytes + flow.read_ahead + (4 << 20)
    still = 0
    while still < 20:
        before = sent
        await asyncio.sleep(0.02)
        still = still + 1 if sent == before else 0
    assert sent >= 8 and sent * size <= bound
    got = 0
    async for message in theirs:
        got += message.size
    await task
    assert got == 64 * size


async def test_unordered_messages_all_arrive(peers: Peers) -> None:
    sender, receiver = channel(mode=Mode.UNORDERED)
    (theirs,) = await call(peers, receiver)
    for index in range(200):
        await sender.send(b"%d" % index)
    sender.finish()
    assert {bytes(m.payload) async for m in theirs} == {b"%d" % n for n in range(200)}
    await sender.wait_closed()


async def test_cancel_close_and_garbage_end_the_other_half(peers: Peers) -> None:
    sender, receiver = channel()
    (theirs,) = await call(peers, receiver)
    sender.cancel()
    with pytest.raises(Cancelled):
        await theirs.receive()
    sender, receiver = channel()
    (theirs,) = await call(peers, receiver)
    theirs.close()
    with pytest.raises(ReceiverClosed):
        await sender.wait_closed()
    sender, receiver = channel()
    (theirs,) = await call(peers, receiver)
    del theirs
    gc.collect()
    with pytest.raises(ReceiverClosed):
        async with asyncio.timeout(10):
            await sender.wait_closed()
    other, mine = channel()
    (theirs,) = await call(peers, other)
    del theirs
    gc.collect()
    with pytest.raises(Cancelled):
        async with asyncio.timeout(10):
            await mine.receive()


async def test_closing_the_connection_lets_queued_data_out(peers: Peers) -> None:
    sender, receiver = channel()
    (theirs,) = await call(peers, receiver)
    payload = random.Random(1).randbytes(3 << 20)
    await sender.send(payload)
    sender.finish()
    closing = asyncio.create_task(peers.client.close(0, "bye"))
    assert bytes((await theirs.receive()).payload) == payload
    async with asyncio.timeout(20):
        await closing
        await peers.server.wait_closed()
    error = peers.server.error
    assert error is not None and (error.code, error.reason, error.remote) == (0, "bye", True)
    with pytest.raises(ConnectionLost):
        await peers.client.entrypoint.send(b"x")


async def test_a_copied_payload_may_change_at_once(peers: Peers) -> None:
    sender, receiver = channel()
    (theirs,) = await call(peers, receiver)
    buffer = bytearray(b"a" * 100_000)
    await sender.send([buffer, buffer], copy=True)
    buffer[:] = b"b" * 100_000
    assert bytes((await theirs.receive()).payload) == b"a" * 200_000


async def test_ping_and_snapshot(peers: Peers) -> None:
    assert 0 <= await peers.client.ping() < 10
    snapshot = peers.client.snapshot()
    assert snapshot["channels"] == 1
    assert all(isinstance(value, (int, float, str)) for value in snapshot.values())


async def test_refused_headers_reach_the_client() -> None:
    def refuse(headers: object, connection: Connection) -> Any:
        raise ValueError("tenant unknown")

    async with await serve(
        lambda _: None, "aqueduct://127.0.0.1:0", tls=TLS, on_headers=refuse
    ) as s:
        with pytest.raises(ConnectionLost, match="tenant unknown") as caught:
            await connect(s.addresses[0])
        assert caught.value.code == 4


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


async def eventually(condition: Any) -> None:
    """Waits until something that the network has to bring about is so."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never came to be so")


async def test_a_dropped_receiver_returns_what_it_had_not_read(peers: Peers) -> None:
    sender, receiver = channel()
    inner_sender, inner = channel()
    (theirs,) = await call(peers, receiver)
    await sender.send(bytes(100_000), attachments=[inner])
    sender.finish()
    await sender.wait_closed()
    assert peers.server.core.snapshot()["budget_used_bytes"] > 100_000
    del theirs  # it had been finished, and nobody read it
    await asyncio.to_thread(gc.collect)
    await eventually(lambda: peers.server.core.snapshot()["budget_used_bytes"] == 0)
    with pytest.raises(ReceiverClosed):
        async with asyncio.timeout(10):
            await inner_sender.wait_closed()
    await eventually(lambda: peers.server.core.channels == peers.client.core.channels == 1)


async def test_handles_dropped_in_another_thread(peers: Peers) -> None:
    sender, receiver = channel()
    handles = await call(peers, receiver)
    await asyncio.to_thread(handles.clear)
    with pytest.raises(ReceiverClosed):
        async with asyncio.timeout(10):
            await sender.wait_closed()


async def test_a_pair_whose_finished_sender_is_gone_is_networked_all_the_same(
    peers: Peers,
) -> None:
    def answered() -> Receiver:
        sender, receiver = channel(oneshot=True)
        sender.send_nowait(b"the answer")
        return receiver

    def abandoned() -> Receiver:
        sender, receiver = channel()
        sender.send_nowait(b"the beginning")
        return receiver

    first, second = await call(peers, answered(), abandoned())
    assert bytes((await first.receive()).payload) == b"the answer"
    with pytest.raises(Cancelled):
        await second.receive()


async def test_a_queued_message_that_cannot_be_sent_ends_its_own_channel(peers: Peers) -> None:
    sender, receiver = channel()
    sender.send_nowait(b"fits")
    sender.send_nowait(bytes(DEFAULT.limits.frame_bytes + 1))
    other, fine = channel()
    theirs, works = await call(peers, receiver, fine)
    with pytest.raises(LocalProtocolError, match="frame_bytes"):
        await sender.wait_closed()
    with pytest.raises(Cancelled):
        while True:
            await theirs.receive()
    await other.send(b"x")
    assert bytes((await works.receive()).payload) == b"x"


async def test_a_local_pair_lets_a_waiting_sender_go() -> None:
    async def fill(sender: Sender) -> None:
        while True:
            await sender.send(bytes(1 << 20))

    sender, receiver = channel()
    task = asyncio.create_task(fill(sender))
    await eventually(lambda: not sender.writable)
    receiver.close()
    with pytest.raises(ReceiverClosed):
        async with asyncio.timeout(10):
            await task
    sender, receiver = channel()
    task = asyncio.create_task(fill(sender))
    await eventually(lambda: not sender.writable)
    sender.cancel()
    with pytest.raises(Cancelled):
        async with asyncio.timeout(10):
            await task
    with pytest.raises(Cancelled):
        await receiver.receive()
    sender, receiver = channel(oneshot=True)
    await sender.send(b"kept")
    sender.cancel()  # too late: it was finished with its message
    assert (await receiver.receive()).payload == b"kept"


async def test_waiting_in_vain_leaves_nothing_behind() -> None:
    _sender, receiver = channel()
    for _ in range(10):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await receiver.receive()
    assert not receiver._waiting._waiters


async def test_a_sent_away_handle_is_not_waited_for(peers: Peers) -> None:
    sender, _receiver = channel()
    await call(peers, sender)
    with pytest.raises(LocalProtocolError, match="sent away"):
        await sender.wait_closed()


async def test_room_is_told_even_if_it_is_there_already(peers: Peers) -> None:
    sender, receiver = channel()
    await call(peers, receiver)
    told = asyncio.Event()
    sender.on_change = told.set
    sender.notify_writable()
    async with asyncio.timeout(10):
        await told.wait()


async def test_a_close_lets_out_what_waits_for_a_stream(peers: Peers) -> None:
    sender, receiver = channel(mode=Mode.UNORDERED)
    (theirs,) = await call(peers, receiver)
    for index in range(500):
        sender.send_nowait(b"%d" % index)
    sender.finish()
    closing = asyncio.create_task(peers.client.close())
    async with asyncio.timeout(20):
        assert {bytes(m.payload) async for m in theirs} == {b"%d" % n for n in range(500)}
        await closing
        await peers.server.wait_closed()
    with pytest.raises(ConnectionLost):
        await peers.client.ping()


async def test_what_a_callback_raises_closes_with_an_internal_error(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = channel()
    (theirs,) = await call(peers, receiver)

    def broken() -> None:
        raise ZeroDivisionError("a fault above")

    theirs.on_change = broken
    await sender.send(b"x")
    async with asyncio.timeout(10):
        await peers.client.wait_closed()
    assert peers.client.error is not None and peers.client.error.code == 6
    assert "a fault above" in caplog.text


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
