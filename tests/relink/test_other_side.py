"""What the one other implementation does, played by hand in both roles.

It acknowledges each 0.1 s, closes without waiting, may send messages before its resume, says 2^32-1
where nothing was consumed, and has 1, 2, 3 for ids.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from aqueduct import relink
from aqueduct.errors import LinkLost
from aqueduct.protocol.relink.handshake import Opening
from tests.relink.pairs import BRISK, eventually, within
from tests.relink.peers import (
    ScriptedListener,
    ScriptedPeer,
    ack,
    general,
    message,
    operation,
    packets,
)
from tests.relink.test_bad_input import lost

NEW = Opening("", 4, 4)
NOTHING = (1 << 32) - 1
RESUME = general(packets.RESUME)
SHUTDOWN = general(packets.SHUTDOWN)


@pytest.mark.requirement("RL-R10")
async def test_a_listener_that_acknowledges_by_plain_packets_now_and_then() -> None:
    async with ScriptedListener() as listener:
        connecting = asyncio.create_task(relink.connect(listener.address, config=BRISK))
        peer = await listener.accept()
        await peer.welcome(7, 1)
        client = await within(connecting)
        out = client.channel(1)
        for number in range(3):
            assert await out.send(b"%d" % number) == number
        assert [(await peer.packet()).data for _ in range(3)] == [b"0", b"1", b"2"]
        await asyncio.sleep(0.1)
        peer.say(ack(packets.RECEIVED), ack(packets.RECEIVED), ack(packets.CONSUMED, 2))
        closing = asyncio.create_task(out.close())
        assert (await peer.packet()).type == packets.CLOSE
        peer.say(ack(packets.CLOSED))
        await within(closing)
        # Its shutdown, and it is gone: so is the link, in order, for nothing was outstanding.
        peer.say(SHUTDOWN)
        peer.close()
        again = await listener.accept()
        await again.welcome(7, 0)
        assert await within(client.accept()) is None
        await eventually(lambda: client.error is not None)
        assert client.error is not None
        assert client.error.code == 0


@pytest.mark.requirement("RL-R16")
async def test_a_listener_that_closes_without_waiting_for_our_shutdown_to_be_seen() -> None:
    async with ScriptedListener() as listener:
        connecting = asyncio.create_task(relink.connect(listener.address, config=BRISK))
        peer = await listener.accept()
        await peer.welcome(7, 2)
        client = await within(connecting)
        closing = asyncio.create_task(client.close())
        assert (await peer.packet()).type == packets.SHUTDOWN
        peer.close()
        again = await listener.accept()
        await again.welcome(7, 0)
        await within(closing)
        assert client.error is not None
        assert client.error.code == 0


@pytest.mark.requirement("RL-R11")
async def test_a_listener_that_sends_messages_before_its_resume() -> None:
    async with ScriptedListener() as listener:
        connecting = asyncio.create_task(relink.connect(listener.address, config=BRISK))
        peer = await listener.accept()
        await peer.welcome(7, 3)
        client = await within(connecting)
        peer.say(message(b"one", channel=5), message(b"two", channel=5))
        found = await within(client.accept())
        assert found is not None
        assert bytes((await within(found.receive())).parts[0]) == b"one"
        await client.channel(1).send(b"ours")
        seen = [await peer.packet() for _ in range(2)]
        assert {(each.format, each.data) for each in seen} == {
            (packets.SEQUENCE_ACK, b""),
            (packets.MESSAGE, b"ours"),
        }
        peer.close()
        again = await listener.accept()
        await again.welcome(7)
        received = await again.packet()
        assert (received.type, received.channel, received.sequence) == (packets.RECEIVED, 5, 1)
        # Ours was received before the cut, and nothing of it consumed.
        again.say(message(b"three", channel=5), ack(packets.RECEIVED, 0))
        again.say(ack(packets.CONSUMED, NOTHING), RESUME)
        texts = [bytes((await within(found.receive())).parts[0]) for _ in range(2)]
        assert texts == [b"two", b"three"]
        again.say(ack(packets.CONSUMED, 0))
        await eventually(lambda: client.link.unresolved() == {})
        assert client.snapshot().unacknowledged == 0
        client.abandon("the test is over")


@pytest.mark.requirement("RL-R11")
@pytest.mark.parametrize("resumed", [False, True])
async def test_a_connector_that_shuts_down_and_is_gone(resumed: bool) -> None:
    """Its shutdown may be the first packet of a connection that resumes."""
    got: list[bytes] = []
    seen: list[object] = []

    async def handler(connection: relink.RelinkConnection) -> None:
        async for channel in connection.incoming():
            async for found in channel:
                got.extend(map(bytes, found.parts))
        seen.append("no more channels")

    address = "aqueduct+tcp://127.0.0.1:0"
    async with await relink.serve(handler, address, config=BRISK) as server:
        peer = await ScriptedPeer.connect(server.address)
        await peer.greet(NEW)
        peer.say(message(b"one"), operation(packets.CLOSE))
        while (await peer.packet()).type != packets.CLOSED:
            pass
        if resumed:
            peer.close()
            link = replace(NEW, require_old_link=True, old_epoch=peer.epoch, old_link=peer.link)
            peer = await ScriptedPeer.connect(server.address)
            await peer.greet(link)
            peer.say(SHUTDOWN, RESUME)
        else:
            peer.say(SHUTDOWN)
        await eventually(lambda: seen == ["no more channels"])
        peer.close()
        await eventually(lambda: not server.links)
        assert got == [b"one"]


@pytest.mark.requirement("RL-R7")
async def test_a_connector_that_commits_and_gets_results_by_either_form() -> None:
    async def handler(connection: relink.RelinkConnection) -> None:
        async for channel in connection.incoming():
            async for batch in channel.transactions():
                async with batch:
                    if bytes(batch.messages[0].parts[0]) == b"bad":
                        await batch.uncommitted()

    server = await relink.serve(
        handler, "aqueduct+tcp://127.0.0.1:0", transactions="connector", config=BRISK
    )
    async with server:
        peer = await ScriptedPeer.connect(server.address)
        await peer.greet(replace(NEW, connector_transactions=True))
        peer.say(message(b"good"), operation(packets.COMMIT))
        peer.say(message(b"dropped"), operation(packets.ROLLBACK))
        peer.say(message(b"bad"), message(b"too"), operation(packets.COMMIT, 3))
        results: list[tuple[int, int]] = []
        while len(results) < 2:
            found = await peer.packet()
            if found.type in (packets.COMMITTED, packets.UNCOMMITTED):
                results.append((found.type, found.sequence))
        assert results == [(packets.COMMITTED, 0), (packets.UNCOMMITTED, 3)]
        peer.close()
        for each in tuple(server.links):
            each.abandon("the test is over")


@pytest.mark.requirement("RL-R14")
async def test_a_listener_that_answers_each_message_of_a_commit_by_itself() -> None:
    async with ScriptedListener() as listener:
        connecting = asyncio.create_task(
            relink.connect(listener.address, transactions="connector", config=BRISK)
        )
        peer = await listener.accept()
        await peer.welcome(7, 1)
        client = await within(connecting)
        sent = []
        for _ in range(2):
            async with client.channel(1).transaction() as transaction:
                for _ in range(2):
                    await transaction.send(b"x")
            sent.append(transaction)
        await peer.packets(6)
        peer.say(*[ack(packets.COMMITTED)] * 3, ack(packets.UNCOMMITTED, 3))
        assert [await within(each.result) for each in sent] == [True, False]
        client.abandon("the test is over")


@pytest.mark.requirement("RL-R15")
async def test_a_listener_that_forgets_a_channel_it_has_closed() -> None:
    """It does not answer the close of a channel that it does not know any more."""
    async with ScriptedListener() as listener:
        connecting = asyncio.create_task(relink.connect(listener.address, config=BRISK))
        peer = await listener.accept()
        await peer.welcome(7, 1)
        client = await within(connecting)
        await client.channel(1).send(b"x")
        closing = asyncio.create_task(client.channel(1).close())
        await peer.packet()
        peer.say(ack(packets.CONSUMED, 0))
        assert (await peer.packet()).type == packets.CLOSE
        peer.close()  # its closed is lost
        again = await listener.accept()
        await again.welcome(7)
        again.say(RESUME)
        await within(closing)
        client.abandon("the test is over")


async def test_a_listener_that_has_lost_the_link_and_makes_no_new_one() -> None:
    async with ScriptedListener() as listener:
        connecting = asyncio.create_task(relink.connect(listener.address, config=BRISK))
        peer = await listener.accept()
        await peer.welcome(7, 1)
        client = await within(connecting)
        await client.channel(1).send(b"x")
        await peer.packet()
        peer.close()
        await (await listener.accept()).welcome(7, 2)  # another link than was asked for
        error = await lost(client)
        assert isinstance(error, LinkLost)
        assert (error.why, error.unconsumed) == ("dropped", {1: [0]})


@pytest.mark.requirement("RL-21")
async def test_a_shutdown_leaves_the_channels_that_are_open() -> None:
    got: list[bytes] = []
    ended = asyncio.Event()

    async def handler(connection: relink.RelinkConnection) -> None:
        async for channel in connection.incoming():
            async for found in channel:
                got.extend(map(bytes, found.parts))
        ended.set()

    async with await relink.serve(handler, "aqueduct+tcp://127.0.0.1:0", config=BRISK) as server:
        peer = await ScriptedPeer.connect(server.address)
        await peer.greet(NEW)
        peer.say(message(b"one"), SHUTDOWN)
        await eventually(lambda: got)
        peer.say(message(b"two"))
        await eventually(lambda: len(got) == 2 or ended.is_set())
        assert not ended.is_set()
        peer.say(operation(packets.CLOSE))
        await within(ended.wait())
        assert got == [b"one", b"two"]
        peer.close()


@pytest.mark.requirement("RL-21")
@pytest.mark.parametrize("committed", [True, False])
async def test_a_channel_is_heard_of_though_its_commit_follows_the_shutdown(
    committed: bool,
) -> None:
    got: list[bytes] = []
    ended = asyncio.Event()

    async def handler(connection: relink.RelinkConnection) -> None:
        async for channel in connection.incoming():
            async for batch in channel.transactions():
                async with batch:
                    got.extend(bytes(found.parts[0]) for found in batch.messages)
        ended.set()

    address = "aqueduct+tcp://127.0.0.1:0"
    server = await relink.serve(handler, address, transactions="connector", config=BRISK)
    async with server:
        peer = await ScriptedPeer.connect(server.address)
        await peer.greet(replace(NEW, connector_transactions=True))
        peer.say(message(b"one"), SHUTDOWN)
        assert (await peer.packet()).type == packets.RECEIVED
        assert not ended.is_set()
        if committed:
            peer.say(operation(packets.COMMIT))
            assert (await peer.packet()).type == packets.COMMITTED
        peer.say(operation(packets.CLOSE))  # without a commit this rolls the message back
        while (await peer.packet()).type != packets.CLOSED:
            pass
        await within(ended.wait())
        assert got == ([b"one"] if committed else [])
        peer.close()
