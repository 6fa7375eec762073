"""Many tiny things in one read: others have their turn between them."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from aqueduct.bpmux import BpmuxConnection, BpmuxRequest, BpmuxStream, connect, serve
from aqueduct.config import DEFAULT
from tests.bpmux.pairs import BRISK, FAMILIES, attacked, eventually, place_for, within
from tests.carriers.chunks import Chunk, Kind, RawPeer, chunk

pytestmark = pytest.mark.parametrize("family", FAMILIES)
MANY = 20_000


def tiny(what: str) -> bytes:
    """What one peer says at once: chunks of three to eight bytes."""
    if what == "requests":
        return b"".join(chunk(Kind.OUT_REQUEST, number, b"") for number in range(MANY))
    if what == "messages":
        return chunk(Kind.IN_SINK, 0, b"") * MANY
    if what == "credit":
        return chunk(Kind.IN_STREAM, 0, credit=1) * MANY
    return b"".join(chunk(Kind.OUT_SINK, number, b"", end=b"") for number in range(1, MANY + 1))


@pytest.mark.parametrize("what", ["requests", "messages", "credit", "sinks"])
async def test_tiny_chunks_of_one_connection_do_not_hold_up_another(
    family: str, tmp_path: Path, what: str
) -> None:
    """Counted in turns of the event loop: each has a bounded part of them."""
    turns: list[int] = []
    taken = 0

    async def handler(connection: BpmuxConnection) -> None:
        nonlocal taken
        if what == "messages":
            while True:
                await connection.receive()
                taken += 1
        async for opened in connection:
            taken += 1
            if isinstance(opened, BpmuxRequest):
                await opened.respond(opened.payload)

    async def count() -> None:
        while True:
            turns.append(taken)
            await asyncio.sleep(0)

    async with await serve(handler, place_for(family, tmp_path), config=BRISK) as server:
        peer = await RawPeer.connect(server.place)
        counting = asyncio.create_task(count())
        try:
            await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0))
            await peer.say(tiny(what))
            await peer.say(chunk(Kind.IN_STREAM, 0, ping=True))
            pong = Chunk(Kind.IN_SINK, 0)
            await peer.until(lambda: pong in peer.chunks)
            if what != "credit":
                await eventually(lambda: taken == MANY)
                steps = [after - before for before, after in pairwise(turns)]
                assert max(steps) <= 2 * DEFAULT.bpmux.wake_up
            else:
                assert len(turns) > MANY // DEFAULT.bpmux.wake_up
        finally:
            counting.cancel()
            peer.close()


async def test_what_came_before_the_end_is_told_before_it(family: str, tmp_path: Path) -> None:
    """The peer is gone while most of what it said is not looked at."""
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0))
        await peer.say(chunk(Kind.OUT_SINK, 1, b""))
        stream = await connection.accept()
        assert isinstance(stream, BpmuxStream)
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 1))
        await peer.say(chunk(Kind.OUT_SINK, 1, b"x") * 5000 + chunk(Kind.OUT_SINK, 1, end=b""))
        peer.close()
        assert [payload async for payload in stream] == [b"x"] * 5000
        await within(asyncio.ensure_future(connection.wait_closed()))


async def test_a_handler_that_never_waits_lets_others_run(family: str, tmp_path: Path) -> None:
    """What is there already is taken without a wait, and a pause is made all the same."""
    async with await serve(lambda one: one.wait_closed(), place_for(family, tmp_path)) as server:
        client = await connect(server.place)
        await client.ping()
        (connection,) = server.connections
        for _ in range(300):
            client.open_sink()
        await eventually(lambda: len(connection._opened) == 300)
        ran = 0

        async def other() -> None:
            nonlocal ran
            while True:
                ran += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(300):
            await connection.accept()
        assert ran >= 4
        task.cancel()
        await client.close()


async def test_a_violation_behind_the_loss_of_the_transport_ends_all_waits(
    family: str, tmp_path: Path
) -> None:
    """The transport is gone while what it brought is read in steps, and that is no bpmux."""
    async with attacked(family, tmp_path) as (peer, connection):
        await peer.until(lambda: peer.credit(Kind.IN_STREAM, 0))
        await peer.say(chunk(Kind.IN_SINK, 0, b"") * 3000 + chunk(Kind.IN_STREAM, 77, credit=1))
        peer.close()
        await within(asyncio.ensure_future(connection.wait_closed()))
        assert connection.error is not None
