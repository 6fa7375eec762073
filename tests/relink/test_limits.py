"""How many links a listener has, and how much they hold together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from aqueduct import relink
from aqueduct.config import Config
from aqueduct.errors import ConnectFailed, LinkLost
from aqueduct.protocol.relink.handshake import Opening
from tests.relink.pairs import BRISK, brisk, eventually, within
from tests.relink.peers import ScriptedPeer, packets


@asynccontextmanager
async def holding(config: Config) -> AsyncIterator[relink.RelinkServer]:
    """A server that reads no messages."""

    async def handler(connection: relink.RelinkConnection) -> None:
        await connection.wait_closed()

    server = await relink.serve(handler, "aqueduct+tcp://127.0.0.1:0", config=config)
    async with server:
        yield server
        for each in tuple(server.links):
            each.abandon("the test is over")


@pytest.mark.parametrize("limit", [{"connections": 2}, {"connections_address": 2}], ids=str)
async def test_links_above_a_limit_are_refused(
    limit: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with holding(replace(BRISK, limits=replace(BRISK.limits, **limit))) as server:
        clients = [await relink.connect(server.address, config=BRISK) for _ in range(2)]
        with pytest.raises(ConnectFailed, match="refuses a link"):
            await relink.connect(server.address, config=BRISK)
        assert f"Limits.{next(iter(limit))}" in caplog.text
        assert len(server.links) == 2
        for each in tuple(server.links):
            each.abandon("it makes room")
        for client in clients:
            await within(client.wait_closed())
        again = await relink.connect(server.address, config=BRISK)
        again.abandon("the test is over")


async def test_the_link_that_holds_most_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async with holding(brisk(links_bytes=400_000)) as server:
        large, small = [await relink.connect(server.address, config=BRISK) for _ in range(2)]
        await large.channel(1).send(bytes(300_000))
        await eventually(lambda: max(link.counted_bytes for link in server.links) > 300_000)
        assert caplog.text == ""
        await small.channel(1).send(bytes(150_000))
        with pytest.raises(LinkLost) as lost:
            await within(large.accept())
        assert lost.value.why == "dropped"
        assert lost.value.unconsumed == {1: [0]}
        assert "Relink.links_bytes is the limit" in caplog.text
        assert small.state == "up"
        (left,) = server.links
        await eventually(lambda: left.counted_bytes > 150_000)
        assert server._held_bytes == left.counted_bytes
        small.abandon("the test is over")


async def test_what_has_come_of_messages_counts_before_they_are_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with holding(brisk(links_bytes=400_000)) as server:
        peers = []
        for _ in range(2):
            peer = await ScriptedPeer.connect(server.address)
            await peer.greet(Opening("", 4, 4))
            peer.say(packets.encode_message_head((1,), 4, [10_000_000]), bytes(250_000))
            peers.append(peer)
        await eventually(lambda: "Relink.links_bytes is the limit" in caplog.text)
        assert len(server.links) == 1
        for peer in peers:
            peer.close()


async def test_what_a_listener_sends_without_a_connection_counts_until_the_end() -> None:
    async with holding(BRISK) as server:
        client = await relink.connect(server.address, config=BRISK)
        (link,) = server.links
        await client.channel(1).send(bytes(1000))
        await link.channel(1).send(bytes(5000))
        await eventually(lambda: link.counted_bytes == link.link.held_bytes > 14_000)
        client.abandon("it is gone")
        await eventually(lambda: link.state == "resuming")
        await link.channel(1).send(bytes(7000))
        await asyncio.sleep(0)
        await eventually(lambda: link.counted_bytes > 21_000)
        assert server._held_bytes == link.counted_bytes
        link.abandon("the end")
        assert server._held_bytes == 0
