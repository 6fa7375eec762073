"""Who may resume a link, what an end leaves behind, and memory while connections are cut."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import ssl
import sys
import tempfile
from pathlib import Path

import pytest

from aqueduct import relink
from aqueduct.carriers.certificates import ClientTls
from aqueduct.carriers.tls_stdlib import client_context
from aqueduct.errors import ConnectionLost, LinkLost
from aqueduct.protocol.relink import handshake
from aqueduct.protocol.relink.handshake import Opening
from aqueduct.testing.stream_relay import End, Fate, StreamRelay
from tests.carriers.certificates import Authority
from tests.relink.pairs import BRISK, brisk, eventually, joined, within
from tests.relink.peers import ScriptedListener, ScriptedPeer

NEW = Opening("", 4, 4)


async def idle(connection: relink.RelinkConnection) -> None:
    while await connection.accept() is not None:
        pass


def give_up_links(server: relink.RelinkServer) -> None:
    for each in tuple(server.links):
        each.abandon("the test is over")


def old(peer: ScriptedPeer) -> Opening:
    return dataclasses.replace(NEW, require_old_link=True, old_epoch=peer.epoch, old_link=peer.link)


@pytest.mark.requirement("RL-R18")
async def test_over_tls_the_same_client_certificate_comes_back() -> None:
    us, them = Authority("us"), Authority("them")
    tls = dataclasses.replace(us.server("localhost", "127.0.0.1"), client_ca=them.pem)
    one, two = them.client("one", ca=us.pem), them.client("two", ca=us.pem)
    server = await relink.serve(idle, "aqueduct+tls://127.0.0.1:0", tls=tls, config=BRISK)

    async def dial(shown: ClientTls) -> ScriptedPeer:
        context = client_context(shown, "localhost", "aqueduct-relink")
        assert isinstance(context, ssl.SSLContext)
        port = server.address.port
        streams = await within(
            asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
        )
        return ScriptedPeer(*streams)

    async with server:
        first = await dial(one)
        await first.greet(NEW)
        for shown, link in ((two, 0), (one, first.link)):
            peer = await dial(shown)
            assert await peer.greet(old(first)) == (first.epoch, link)
            peer.close()
        first.close()
        give_up_links(server)


RESUME = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(bytes.fromhex(sys.argv[2]))
data = b""
while len(data) < 24 and (piece := sock.recv(24)):
    data += piece
print(data[16:24].hex())
"""


@pytest.mark.requirement("RL-R18")
async def test_over_a_unix_socket_the_same_user_comes_back() -> None:
    """Another user is tried where this one may start a process for it."""
    users = [os.geteuid(), 65_534] if os.geteuid() == 0 else [os.geteuid()]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        path = f"{folder}/socket"
        server = await relink.serve(idle, f"aqueduct+unix://{path}?mode=0666", config=BRISK)
        async with server:
            first = await ScriptedPeer.connect(server.address)
            await first.greet(NEW)
            wire = handshake.encode_hello() + handshake.encode_opening(old(first))
            for user in reversed(users):
                arguments = (path, wire.hex(), str(user))
                done = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-c", RESUME, *arguments),
                    stdout=asyncio.subprocess.PIPE,
                )
                said, _ = await within(done.communicate())
                link = int.from_bytes(bytes.fromhex(said.decode()), "little")
                assert link == (first.link if user == os.geteuid() else 0)
            first.close()
            give_up_links(server)


