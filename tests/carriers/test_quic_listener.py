"""Accepting QUIC connections: crowds, junk, other versions, and what is left afterwards."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aioquic._buffer import Buffer
from aioquic.quic.packet import QuicPacketType, pull_quic_header

from aqueduct.address import Address
from aqueduct.carriers import quic
from aqueduct.carriers.quic.packets import FastConnection
from aqueduct.carriers.quic.tls import client_configuration
from aqueduct.config import DEFAULT
from aqueduct.errors import ConnectFailed
from tests.carriers.users import (
    DEADLINE,
    OVER,
    TLS,
    Recorder,
    linked,
    met,
    record,
    timing,
    transfer,
)

MiB = 1 << 20


@pytest.fixture
async def crowd() -> AsyncIterator[Any]:
    """Half-done handshakes: ``await crowd(listener, validated=...)`` sends a first Initial."""
    loop = asyncio.get_running_loop()
    socks: list[socket.socket] = []

    async def join(listener: Any, *, validated: bool) -> bytes | None:
        port = Address.parse(listener.addresses[0]).port
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        socks.append(sock)
        sock.setblocking(False)
        sock.connect(("127.0.0.1", port))
        address = Address.parse(f"aqueduct://127.0.0.1:{port}?verify=off")
        connection = FastConnection(
            client_configuration(address, DEFAULT, quic.ClientTls(verify=False)),
            streams=16,
            initial_window=1000,
        )
        connection.connect(sock.getpeername(), now=loop.time())
        for _ in range(2 if validated else 1):
            for data, _where in connection.datagrams_to_send(loop.time()):
                sock.send(data)
            answer = await asyncio.wait_for(loop.sock_recv(sock, 65_536), DEADLINE)
            header = pull_quic_header(Buffer(data=answer), host_cid_length=8)
            if header.packet_type != QuicPacketType.RETRY:
                break
            connection.receive_datagram(answer, sock.getpeername(), loop.time())
        return answer

    yield join
    for sock in socks:
        sock.close()


async def test_the_half_open_are_bounded(crowd: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = dataclasses.replace(
        timing(handshake_silence=DEADLINE), quic=dataclasses.replace(DEFAULT.quic, half_open=6)
    )
    accepted: list[Any] = []
    listener = await quic.listen(
        Address.parse("aqueduct://127.0.0.1:0"), config, TLS, accepted.append
    )
    for _ in range(3):
        await crowd(listener, validated=False)
    assert listener.half_open == 3
    for _ in range(5):  # half full: those that do not show their address take no room
        answer = await crowd(listener, validated=False)
        header = pull_quic_header(Buffer(data=answer), host_cid_length=8)
        assert header.packet_type == QuicPacketType.RETRY
    assert listener.half_open == 3
    carrier = await quic.connect(Address.parse(listener.addresses[0]), config)  # and others get in
    await met(lambda: len(accepted) == 1)
    for _ in range(3):
        await crowd(listener, validated=True)
    assert listener.half_open == 6
    with caplog.at_level(logging.WARNING, "aqueduct.carriers.quic"):
        for _ in range(2):
            with pytest.raises(ConnectFailed, match="nothing answers"):
                await quic.connect(
                    Address.parse(listener.addresses[0]), timing(connect_timeout=0.25)
                )
    warnings = [record.getMessage() for record in caplog.records]
    assert len([text for text in warnings if "Quic.half_open" in text]) == 1
    carrier.abandon(OVER)
    listener.close()
    assert listener.half_open == 0
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)


async def test_who_does_not_finish_is_put_out(crowd: Any) -> None:
    config = dataclasses.replace(
        timing(connect_timeout=0.3), quic=dataclasses.replace(DEFAULT.quic, half_open=1)
    )
    listener = await quic.listen(Address.parse("aqueduct://127.0.0.1:0"), config, TLS, record)
    await crowd(listener, validated=True)
    await met(lambda: listener.half_open == 0)
    carrier = await quic.connect(Address.parse(listener.addresses[0]), DEFAULT)  # room again
    await met(lambda: listener.connections == 1 and listener.half_open == 0)
    carrier.abandon(OVER)
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)


async def test_an_initial_packet_of_junk_takes_no_room() -> None:
    listener = await quic.listen(
        Address.parse("aqueduct://127.0.0.1:0"), DEFAULT, TLS, lambda carrier: None
    )
    port = Address.parse(listener.addresses[0]).port
    junk = random.Random(1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("127.0.0.1", port))
        for _ in range(20):
            head = b"\xc0\x00\x00\x00\x01\x08" + junk.randbytes(8) + b"\x08" + junk.randbytes(8)
            sock.send(head + b"\x00\x44\x80" + junk.randbytes(0x480) + junk.randbytes(100))
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    listener._on_carrier = accepted.set_result
    carrier = await quic.connect(Address.parse(listener.addresses[0]), DEFAULT)
    await accepted
    assert listener.half_open == 0
    assert listener.connections == 1
    carrier.abandon(OVER)
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)


async def test_an_unknown_version_is_answered_if_it_is_no_amplification() -> None:
    listener = await quic.listen(
        Address.parse("aqueduct://127.0.0.1:0"), DEFAULT, TLS, lambda carrier: None
    )
    loop = asyncio.get_running_loop()
    head = b"\xc0\x1a\x2a\x3a\x4a\x04abcd\x04efgh"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.connect(("127.0.0.1", Address.parse(listener.addresses[0]).port))
        sock.send(head + bytes(500))  # too short for an answer
        sock.send(b"\xc0\x00\x00\x00\x00\x04abcd\x04wxyz" + bytes(1300))  # itself an answer
        sock.send(head + bytes(1300))
        answer = await asyncio.wait_for(loop.sock_recv(sock, 2000), DEADLINE)
        with pytest.raises(BlockingIOError):
            sock.recv(2000)
    header = pull_quic_header(Buffer(data=answer), host_cid_length=8)
    assert header.packet_type == QuicPacketType.VERSION_NEGOTIATION
    assert (header.destination_cid, header.source_cid) == (b"efgh", b"abcd")
    assert 1 in header.supported_versions
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)


async def test_a_closed_listener_keeps_its_connections() -> None:
    async with linked("quic") as pair:
        await transfer(pair, 1000)
        pair.listener.close()
        with pytest.raises(ConnectFailed, match="nothing answers"):
            await quic.connect(
                Address.parse(pair.listener.addresses[0]), timing(connect_timeout=0.3)
            )
        await transfer(pair, MiB, first=2)
        waiting = asyncio.create_task(pair.listener.wait_closed())
        pair.client.carrier.close(0, "")
        await asyncio.wait_for(waiting, DEADLINE)
        with pytest.raises(ConnectFailed, match="refused"):
            await quic.connect(Address.parse(pair.listener.addresses[0]), DEFAULT)


async def test_nothing_of_an_ended_connection_is_kept() -> None:
    listener = await quic.listen(Address.parse("aqueduct://127.0.0.1:0"), DEFAULT, TLS, record)
    door = listener._doors[0]
    for _ in range(3):
        carrier = await quic.connect(Address.parse(listener.addresses[0]), DEFAULT)
        user = Recorder(carrier, DEFAULT)
        await user.until(lambda: user.begun)  # noqa: B023
        carrier.close(0, "", linger=5)
        await met(lambda: not listener.connections)
        assert not door._routes
        assert not listener._carriers
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)


async def test_many_connections_on_one_socket() -> None:
    users: list[Recorder] = []
    listener = await quic.listen(
        Address.parse("aqueduct://127.0.0.1:0"),
        DEFAULT,
        TLS,
        lambda carrier: users.append(Recorder(carrier, DEFAULT)),
    )
    address = Address.parse(listener.addresses[0])
    carriers = await asyncio.gather(*(quic.connect(address, DEFAULT) for _ in range(40)))
    clients = [Recorder(carrier, DEFAULT) for carrier in carriers]
    sent = [random.Random(number).randbytes(50_000 + number) for number in range(40)]
    for client, data in zip(clients, sent, strict=True):
        await client.until(lambda: client.begun)  # noqa: B023
        client.send(0, data, fin=True)
    await met(lambda: len(users) == 40)
    for user in users:
        await user.until_ended(0)
    assert sorted(bytes(user.data[0]) for user in users) == sorted(sent)
    for carrier in carriers:
        carrier.abandon(OVER)
    listener.close()
    await asyncio.wait_for(listener.wait_closed(), DEADLINE)