async def test_memory_stays_within_the_window_over_many_cuts(tmp_path: Path) -> None:
    """64 MiB over connections of 1 MiB each."""
    cut = Fate(limit=1 << 20, end=End.RESET)
    config = brisk(window_bytes=1 << 20, receive_bytes=1 << 20)
    count, size = 512, 128 << 10
    async with joined("tcp", tmp_path, config, proxy=StreamRelay(up=cut, down=cut)) as pair:

        async def send() -> None:
            for number in range(count):
                await pair.client.channel(1).send(bytes([number % 256]) * size)
            await pair.client.channel(1).close()

        sending = asyncio.create_task(send())
        found = await within(pair.server.accept())
        assert found is not None
        number = most = 0
        async for message in found:
            (part,) = message.parts
            assert bytes(part) == bytes([number % 256]) * size
            number += 1
            held = pair.client.snapshot().held_bytes, pair.server.snapshot().held_bytes
            most = max(most, *held)
        await within(sending)
        assert number == count
        assert pair.client.link.resumes >= 60
        assert most <= (1 << 20) + size + 4096


async def test_who_waits_to_send_hears_that_this_side_closes(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path, brisk(window_messages=1)) as pair:
        out = pair.client.channel(1)
        await out.send(b"never consumed")
        waiting = asyncio.create_task(out.send(b"more"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(pair.client.close(timeout=0.2))
        with pytest.raises(ConnectionLost, match="this side closes") as caught:
            await within(waiting)
        assert caught.value.code == 0
        with pytest.raises(LinkLost) as lost:
            await within(closing)
        assert lost.value.unconsumed == {1: [0]}


async def test_a_transaction_in_a_link_that_closes_is_not_committed(tmp_path: Path) -> None:
    async with joined("tcp", tmp_path, transactions="both") as pair:
        with pytest.raises(ConnectionLost, match="this side closes"):
            async with pair.client.channel(1).transaction() as transaction:
                await transaction.send(b"x")
                closing = asyncio.create_task(pair.client.close())
                await asyncio.sleep(0)
        assert transaction.committed is False
        assert await transaction.result is False
        await pair.server.close()
        await within(closing)
        assert pair.server.error is not None
        assert pair.server.error.code == 0


@pytest.mark.requirement("RL-R16")
@pytest.mark.parametrize("id_size", [0, 4])
async def test_a_link_closes_while_a_transaction_is_open(id_size: int) -> None:
    batches = []

    async def consume(connection: relink.RelinkConnection) -> None:
        async for channel in connection.incoming():
            batches.extend([batch async for batch in channel.transactions()])

    address = "aqueduct+tcp://127.0.0.1:0"
    server = await relink.serve(consume, address, transactions="connector", config=BRISK)
    async with server:
        client = await relink.connect(
            server.address, transactions="connector", id_size=id_size, config=BRISK
        )
        transaction = client.channel(0).transaction()
        await transaction.__aenter__()
        await transaction.send(b"x")
        await within(client.close())
        assert client.error is not None
        assert client.error.code == 0
        with pytest.raises(ConnectionLost):
            await transaction.__aexit__(None)
        assert transaction.committed is False
    assert batches == []


async def test_connecting_that_is_cancelled_leaves_no_link(tmp_path: Path) -> None:
    async with ScriptedListener() as listener:
        connecting = asyncio.create_task(relink.connect(listener.address, config=BRISK))
        peer = await listener.accept()
        await peer.exactly(8)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert await peer.is_closed()


async def test_a_server_that_closes_ends_links_that_have_no_connection(tmp_path: Path) -> None:
    ended: list[LinkLost | ConnectionLost] = []

    async def handler(connection: relink.RelinkConnection) -> None:
        await connection.channel(1).send(b"x")
        try:
            await idle(connection)
        except ConnectionLost as error:
            ended.append(error)

    config = dataclasses.replace(BRISK, timing=dataclasses.replace(BRISK.timing, close_linger=0.2))
    server = await relink.serve(handler, "aqueduct+tcp://127.0.0.1:0", config=config)
    peer = await ScriptedPeer.connect(server.address)
    await peer.greet(NEW)
    await eventually(lambda: server.links)
    peer.close()
    (link,) = server.links
    await eventually(lambda: link.state == "resuming")
    await within(server.close())
    assert [type(error) for error in ended] == [LinkLost]
    assert not server.links
